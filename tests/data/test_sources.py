import gzip
import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmoe.data import sources
from fedmoe.data.known import SOURCES
from fedmoe.data.sources import list_sources, load_dataset, scale_bytes
from fedmoe.errors import ConfigError, DataError

DATA = os.environ.get("FEDMOE_DATA")
needs_files = pytest.mark.skipif(DATA is None, reason="FEDMOE_DATA is not set: no published files to read")
FROM_FILES = [name for name, source in SOURCES.items() if source.folder]


def tiny_idx(*shape: int) -> bytes:
    values = np.random.default_rng(len(shape)).integers(0, 10, shape, dtype=np.uint8)
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + values.tobytes()


def tiny_cifar(rows: int) -> bytes:
    records = np.random.default_rng(rows).integers(0, 256, (rows, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A data folder with small stand-ins for the published files, and a list of sources that expects them."""
    for name in FROM_FILES:
        contents = {}
        for file in SOURCES[name].files:
            rows = 6 if file.startswith(("t10k", "test")) else 12
            idx = tiny_idx(rows, 28, 28) if "images" in file else tiny_idx(rows)
            contents[file] = tiny_cifar(rows) if name == "cifar10" else idx
        checksums = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
        monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], files=checksums))
        home = tmp_path / str(SOURCES[name].folder)
        home.mkdir()
        for file, content in contents.items():
            (home / file).write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    return tmp_path


def refusal(name: str, folder: Path | None) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(name, folder)
    return str(caught.value)


class TestDigits:
    def test_need_no_folder_and_have_sixty_test_rows_of_each_class(self, monkeypatch):
        monkeypatch.delenv("FEDMOE_DATA", raising=False)
        digits = load_dataset("digits", None)
        assert (len(digits.train.y), len(digits.test.y)) == (1197, 600)
        assert digits.test.y.bincount().tolist() == [60] * 10
        assert (digits.input_shape, digits.train.x.dtype, digits.train.y.dtype) == ((1, 8, 8), torch.uint8, torch.int64)

    def test_training_and_test_part_are_the_whole_set_without_overlap(self):
        from sklearn.datasets import load_digits

        digits = load_dataset("digits", None)
        cut = torch.cat([digits.train.x, digits.test.x]).flatten(1).tolist()
        assert sorted(cut) == sorted(load_digits().data.astype(int).tolist())

    def test_are_cut_the_same_everywhere(self):
        found = hashlib.sha256(load_dataset("digits", None).test.x.numpy().tobytes()).hexdigest()
        assert found[:16] == "38eb605994a19298"

    def test_without_scikit_learn_the_remedy_is_told(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        assert "pip install scikit-learn" in refusal("digits", None)


class TestFiles:
    @pytest.mark.parametrize("name", FROM_FILES)
    def test_are_read_as_bytes_and_prepared_within_one_of_zero(self, tiny, name):
        dataset = load_dataset(name, tiny)
        assert dataset.input_shape == SOURCES[name].input_shape
        assert len(dataset.train.x) == len(dataset.train.y) == (60 if name == "cifar10" else 12)
        assert len(dataset.test.x) == len(dataset.test.y) == 6
        assert (dataset.train.x.dtype, dataset.train.y.dtype) == (torch.uint8, torch.int64)
        prepared = dataset.prepare(dataset.train.x)
        assert prepared.dtype == torch.float32 and prepared.abs().max() <= 1

    def test_are_found_through_the_environment(self, tiny, monkeypatch):
        monkeypatch.setenv("FEDMOE_DATA", str(tiny))
        assert len(load_dataset("mnist").train.y) == 12

    @pytest.mark.parametrize("name", FROM_FILES)
    def test_a_flipped_bit_is_found_in_every_file(self, tiny, name):
        for file, checksum in SOURCES[name].files.items():
            path = tiny / str(SOURCES[name].folder) / file
            sound = path.read_bytes()
            content = bytearray(gzip.decompress(sound) if file.endswith(".gz") else sound)
            content[-1] ^= 1
            path.write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
            message = refusal(name, tiny)
            assert str(path) in message and checksum in message and "download it again" in message
            assert hashlib.sha256(content).hexdigest() in message
            path.write_bytes(sound)

    def test_repacking_a_file_does_not_matter(self, tiny):
        path = tiny / "mnist" / "train-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1, mtime=7))
        assert len(load_dataset("mnist", tiny).train.y) == 12

    def test_a_label_out_of_range_is_told_before_the_checksum(self, tiny):
        path = tiny / "mnist" / "t10k-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"\x0a"))
        assert "row 5 has label 10" in refusal("mnist", tiny)

    def test_missing_files_are_named_with_folder_and_variable(self, tiny):
        (tiny / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
        message = refusal("cifar10", tiny)
        assert "lacks data_batch_3.bin." in message
        assert str(tiny / "cifar-10-batches-bin") in message and "FEDMOE_DATA" in message

    def test_without_a_folder_the_variable_and_the_files_are_told(self, monkeypatch):
        monkeypatch.delenv("FEDMOE_DATA", raising=False)
        message = refusal("fashion_mnist", None)
        assert "Set FEDMOE_DATA" in message and "fashion-mnist/" in message
        assert all(file in message for file in SOURCES["fashion_mnist"].files)


@pytest.mark.parametrize(
    ("typed", "meant"), [("mnits", "mnist"), ("fashion-mnist", "fashion_mnist"), ("CIFAR", "cifar10")]
)
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant):
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        load_dataset(typed, None)


def test_a_name_near_to_nothing_is_answered_with_all_of_them():
    with pytest.raises(ConfigError, match=r"data\.name='zzz'.*digits, mnist, fashion_mnist, cifar10"):
        load_dataset("zzz", None)


def test_the_list_tells_what_is_there_and_what_is_missing(tiny):
    (tiny / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    found = {status.name: status for status in list_sources(tiny)}
    assert [name for name, status in found.items() if status.present] == ["digits", "fashion_mnist", "cifar10"]
    assert found["mnist"].missing == ("t10k-labels-idx1-ubyte.gz",)
    assert found["cifar10"].where == str(tiny / "cifar-10-batches-bin")


def test_the_list_needs_no_folder(monkeypatch):
    monkeypatch.delenv("FEDMOE_DATA", raising=False)
    assert [status.present for status in list_sources(None)] == [True, False, False, False]


def test_bytes_are_prepared_to_the_ends_of_the_range():
    assert scale_bytes(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


@needs_files
@pytest.mark.parametrize("name", FROM_FILES)
def test_the_published_files_are_read_whole_and_soon(name):
    source = SOURCES[name]
    begin = time.perf_counter()
    dataset = load_dataset(name)
    assert time.perf_counter() - begin < 5
    assert (len(dataset.train.y), len(dataset.test.y)) == (source.train_rows, source.test_rows)
    assert dataset.input_shape == source.input_shape
    first = {"mnist": [5, 0, 4, 1, 9], "fashion_mnist": [9, 0, 0, 3, 0], "cifar10": [6, 9, 9, 4, 1]}
    assert dataset.train.y[:5].tolist() == first[name]


@needs_files
def test_the_real_cifar_has_its_published_channel_means():
    x = load_dataset("cifar10").train.x
    means = [float(np.mean(x[:, channel].numpy())) for channel in range(3)]
    assert means == pytest.approx([125.30691805, 122.95039414, 113.86538318], abs=1e-6)


def test_a_folder_given_goes_before_the_environment(tiny, monkeypatch):
    monkeypatch.setenv("FEDMOE_DATA", "elsewhere")
    assert sources.data_folder(tiny) == tiny
