"""A corpus of bad input for every set: each ends in a DataError that names the file and says what to do."""

import io
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import FROM_FILES, content_of, lines, mails, packed, stand_in, write_files

from fedmoe.data.formats import read_content
from fedmoe.data.loading import READERS
from fedmoe.data.registry import SOURCES
from fedmoe.errors import DataError

FEW = settings(max_examples=8, deadline=None)
FILES = [(name, file) for name in FROM_FILES for file in SOURCES[name].files if name != "spam" or "u00" in file]
TEXT_FILES = [(name, file) for name, file in FILES if SOURCES[name].folder in ("text", "ecml2006", "ag_news_csv")]
every_file = pytest.mark.parametrize(("name", "file"), FILES)
REMEDIES = ("again", "by hand", "Put the publisher's file", "convert it")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Reads one set with one of its files replaced; the others are sound."""
    folder = tmp_path_factory.mktemp("bench")
    stand_ins = {name: stand_in(name) for name in FROM_FILES}
    for name in FROM_FILES:
        write_files(name, folder)

    def refusal(name: str, file: str, raw: bytes | None) -> str:
        home = folder / str(stand_ins[name].folder)
        sound = (home / file).read_bytes()
        before = sorted(folder.rglob("*"))
        (home / file).unlink() if raw is None else (home / file).write_bytes(raw)
        try:
            with pytest.raises(DataError) as caught:
                READERS[stand_ins[name].format](stand_ins[name], home)
        finally:
            (home / file).write_bytes(sound)
        assert sorted(folder.rglob("*")) == before  # nothing was written beside it
        message = str(caught.value)
        assert str(home / file) in message
        assert any(remedy in message for remedy in REMEDIES), message
        return message

    return refusal


@every_file
def test_an_empty_file(bench, name, file):
    bench(name, file, b"")
    if file.endswith((".gz", ".xz")):
        assert "is empty" in bench(name, file, packed(file, b""))


@every_file
@FEW
@given(data=st.data())
def test_a_file_cut_anywhere(bench, name, file, data):
    raw = packed(file, content_of(SOURCES[name], file))
    ends_of_rows = [at + 1 for at in range(len(raw)) if raw[at : at + 2] == b'\n"'] if file == "train.csv" else []
    cut = data.draw(st.integers(0, len(raw) - 2).filter(lambda cut: cut not in ends_of_rows))
    bench(name, file, raw[:cut])


@every_file
@FEW
@given(content=st.binary(min_size=1, max_size=300))
def test_random_bytes(bench, name, file, content):
    bench(name, file, content)
    if file.endswith((".gz", ".xz")):
        bench(name, file, packed(file, content))


@pytest.mark.parametrize(("name", "file"), TEXT_FILES)
@FEW
@given(data=st.data())
def test_invalid_utf8_is_named_with_its_line(bench, name, file, data):
    content = content_of(SOURCES[name], file)
    at = data.draw(st.integers(0, len(content) - 1))
    message = bench(name, file, packed(file, content[:at] + b"\xff" + content[at:]))
    if name != "spam":
        assert f"line {content.count(bytes([10]), 0, at) + 1}: byte 0x" in message


@every_file
def test_another_sets_file(bench, name, file):
    other = "spam" if name != "spam" else "ag_news"
    bench(name, file, packed(file, content_of(SOURCES[other], next(iter(SOURCES[other].files)))))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_file_that_unpacks_to_far_more_is_not_unpacked(tmp_path, suffix):
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(packed(suffix, bytes(32 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than the 1000000 bytes expected once unpacked"):
            read_content(path, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("sent140", '{"user": 1, "x": ["a"], "y": [2]}', "label 0 or 1"),
        ("sent140", '{"user": 1, "x": ["a", "b"], "y": [1]}', "label 0 or 1"),
        ("sent140", '{"user": true, "x": ["a"], "y": [1]}', "'user' is a int"),
        ("sent140", '{"user": -1, "x": ["a"], "y": [1]}', "user number"),
        ("sent140", '{"user": 1, "x": [null], "y": [1]}', "list of str"),
        ("sent140", '{"user": 1, "x": ["a"], "y": [true]}', "list of int"),
        ("sent140", "[1, 2]", "expected an object"),
        ("sent140", '{"user": ' + "9" * 5000 + "}", "not JSON"),
        ("shakespeare", "[" * 100_000, "not JSON"),
        ("shakespeare", '{"play": "P", "role": "R", "speeches": "text"}', "'speeches' is a list"),
        ("newsgroups", '{"group": "alt.none", "text": ""}', "none of the 20"),
        ("newsgroups", '{"group": "sci.med"}', "'text' is a str"),
        ("newsgroups", "", "not JSON"),
    ],
)
def test_a_bad_record_is_named_with_its_line(bench, name, line, words):
    file = next(iter(SOURCES[name].files))
    sound = content_of(SOURCES[name], file).split(b"\n", 2)
    content = b"\n".join([sound[0], line.encode(), sound[2]])
    message = bench(name, file, packed(file, content))
    assert words in message and ", line 2" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 5", "expected pairs"),
        ("1", "expected pairs"),
        ("", "starts with b''"),
        ("2 1:1", "starts with b'2'"),
        ("1 1:1:1", "expected pairs"),
        ("1 1:x", "expected pairs"),
        ("1 0:1", "from 1 to 157127"),
        ("1 157128:1", "from 1 to 157127"),
        ("1 99999999999999999999:1", "from 1 to 157127"),
        ("1 " + "9" * 5000 + ":1", "expected pairs"),
        ("1 3:1 3:2", "must differ"),
        ("1 3:0", "counts"),
        ("1 3:99999999999", "counts"),
    ],
)
def test_a_bad_mail_is_named_with_its_line(bench, line, words):
    message = bench("spam", "task_b_u00_eval_lab.tf", mails(2) + line.encode() + b"\n" + mails(1))
    assert words in message and ", line 3" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"class_index","title","description"', "no header"),
        ('"5","a","b"', "1 to 4"),
        ('"1","a"', "found 2 columns"),
        ("", "found 0 columns"),
        ('"1","a","b" c', "not CSV"),
        ('"1","a","' + "b" * 200_000 + '"', "not CSV"),
    ],
)
def test_a_bad_news_row_is_named_with_its_line(bench, line, words):
    message = bench("ag_news", "train.csv", line.encode() + b'\n"1","a","b"\n')
    assert words in message and ", line 1" in message


def test_rows_that_are_missing_are_counted(bench):
    for name, file in (
        ("newsgroups", "20news_bydate_test.jsonl.xz"),
        ("ag_news", "test.csv"),
        ("cifar100", "test.bin"),
    ):
        content = content_of(SOURCES[name], file)
        short = content[: len(content) // 2] if name == "cifar100" else content[: content[:-1].rfind(b"\n") + 1]
        if name == "ag_news":
            short = content[: content[:-2].rfind(b'\n"') + 1]
        assert "the published file has 6" in bench(name, file, packed(file, short))


def test_a_fine_class_in_two_coarse_ones(bench):
    content = bytearray(content_of(SOURCES["cifar100"], "train.bin"))
    content[1] = content[3074 + 1] = 7
    content[0], content[3074] = 1, 2
    assert "row 1 puts fine class 7 into coarse class 2" in bench("cifar100", "train.bin", bytes(content))


def test_sets_that_hold_nothing_are_refused(bench):
    assert "no tweet" in bench("sent140", "sent140_part.jsonl.xz", _xz([{"user": 1, "x": [], "y": []}]))
    mute = {"play": "P", "role": "R", "speeches": []}
    assert "say nothing" in bench("shakespeare", "shakespeare_by_role.jsonl.xz", _xz([mute]))


@pytest.mark.parametrize(
    "columns",
    [
        {"train_writer": np.zeros(12, dtype=np.int16)},
        {"train_writer": np.zeros(12), "train_hsf": np.zeros(12, dtype=int)},
        {name: np.zeros(5, dtype=int) for name in ("train_writer", "train_hsf", "test_writer", "test_hsf")},
        {"train_writer": np.array([None] * 12)},
    ],
)
def test_writers_that_do_not_fit_the_digits(bench, columns):
    file = io.BytesIO()
    np.savez(file, **columns)
    bench("mnist_by_writer", "writers.npz", file.getvalue())


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_folder_or_pipe_in_place_of_a_file_is_not_waited_for(name):
    with tempfile.TemporaryDirectory() as folder:
        write_files(name, Path(folder))
        source = stand_in(name)
        for file in source.files:
            path = Path(folder) / str(source.folder) / file
            path.unlink()
            os.mkfifo(path)
            break
        with pytest.raises(DataError, match="is not a file"):
            READERS[source.format](source, path.parent)


def _xz(records):
    return packed("a.xz", lines(records))
