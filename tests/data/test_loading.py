import gzip
import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_ins import FROM_FILES, packed, stand_in, unpacked, write_files

from fedmoe.data import loading
from fedmoe.data.available import list_sources
from fedmoe.data.images import scale_bytes
from fedmoe.data.loading import load_dataset
from fedmoe.data.registry import SOURCES
from fedmoe.errors import ConfigError, DataError

DATA = os.environ.get("FEDMOE_DATA")
needs_files = pytest.mark.skipif(DATA is None, reason="FEDMOE_DATA is not set: no published files to read")
IMAGES = [name for name in FROM_FILES if len(SOURCES[name].input_shape) == 3]


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A data folder with small stand-ins for the published files, and a list of sources that expects them."""
    for name in FROM_FILES:
        monkeypatch.setitem(SOURCES, name, stand_in(name))
        write_files(name, tmp_path)
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

    def test_without_scikit_learn_the_remedy_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        assert "pip install scikit-learn" in refusal("digits", None)


class TestFiles:
    @pytest.mark.parametrize("name", FROM_FILES)
    def test_have_the_stated_form(self, tiny, name):
        dataset = load_dataset(name, tiny)
        assert dataset.input_shape == SOURCES[name].input_shape
        assert dataset.num_classes == len(SOURCES[name].class_names)
        for table in (dataset.train, dataset.test):
            assert len(table.x) == len(table.y) > 0 and table.y.dtype == torch.int64
            assert all(len(column) == len(table.y) for column in table.fields.values())
            assert int(table.y.min()) >= 0 and int(table.y.max()) < dataset.num_classes

    @pytest.mark.parametrize("name", IMAGES)
    def test_of_images_are_read_as_bytes_and_prepared_within_one_of_zero(self, tiny, name):
        dataset = load_dataset(name, tiny)
        assert len(dataset.train.x) == (60 if name == "cifar10" else 12)
        assert len(dataset.test.x) == 6
        assert (dataset.train.x.dtype, dataset.train.y.dtype) == (torch.uint8, torch.int64)
        prepared = dataset.prepare(dataset.train.x)
        assert prepared.dtype == torch.float32 and prepared.abs().max() <= 1

    def test_are_found_through_the_environment(self, tiny, monkeypatch):
        monkeypatch.setenv("FEDMOE_DATA", str(tiny))
        assert len(load_dataset("mnist").train.y) == 12

    @pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "spam"])
    def test_a_flipped_bit_is_found_in_every_file(self, tiny, name):
        for file, checksum in SOURCES[name].files.items():
            path = tiny / str(SOURCES[name].folder) / file
            sound = path.read_bytes()
            content = bytearray(unpacked(file, sound))
            content[-2 if name == "spam" else -1] ^= 2  # in a mail: another count of a word
            path.write_bytes(packed(file, bytes(content)))
            message = refusal(name, tiny)
            assert str(path) in message and str(checksum) in message and "download it again" in message
            assert hashlib.sha256(content).hexdigest() in message
            path.write_bytes(sound)

    def test_repacking_a_file_does_not_matter(self, tiny):
        path = tiny / "mnist" / "train-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1, mtime=7))
        assert len(load_dataset("mnist", tiny).train.y) == 12

    def test_a_label_out_of_range_is_reported_before_the_checksum(self, tiny):
        path = tiny / "mnist" / "t10k-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"\x0a"))
        assert "row 5 has label 10" in refusal("mnist", tiny)

    def test_missing_files_are_named_with_folder_and_variable(self, tiny):
        (tiny / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
        message = refusal("cifar10", tiny)
        assert "lacks data_batch_3.bin." in message
        assert str(tiny / "cifar-10-batches-bin") in message and "FEDMOE_DATA" in message

    def test_without_a_folder_the_variable_and_the_files_are_named(self, monkeypatch):
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
    with pytest.raises(ConfigError, match=r"data\.name='zzz'.*digits, mnist, fashion_mnist, cifar10, cifar100"):
        load_dataset("zzz", None)


def test_the_list_tells_what_is_there_and_what_is_missing(tiny):
    (tiny / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    found = {status.name: status for status in list_sources(tiny)}
    assert set(found) == set(SOURCES)
    assert [name for name, status in found.items() if not status.present] == ["mnist", "mnist_by_writer"]
    assert found["mnist"].missing == ("t10k-labels-idx1-ubyte.gz",)
    assert found["cifar10"].where == str(tiny / "cifar-10-batches-bin")


def test_the_list_needs_no_folder(monkeypatch):
    monkeypatch.delenv("FEDMOE_DATA", raising=False)
    present = [status.name for status in list_sources(None) if status.present]
    assert present == ["digits", "synthetic_regression"]


def test_bytes_are_prepared_to_the_ends_of_the_range():
    assert scale_bytes(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


FIRST_LABELS = {
    "mnist": [5, 0, 4, 1, 9],
    "fashion_mnist": [9, 0, 0, 3, 0],
    "cifar10": [6, 9, 9, 4, 1],
    "mnist_by_writer": [5, 0, 4, 1, 9],
}


@needs_files
@pytest.mark.parametrize("name", FROM_FILES)
def test_the_published_files_are_read_whole(name):
    source = SOURCES[name]
    dataset = load_dataset(name)
    if name in ("ag_news", "sent140", "shakespeare"):  # parts and other editions are accepted
        assert len(dataset.train.y) > 10_000
    else:
        assert (len(dataset.train.y), len(dataset.test.y)) == (source.train_rows, source.test_rows)
    assert dataset.input_shape == source.input_shape
    assert dataset.train.y[:5].tolist() == FIRST_LABELS.get(name, dataset.train.y[:5].tolist())


@needs_files
def test_the_real_cifar_has_its_published_channel_means():
    x = load_dataset("cifar10").train.x
    means = [float(np.mean(x[:, channel].numpy())) for channel in range(3)]
    assert means == pytest.approx([125.30691805, 122.95039414, 113.86538318], abs=1e-6)


def test_a_folder_given_goes_before_the_environment(tiny, monkeypatch):
    monkeypatch.setenv("FEDMOE_DATA", "elsewhere")
    assert loading.data_folder(tiny) == tiny
