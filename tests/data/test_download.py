"""Downloads against a server on this machine: whole, broken, wrong, absent, hostile."""

import gzip
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_site import Site, archive_of, member
from stand_ins import content_of, idx, packed, stand_in

from fedmoe.data import fetch as fetching
from fedmoe.data.download import get
from fedmoe.data.fetch import Progress
from fedmoe.data.loading import load_dataset
from fedmoe.data.registry import SOURCES
from fedmoe.data.unpack import read_members
from fedmoe.errors import DataError

ANY_TMP = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def mnist(site, monkeypatch) -> Site:
    """MNIST's stand-ins, offered by the site."""
    source = stand_in("mnist")
    remotes = tuple(site.remote(file, packed(file, content_of(source, file))) for file in source.files)
    monkeypatch.setitem(SOURCES, "mnist", replace(source, remotes=remotes))
    return site


def refusal(name: str, folder: Path) -> str:
    """Nothing half-written is left, and the message says which files belong where."""
    with pytest.raises(DataError) as caught:
        get(name, folder)
    home = folder / str(SOURCES[name].folder)
    assert not home.exists()
    assert [path.name for path in folder.iterdir() if path.name != ".downloads"] == []
    message = str(caught.value)
    assert str(home) in message and all(file in message for file in SOURCES[name].files)
    return message


class TestFiles:
    def test_are_downloaded_verified_and_ready_to_load(self, mnist, tmp_path):
        seen: list[Progress] = []
        home = get("mnist", tmp_path, seen.append)
        assert home == tmp_path / "mnist"
        assert len(load_dataset("mnist", tmp_path).train.y) == 12
        assert sorted(path.name for path in home.iterdir()) == sorted(SOURCES["mnist"].files)
        assert {one.file for one in seen} == set(SOURCES["mnist"].files)
        assert all(one.received <= one.expected for one in seen) and seen[-1].received == seen[-1].expected
        assert list((tmp_path / ".downloads").iterdir()) == []

    def test_that_are_there_are_not_asked_for_again(self, mnist, tmp_path):
        get("mnist", tmp_path)
        asked = len(mnist.asked)
        get("mnist", tmp_path)
        assert len(mnist.asked) == asked == 4

    def test_go_on_where_the_connection_broke(self, mnist, tmp_path):
        mnist.break_after, mnist.breaks = 100, 3
        get("mnist", tmp_path)
        first = [wanted for name, wanted in mnist.asked if name == "train-images-idx3-ubyte.gz"]
        assert first == [None, "bytes=100-", "bytes=200-", "bytes=300-"]

    def test_go_on_in_a_later_run(self, mnist, tmp_path):
        whole = mnist.files["train-images-idx3-ubyte.gz"]
        parts = tmp_path / ".downloads" / "mnist"
        parts.mkdir(parents=True)
        (parts / "train-images-idx3-ubyte.gz.part").write_bytes(whole[:50])
        get("mnist", tmp_path)
        assert mnist.asked[0] == ("train-images-idx3-ubyte.gz", "bytes=50-")

    def test_start_anew_where_the_server_cannot_resume(self, mnist, tmp_path):
        mnist.break_after, mnist.breaks, mnist.resumes = 100, 1, False
        get("mnist", tmp_path)
        assert len(load_dataset("mnist", tmp_path).train.y) == 12

    @pytest.mark.parametrize("left", [b"not the beginning of this file", bytes(100_000)])
    def test_start_anew_from_a_part_that_is_of_another_file(self, mnist, tmp_path, left):
        parts = tmp_path / ".downloads" / "mnist"
        parts.mkdir(parents=True)
        (parts / "train-images-idx3-ubyte.gz.part").write_bytes(left)
        get("mnist", tmp_path)
        assert [wanted for name, wanted in mnist.asked if "train-images" in name] == [f"bytes={len(left)}-", None]

    def test_are_asked_for_again_when_the_server_is_busy(self, mnist, tmp_path):
        mnist.statuses = [503, 500]
        get("mnist", tmp_path)
        assert len(mnist.asked) == 6


