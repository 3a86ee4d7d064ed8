import gzip
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmoe.data.formats import CIFAR_RECORD, LARGEST, parse_cifar, parse_idx, read_content
from fedmoe.errors import DataError

ANY_TMP = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_idx(path: Path, largest: int = LARGEST) -> torch.Tensor:
    return parse_idx(read_content(path, largest), path)


def read_cifar(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return parse_cifar(read_content(path), path)


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def images(rows: int = 5) -> np.ndarray:
    return np.arange(rows * 6, dtype=np.uint8).reshape(rows, 2, 3)


def write_gz(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, mtime=0))
    return path


def cifar_bytes(labels: list[int]) -> bytes:
    records = np.random.default_rng(0).integers(0, 256, (len(labels), CIFAR_RECORD), dtype=np.uint8)
    records[:, 0] = labels
    return records.tobytes()


def refusal(read, path: Path) -> str:
    """The message of the refusal: it must name the file and end with what to do."""
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    return message


class TestIdx:
    @pytest.mark.parametrize("name", ["a.gz", "a-ubyte"])
    def test_values_come_back_packed_or_not(self, tmp_path, name):
        path = tmp_path / name
        path.write_bytes(gzip.compress(idx_bytes(images())) if name.endswith(".gz") else idx_bytes(images()))
        values = read_idx(path)
        assert values.dtype == torch.uint8
        assert values.numpy().tolist() == images().tolist()

    @ANY_TMP
    @given(data=st.data())
    def test_a_file_cut_anywhere_is_refused(self, tmp_path, data):
        content = idx_bytes(images())
        cut = data.draw(st.integers(0, len(content) - 1))
        assert "download it again" in refusal(read_idx, write_gz(tmp_path / "cut.gz", content[:cut]))

    @ANY_TMP
    @given(data=st.data())
    def test_an_archive_cut_anywhere_is_refused(self, tmp_path, data):
        packed = gzip.compress(idx_bytes(images()))
        path = tmp_path / "cut.gz"
        path.write_bytes(packed[: data.draw(st.integers(0, len(packed) - 1))])
        refusal(read_idx, path)

    @ANY_TMP
    @given(content=st.binary(max_size=200))
    def test_random_bytes_are_refused_with_an_explanation(self, tmp_path, content):
        path = tmp_path / "any.gz"
        path.write_bytes(content)
        refusal(read_idx, path)

    def test_a_short_file_is_reported_with_the_bytes_expected_and_found(self, tmp_path):
        message = refusal(read_idx, write_gz(tmp_path / "a.gz", idx_bytes(images())[:-7]))
        assert "truncated" in message and "expected 46 bytes, found 39" in message

    def test_a_file_with_more_than_its_header_says_is_refused(self, tmp_path):
        assert "too long" in refusal(read_idx, write_gz(tmp_path / "a.gz", idx_bytes(images()) + b"x"))

    @pytest.mark.parametrize("magic", [b"\1\0\x08\1", b"\0\0\x0d\1", b"\0\0\x08\0", b"PK\3\4"])
    def test_a_wrong_magic_is_shown(self, tmp_path, magic):
        message = refusal(read_idx, write_gz(tmp_path / "a.gz", magic + bytes(8)))
        assert magic.hex(" ") in message

    def test_what_is_not_gzip_is_said_to_be_none(self, tmp_path):
        path = tmp_path / "a.gz"
        path.write_bytes(idx_bytes(images()))
        assert "gzip" in refusal(read_idx, path)

    @pytest.mark.parametrize("content", [b"", idx_bytes(images(0))])
    def test_an_empty_file_is_said_to_be_empty(self, tmp_path, content):
        assert "is empty" in refusal(read_idx, write_gz(tmp_path / "a.gz", content))

    def test_a_header_that_promises_terabytes_takes_no_memory(self, tmp_path):
        head = bytes([0, 0, 8, 3]) + b"\xff" * 12
        path = write_gz(tmp_path / "a.gz", head + bytes(100))
        assert peak_of(lambda: refusal(read_idx, path)) < 8 << 20

    def test_an_archive_that_unpacks_to_far_more_is_read_no_further_than_allowed(self, tmp_path):
        path = write_gz(tmp_path / "bomb.gz", bytes(64 << 20))
        assert "more than" in refusal(lambda file: read_idx(file, largest=1 << 20), path)
        assert peak_of(lambda: refusal(lambda file: read_idx(file, largest=1 << 20), path)) < 8 << 20

    def test_folders_and_pipes_are_refused_instead_of_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.gz")
        for path in (tmp_path, tmp_path / "pipe.gz", tmp_path / "absent.gz"):
            assert "is not a file" in refusal(read_idx, path)


class TestCifar:
    def test_records_come_back_as_images_and_labels(self, tmp_path):
        path = tmp_path / "batch.bin"
        path.write_bytes(cifar_bytes([3, 9, 0]))
        x, y = read_cifar(path)
        assert (x.shape, x.dtype) == ((3, 3, 32, 32), torch.uint8)
        assert (y.tolist(), y.dtype) == ([3, 9, 0], torch.int64)
        second = path.read_bytes()[CIFAR_RECORD + 1 : 2 * CIFAR_RECORD]
        assert x[1].flatten().tolist() == list(second)

    @ANY_TMP
    @given(cut=st.integers(0, 2 * CIFAR_RECORD - 1).filter(lambda cut: cut != CIFAR_RECORD))
    def test_a_file_cut_within_a_record_is_refused(self, tmp_path, cut):
        path = tmp_path / "batch.bin"
        path.write_bytes(cifar_bytes([1, 2])[:cut])
        message = refusal(read_cifar, path)
        assert ("is empty" if cut == 0 else f"found {cut}") in message

    def test_a_label_that_no_class_has_is_named_with_its_row(self, tmp_path):
        path = tmp_path / "batch.bin"
        path.write_bytes(cifar_bytes([1, 10, 2]))
        message = refusal(read_cifar, path)
        assert "row 1 has label 10" in message and "0 to 9" in message


def peak_of(action) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
