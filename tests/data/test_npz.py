import io
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmoe.config import parse_config
from fedmoe.data.npz import load_npz_folder
from fedmoe.errors import DataError
from fedmoe.federations import build_federation

ANY_TMP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def npz(save=np.savez, **arrays) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def client(rows: int = 3, **changes) -> bytes:
    return npz(**{"x": np.ones((rows, 2)), "y": np.arange(rows), **changes})


def refusal(folder, content: bytes | None = None) -> str:
    """The message must name the file (or the folder) and end with what to do."""
    path = folder / "b.npz" if content is not None else folder
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_npz_folder(folder)
    message = str(caught.value)
    assert str(path) in message and message.endswith(".")
    return message


def test_clients_come_back_sorted_by_name(tmp_path):
    (tmp_path / "b.npz").write_bytes(client(2))
    (tmp_path / "a.npz").write_bytes(npz(np.savez_compressed, x=np.zeros((4, 2), order="F"), y=np.zeros(4, np.uint8)))
    (tmp_path / ".hidden").write_text("left by a file manager")
    clients = load_npz_folder(tmp_path)
    assert list(clients) == ["a", "b"]
    x, y = clients["b"]["train"]
    assert (x.dtype, x.tolist(), y.dtype, y.tolist()) == (torch.float32, [[1, 1], [1, 1]], torch.int64, [0, 1])


def test_a_file_may_have_parts_of_its_own(tmp_path):
    (tmp_path / "a.npz").write_bytes(client(3, x_test=np.zeros((2, 2)), y_test=np.array([1, 0])))
    (tmp_path / "b.npz").write_bytes(client(4, x_validation=np.zeros((1, 2)), y_validation=np.array([1])))
    parts = load_npz_folder(tmp_path)
    assert list(parts["a"]) == ["train", "test"] and parts["a"]["test"][1].tolist() == [1, 0]
    assert list(parts["b"]) == ["train", "validation"] and len(parts["b"]["validation"][1]) == 1
    federation = build_federation(parse_config({"data": {"name": "npz", "folder": str(tmp_path), "num_classes": 4}}))
    records = federation.federation.load(0)
    assert len(records.test.y) == 2 and len(records.train.y) + len(records.validation.y) == 3


def test_labels_may_be_words(tmp_path):
    (tmp_path / "a.npz").write_bytes(client(3, y=np.array(["sit", "walk", "sit"])))
    (tmp_path / "b.npz").write_bytes(client(2, y=np.array(["sit", "climb"]), x_test=np.ones((1, 2)), y_test=["walk"]))
    federation = build_federation(parse_config({"data": {"name": "npz", "folder": str(tmp_path)}})).federation
    assert federation.class_names == ("climb", "sit", "walk") and federation.load(1).test.y.tolist() == [2]
    (tmp_path / "b.npz").write_bytes(client(2))
    assert "labels of shape () of torch.int64, but a.npz has" in refusal(tmp_path).replace("\n", "")


def test_labels_that_are_no_text_are_refused(tmp_path):
    broken = np.frombuffer(b"\xff\xff\xff\x7f" * 3, "<U1")
    assert "y holds bytes that are no text" in refusal(tmp_path, client(3, y=broken))


@pytest.mark.parametrize("arrays", [{"x_test": np.zeros((2, 2))}, {"y_test": np.zeros(2)}, {"x_tset": np.zeros(2)}])
def test_half_a_part_is_refused(tmp_path, arrays):
    assert "not x and y (and, if it has them, x_test and y_test" in refusal(tmp_path, client(**arrays))


def test_a_part_of_another_shape_or_without_rows_is_refused(tmp_path):
    assert "rows of shape (3,)" in refusal(tmp_path, client(x_test=np.zeros((2, 3)), y_test=np.zeros(2, np.int64)))
    assert "no rows in x_test" in refusal(tmp_path, client(x_test=np.zeros((0, 2)), y_test=np.zeros(0, np.int64)))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros((1, 2), np.uint8), torch.uint8),
        (np.zeros((1, 2), np.int16), torch.int64),
        (np.zeros((1, 2), ">f8"), torch.float32),
        (np.zeros((1, 2), bool), torch.int64),
    ],
)
def test_numbers_take_a_type_that_models_read(tmp_path, array, dtype):
    (tmp_path / "a.npz").write_bytes(npz(x=array, y=np.zeros(1, np.int8)))
    assert load_npz_folder(tmp_path)["a"]["train"][0].dtype == dtype


