"""NumPy's .npz, read without trust: no pickles, and no more memory than the file's own bytes account for."""

import io
import lzma
import math
import struct
import sys
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.data.formats import LARGEST, read_content, read_up_to
from fedmoe.errors import DataError

Arrays = dict[str, NDArray[np.generic]]
Labels = Tensor | NDArray[np.str_]
PartArrays = dict[str, tuple[Tensor, Labels]]  # x and y of "train", and if given of "validation" and "test"
NPZ_REMEDY = "Write it again with numpy.savez(path, x=..., y=...), arrays of numbers; labels may be words."
UNSOUND = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    tokenize.TokenError,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,  # an encrypted member, or (NotImplementedError) an unknown way of packing
    LookupError,
    SyntaxError,
    TypeError,
    ValueError,
    OverflowError,
)


def read_npz(path: Path, largest: int = LARGEST) -> Arrays:
    """The arrays of a file by name. The archive's and the arrays' stated sizes are checked before they are trusted."""
    content = read_content(path, largest)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > largest:
                raise ValueError(f"its arrays would take more than {largest} bytes")
            return {name.removesuffix(".npy"): _read_member(archive, name, largest) for name in archive.namelist()}
    except UNSOUND as error:
        raise DataError(f"{path} is not a sound .npz file ({error}). {NPZ_REMEDY}") from error


def _read_member(archive: zipfile.ZipFile, name: str, largest: int) -> NDArray[np.generic]:
    with archive.open(name) as member:
        file = io.BytesIO(read_up_to(member, largest))
    version = npy.read_magic(file)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read_header is None:
        raise ValueError(f"array {name} has format {version}")
    shape, by_columns, dtype = read_header(file)
    if dtype.kind not in ("biufU" if name.startswith("y") else "biuf"):
        raise ValueError(f"array {name} holds {dtype}, not numbers")
    rest = len(file.getbuffer()) - file.tell()
    if min(shape, default=0) < 0 or rest != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"array {name} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes, has {rest}")
    flat: NDArray[np.generic] = np.frombuffer(file.getvalue(), dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")


def load_npz_folder(path: Path) -> dict[str, PartArrays]:
    """One client per file `name.npz` with arrays `x` (N, ...) and `y` (N,) or (N, T), sorted by file name.

    A file may have a test part of its own, `x_test` and `y_test`, and likewise `x_validation` and `y_validation`.
    Floats become float32, whole numbers int64 (x as bytes stays so). Labels are whole numbers from 0, or words; for a
    regression, floats. Files that start with a dot are passed over; any other file is refused, lest it be forgotten.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder. Set data.folder to a folder with one .npz file per client.")
    files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    unknown = [file.name for file in files if file.suffix != ".npz"]
    if unknown:
        raise DataError(f"{path} holds {unknown[0]}, which is no client's .npz file. Move it out of the folder.")
    if not files:
        raise DataError(f"{path} holds no .npz file. Put one per client there, with arrays x and y.")
    clients = {file.stem: _read_client(file) for file in files}
    _require_alike(clients, files)
    return clients


def _read_client(path: Path) -> PartArrays:
    arrays = read_npz(path)
    parts = {"train": "", **{part: f"_{part}" for part in ("validation", "test") if f"x_{part}" in arrays}}
    if set(arrays) != {f"{name}{ending}" for ending in parts.values() for name in ("x", "y")}:
        raise DataError(
            f"{path} holds {', '.join(sorted(arrays)) or 'no array'}, not x and y (and, if it has them, x_test and "
            f"y_test, x_validation and y_validation). {NPZ_REMEDY}"
        )
    return {part: _read_part(path, arrays, ending) for part, ending in parts.items()}


def _read_part(path: Path, arrays: Arrays, ending: str) -> tuple[Tensor, Labels]:
    x_name, y_name = f"x{ending}", f"y{ending}"
    if arrays[y_name].ndim not in (1, 2) or arrays[x_name].ndim < 1 or len(arrays[x_name]) != len(arrays[y_name]):
        shapes = f"{x_name} has shape {arrays[x_name].shape} and {y_name} {arrays[y_name].shape}"
        raise DataError(f"{path}: {shapes}. Give one row of x and one of y per example.")
    if not len(arrays[y_name]):
        raise DataError(f"{path} has no rows in {x_name}. Give at least one example, or remove it.")
    x = _as_tensor(arrays[x_name], x_name, path)
    if arrays[y_name].dtype.kind == "U":
        return x, _as_words(arrays[y_name], y_name, path)
    y = _as_tensor(arrays[y_name], y_name, path)
    if not y.is_floating_point() and int(y.min()) < 0:
        row = int((y < 0).nonzero()[0, 0])
        raise DataError(
            f"{path}, row {row}: the label is {y[row].tolist()}. Number the classes from 0; numbers that are to be "
            "predicted are written as floats."
        )
    return x, y


def _as_tensor(array: NDArray[np.generic], name: str, path: Path) -> Tensor:
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
        raise DataError(f"{path}: {name} holds {array.max()}, too large for int64. Use smaller numbers.")
    bytes_kept = name.startswith("x") and array.dtype == np.uint8
    dtype = np.float32 if array.dtype.kind == "f" else np.uint8 if bytes_kept else np.int64
    with np.errstate(over="ignore"):
        values = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype).copy())
    broken = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero()
    if len(broken):
        raise DataError(
            f"{path}, row {int(broken[0])}: {name} holds NaN or infinity (as float32). Fix or drop the row."
        )
    return values


def _as_words(array: NDArray[np.generic], name: str, path: Path) -> NDArray[np.str_]:
    """Only of characters: NumPy takes any four bytes for one."""
    codes = np.frombuffer(array.tobytes(), f"{array.dtype.byteorder}u4")
    if ((codes > sys.maxunicode) | ((codes >= 0xD800) & (codes <= 0xDFFF))).any():
        raise DataError(f"{path}: {name} holds bytes that are no text. {NPZ_REMEDY}")
    return array.astype(np.str_)


def _require_alike(clients: dict[str, PartArrays], files: list[Path]) -> None:
    """Models read all clients alike, so their examples have one shape and one kind of number."""
    shown = "rows of shape {} of {} with labels of shape {} of {}"
    forms = [
        (file, (tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype if isinstance(y, Tensor) else "words"))
        for file, parts in zip(files, clients.values(), strict=True)
        for x, y in parts.values()
    ]
    for file, form in forms:
        if form != forms[0][1]:
            raise DataError(
                f"{file} has {shown.format(*form)}, but {files[0].name} has {shown.format(*forms[0][1])}. "
                "Give every client's examples the same shape and kind of numbers."
            )