class TestRefusals:
    def test_a_wrong_checksum(self, mnist, tmp_path):
        file = "train-labels-idx1-ubyte.gz"
        mnist.files[file] = gzip.compress(idx(13))
        message = refusal("mnist", tmp_path)
        assert "sha256" in message and file in message
        assert not (tmp_path / ".downloads" / "mnist" / f"{file}.part").exists()
        assert len([name for name, _ in mnist.asked if name == file]) == 1

    def test_a_file_that_is_gone(self, mnist, tmp_path):
        del mnist.files["t10k-labels-idx1-ubyte.gz"]
        assert "404" in refusal("mnist", tmp_path)

    def test_a_server_that_always_breaks_is_left_alone_after_a_while(self, mnist, tmp_path):
        mnist.break_after, mnist.breaks = 0, 10_000
        assert "broke after 0 of" in refusal("mnist", tmp_path)
        assert len(mnist.asked) == fetching.MOST_FRUITLESS
        mnist.break_after, mnist.breaks = 1, 10_000
        mnist.asked.clear()
        refusal("mnist", tmp_path)
        assert len(mnist.asked) == fetching.MOST_ATTEMPTS

    def test_no_network(self, mnist, tmp_path, monkeypatch):
        gone = [replace(one, url=one.url.replace("127.0.0.1", "127.0.0.1:1/")) for one in SOURCES["mnist"].remotes]
        monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], remotes=tuple(gone)))
        message = refusal("mnist", tmp_path)
        assert "the connection failed" in message and "by hand" in message

    def test_more_bytes_than_any_set_has(self, mnist, tmp_path, monkeypatch):
        monkeypatch.setattr(fetching, "LARGEST_DOWNLOAD", 1000)
        assert "more than 1000 bytes" in refusal("mnist", tmp_path)

    def test_a_set_without_a_public_address(self, tmp_path):
        for name in ("spam", "shakespeare", "sent140"):
            assert "no public address" in refusal(name, tmp_path)

    def test_a_set_that_needs_no_download_or_has_no_folder(self, tmp_path, monkeypatch):
        monkeypatch.delenv("FEDMOE_DATA", raising=False)
        for name, words in (("digits", "needs no download"), ("mnist", "Set FEDMOE_DATA")):
            with pytest.raises(DataError, match=words):
                get(name)

    def test_sound_downloads_that_are_not_the_set_are_not_installed(self, mnist, tmp_path, monkeypatch):
        source = SOURCES["mnist"]
        wrong = mnist.remote("train-labels-idx1-ubyte.gz", gzip.compress(b"not idx"))
        remotes = tuple(wrong if one.file == wrong.file else one for one in source.remotes)
        monkeypatch.setitem(SOURCES, "mnist", replace(source, remotes=remotes))
        assert "not an idx file" in refusal("mnist", tmp_path)


class TestArchives:
    @pytest.fixture
    def cifar(self, site, monkeypatch):
        source = stand_in("cifar10")
        members = {f"cifar-10-batches-bin/{file}": content_of(source, file) for file in source.files}
        names = {name: name.split("/")[1] for name in members}

        def offer(*hostile: tarfile.TarInfo, without: str = "") -> None:
            kept = {name: content for name, content in members.items() if not without or without not in name}
            remote = site.remote("cifar.tar.gz", archive_of({**kept, "readme.html": b"<p>"}, *hostile), names)
            monkeypatch.setitem(SOURCES, "cifar10", replace(source, remotes=(remote,)))

        return offer

    def test_are_unpacked_to_the_files_that_are_read(self, cifar, tmp_path):
        cifar()
        home = get("cifar10", tmp_path)
        assert sorted(path.name for path in home.iterdir()) == sorted(SOURCES["cifar10"].files)
        assert len(load_dataset("cifar10", tmp_path).train.y) == 60

    @pytest.mark.parametrize(
        "hostile",
        [
            member("../outside"),
            member("/absolute"),
            member("a/../../outside"),
            member("C:\\outside"),
            member("link", tarfile.SYMTYPE, "/etc/hosts"),
            member("cifar-10-batches-bin/hard", tarfile.LNKTYPE, "readme.html"),
            member("pipe", tarfile.FIFOTYPE),
            member("device", tarfile.CHRTYPE),
            member("readme.html"),
        ],
        ids=lambda info: info.name,
    )
    def test_with_a_hostile_member_are_refused_whole(self, cifar, tmp_path, hostile):
        cifar(hostile)
        assert repr(hostile.name) in refusal("cifar10", tmp_path)
        assert not (tmp_path.parent / "outside").exists()

    def test_without_a_file_are_refused(self, cifar, tmp_path):
        cifar(without="data_batch_3")
        assert "lacks data_batch_3.bin" in refusal("cifar10", tmp_path)

    def test_that_unpack_to_far_more_are_refused(self, cifar, tmp_path, monkeypatch):
        path = tmp_path / "bomb.tar.gz"
        path.write_bytes(archive_of({"a": bytes(1 << 20), "b": bytes(1 << 20)}))
        with pytest.raises(DataError, match="more bytes than this data set has"):
            list(read_members(path, lambda name: True, 1 << 20, limit=1 << 20))
        with pytest.raises(DataError, match="may have 1000"):
            list(read_members(path, lambda name: True, 1000))

    @ANY_TMP
    @given(data=st.data())
    def test_cut_or_changed_anywhere_never_end_otherwise(self, tmp_path, data):
        content = bytearray(gzip.decompress(archive_of({"a": b"1" * 600, "b/c": b"2"})))
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content = content[:at]
        else:
            content[at] ^= data.draw(st.integers(1, 255))
        path = tmp_path / "a.tar"
        path.write_bytes(content)
        try:
            list(read_members(path, lambda name: True, 10_000))
        except DataError as error:
            assert str(path) in str(error)


def test_every_set_can_be_downloaded_or_says_why_not():
    for source in SOURCES.values():
        assert source.folder is None or bool(source.remotes) != bool(source.no_remote)
        for remote in source.remotes:
            assert remote.url.startswith(("https://", "http://")) and remote.checksum.split(":")[0] in ("md5", "sha256")
            assert set(remote.members.values()) <= set(source.files)