def test_targets_of_a_regression_are_floats(tmp_path):
    (tmp_path / "a.npz").write_bytes(client(2, y=np.array([-0.5, 2.5])))
    y = load_npz_folder(tmp_path)["a"]["train"][1]
    assert (y.dtype, y.tolist()) == (torch.float32, [-0.5, 2.5])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (client(x=np.ones((2, 2))), "x has shape (2, 2) and y (3,)"),
        (client(y=np.zeros((3, 1, 1))), "y (3, 1, 1)"),
        (client(x=np.array(1.0)), "x has shape ()"),
        (client(0), "no rows"),
        (client(y=np.array([0, 1, -1])), "row 2: the label is -1"),
        (client(x=np.array([[0, 0], [0, np.nan], [0, 0]])), "row 1: x holds NaN"),
        (client(x=np.full((3, 2), 1e300)), "row 0: x holds NaN or infinity"),
        (client(y=np.array([0, np.inf, 1])), "row 1: y holds NaN"),
        (client(y=np.array([0, 1, 2**64 - 1], np.uint64)), "too large"),
        (client(z=np.zeros(1)), "holds x, y, z, not x and y"),
        (npz(x=np.zeros(1)), "not x and y"),
        (npz(), "no array"),
        (client(x=np.array(["a", "b", "c"])), "not numbers"),
        (client(x=np.zeros((3, 2), complex)), "not numbers"),
        (client(x=np.array([object()] * 3)[:0]), "not numbers"),
        (b"not a zip", "not a sound .npz"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, content, words):
    assert words in refusal(tmp_path, content)


def test_pickles_are_not_opened(tmp_path):
    opened = []

    class Trap:
        def __reduce__(self):
            return (opened.append, (1,))

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + pickle.dumps(Trap()))
    assert "not numbers" in refusal(tmp_path, file.getvalue())
    assert not opened


def test_a_header_that_promises_terabytes_takes_no_memory(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(8))
    tracemalloc.start()
    try:
        assert "needs 8000000000000 bytes, has 8" in refusal(tmp_path, file.getvalue())
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_archive_that_promises_terabytes_is_refused(tmp_path):
    content = bytearray(client())
    at = content.index(b"PK\x01\x02") + 24
    content[at : at + 4] = struct.pack("<I", 0xFFFFFFF0)
    assert "more than" in refusal(tmp_path, bytes(content))


@ANY_TMP
@given(data=st.data())
def test_a_file_cut_or_changed_anywhere_never_ends_otherwise(tmp_path, data):
    content = bytearray(
        npz(data.draw(st.sampled_from([np.savez, np.savez_compressed])), x=np.ones((3, 2)), y=np.arange(3))
    )
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        refusal(tmp_path, bytes(content[:at]))
        return
    content[at] ^= data.draw(st.integers(1, 255))
    (tmp_path / "b.npz").write_bytes(content)
    try:
        load_npz_folder(tmp_path)
    except DataError as error:
        assert str(tmp_path / "b.npz") in str(error)


@ANY_TMP
@given(header=st.binary(max_size=120))
def test_any_array_header_is_read_or_refused(tmp_path, header):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    refusal(tmp_path, file.getvalue())


def test_clients_that_differ_are_named_side_by_side(tmp_path):
    (tmp_path / "a.npz").write_bytes(client())
    assert "but a.npz has rows of shape (2,)" in refusal(tmp_path, client(x=np.ones((3, 5))))
    assert "labels of shape () of torch.float32" in refusal(tmp_path, client(y=np.array([0.5, 1, 2])))


def test_a_folder_with_something_else_or_nothing_is_refused(tmp_path):
    assert "no .npz file" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "holds notes.txt" in refusal(tmp_path)
    assert "not a folder" in refusal(tmp_path / "absent")
