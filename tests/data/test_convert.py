"""What a publisher sends becomes the files that are read."""

import gzip
import json
import lzma
from dataclasses import replace

import numpy as np
from local_site import archive_of
from stand_ins import content_of, packed, stand_in, write_files

from fedmoe.data.download import get
from fedmoe.data.loading import load_dataset
from fedmoe.data.registry import SOURCES


class TestConversions:
    def test_posts_become_lines(self, site, tmp_path, monkeypatch):
        group = SOURCES["newsgroups"].class_names
        posts = {
            f"20news-bydate-train/{group[row]}/{row}": f"From: x\n\npost {row} \xe9".encode("latin-1")
            for row in range(12)
        }
        posts |= {f"20news-bydate-test/{group[row]}/{row}": b"From: x\n\npost" for row in range(6)}
        remote = site.remote("20news-bydate.tar.gz", archive_of(posts))
        monkeypatch.setitem(SOURCES, "newsgroups", replace(stand_in("newsgroups"), remotes=(remote,)))
        home = get("newsgroups", tmp_path)
        dataset = load_dataset("newsgroups", tmp_path)
        assert dataset.train.y.tolist() == list(range(12))
        first = json.loads(lzma.decompress((home / "20news_bydate_train.jsonl.xz").read_bytes()).split(b"\n")[0])
        assert first == {"group": "alt.atheism", "id": 0, "text": "From: x\n\npost 0 é"}

    def test_writers_join_the_digits_that_are_there(self, site, tmp_path, monkeypatch):
        source = stand_in("mnist_by_writer")
        remotes = [site.remote(file, packed(file, content_of(source, file))) for file in list(source.files)[:4]]
        for part, rows in (("train", 12), ("test", 20)):
            table = np.zeros((rows, 8), ">i4")
            table[:, 1] = table[:, 2] = np.arange(rows) // 3
            content = b"\0\0\x0c\x02" + np.array(table.shape, ">u4").tobytes() + table.tobytes()
            remotes.append(site.remote(f"qmnist-{part}-labels-idx2-int.gz", gzip.compress(content)))
        monkeypatch.setitem(SOURCES, "mnist_by_writer", replace(source, remotes=tuple(remotes)))
        monkeypatch.setitem(SOURCES, "mnist", stand_in("mnist"))
        write_files("mnist", tmp_path)
        get("mnist_by_writer", tmp_path)
        assert load_dataset("mnist_by_writer", tmp_path).train.fields["writer"].tolist() == [
            row // 3 for row in range(12)
        ]
        assert {name for name, _ in site.asked} == {remote.file for remote in remotes[4:]}
