from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.errors import RunError
from fedmoe.storage.checkpoints import DIGEST, Checkpoint, drop_from, load_newest, oldest_round, save_checkpoint

RUN = "0123456789abcdef" * 2
OTHER = "f" * 32
FIRST, SECOND, THIRD = (f"round-0000000{number}.safetensors" for number in (1, 2, 3))


class Server(NamedTuple):
    model: Tensors
    best_loss: Tensor


class OtherServer(NamedTuple):
    router: Tensors


def server(value):
    return Server({"fc.weight": torch.full((3, 2), float(value))}, torch.tensor(torch.inf))


def save(folder, *rounds, run_id=RUN):
    for number in rounds:
        save_checkpoint(folder, Checkpoint(number, server(number), {"seen": [number]}), run_id)


def load(folder, usable=lambda _: None):
    return load_newest(folder, Server, RUN, usable)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    save(tmp_path, 12)
    checkpoint, notes = load(tmp_path)
    assert (checkpoint.round, checkpoint.note, notes) == (12, {"seen": [12]}, [])
    assert type(checkpoint.server) is Server and checkpoint.server.best_loss == torch.inf
    assert torch.equal(checkpoint.server.model["fc.weight"], server(12).model["fc.weight"])


def test_a_server_without_tensors_comes_back_too(tmp_path):
    class Empty(NamedTuple):
        model: Tensors

    save_checkpoint(tmp_path, Checkpoint(1, Empty({}), {}), RUN)
    assert load_newest(tmp_path, Empty, RUN) == (Checkpoint(1, Empty({}), {}), [])


def test_any_reader_of_safetensors_reads_it(tmp_path):
    save(tmp_path, 2)
    tensors = load_file(tmp_path / SECOND)
    assert torch.equal(tensors["model/fc.weight"], server(2).model["fc.weight"])
    with safe_open(tmp_path / SECOND, "pt") as opened:
        assert opened.metadata()["run_id"] == RUN and opened.metadata()["round"] == "2"


def test_no_checkpoint_is_no_error(tmp_path):
    assert load(tmp_path) == (None, [])


def test_the_newest_two_remain(tmp_path):
    save(tmp_path, 9, 10, 11)
    assert names(tmp_path) == ["round-00000010.safetensors", "round-00000011.safetensors"]
    assert load(tmp_path)[0].round == 11 and oldest_round(tmp_path) == 10


@pytest.mark.parametrize("keep", [0, 1, 16, 60, 100, 300, -1])
def test_a_checkpoint_cut_short_is_passed_over_and_said(tmp_path, keep):
    save(tmp_path, 1, 2)
    newest = tmp_path / SECOND
    newest.write_bytes(newest.read_bytes()[:keep])
    checkpoint, notes = load(tmp_path)
    assert checkpoint.round == 1 and checkpoint.server.model["fc.weight"][0, 0] == 1
    (note,) = notes
    assert note.startswith(f"{SECOND} is damaged or cut short") and note.endswith(f"using {FIRST} before it.")


def test_a_single_flipped_bit_is_found_wherever_it_is(tmp_path):
    save(tmp_path, 1)
    content = (tmp_path / FIRST).read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (tmp_path / FIRST).write_bytes(changed)
        assert load(tmp_path)[0] is None, place
        (tmp_path / f"{FIRST}.set-aside").unlink()


def test_every_byte_but_the_digest_itself_is_under_the_digest(tmp_path):
    save(tmp_path, 1)
    content = bytearray((tmp_path / FIRST).read_bytes())
    assert DIGEST.stop - DIGEST.start == 64
    content[DIGEST] = b"0" * 64
    (tmp_path / FIRST).write_bytes(content)
    assert load(tmp_path)[0] is None


class TestNothingIsUsable:
    @pytest.fixture(autouse=True)
    def damaged(self, tmp_path):
        save(tmp_path, 2, 3)
        for path in tmp_path.iterdir():
            path.write_bytes(b"rubbish")

    def test_each_is_said_and_none_is_called_the_one_before(self, tmp_path):
        checkpoint, notes = load(tmp_path)
        assert checkpoint is None and len(notes) == 3
        assert not any("before it" in note for note in notes)
        assert notes[-1] == "no checkpoint is usable: starting again from round 0."

    def test_damaged_files_neither_drive_out_new_ones_nor_vanish(self, tmp_path):
        load(tmp_path)
        save(tmp_path, 1)
        assert names(tmp_path) == [FIRST, f"{SECOND}.set-aside", f"{THIRD}.set-aside"]
        assert load(tmp_path)[0].round == 1

    def test_a_second_damage_of_the_same_round_leaves_the_first(self, tmp_path):
        load(tmp_path)
        save(tmp_path, 2)
        (tmp_path / SECOND).write_bytes(b"rubbish again")
        load(tmp_path)
        assert (tmp_path / f"{SECOND}.set-aside").read_bytes() == b"rubbish"
        assert (tmp_path / f"{SECOND}.2.set-aside").read_bytes() == b"rubbish again"


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, run_id=OTHER)
    checkpoint, notes = load(tmp_path)
    assert checkpoint.round == 1 and f"{SECOND} belongs to another run ({OTHER}" in notes[0]


def test_a_checkpoint_under_the_name_of_another_round_is_passed_over(tmp_path):
    save(tmp_path, 1)
    (tmp_path / THIRD).write_bytes((tmp_path / FIRST).read_bytes())
    checkpoint, notes = load(tmp_path)
    assert checkpoint.round == 1 and f"{THIRD} holds round 1 under another name" in notes[0]


def test_a_folder_in_the_place_of_a_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 1)
    (tmp_path / SECOND / "within").mkdir(parents=True)
    checkpoint, notes = load(tmp_path)
    assert checkpoint.round == 1 and f"{SECOND} is a folder" in notes[0]
    save(tmp_path, 2, 3)  # and the folder is in nobody's way
    assert load(tmp_path)[0].round == 3


def test_a_checkpoint_that_the_run_cannot_use_is_passed_over_with_the_reason(tmp_path):
    save(tmp_path, 1, 2)
    checkpoint, notes = load(tmp_path, lambda found: "relies on what is gone" if found.round == 2 else None)
    assert checkpoint.round == 1
    assert notes == [
        f"{SECOND} relies on what is gone and is set aside as {SECOND}.set-aside: using {FIRST} before it."
    ]


def test_a_checkpoint_of_another_algorithm_is_refused_and_stays(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(RunError, match="does not fit this algorithm: OtherServer has no field"):
        load_newest(tmp_path, OtherServer, RUN)
    assert names(tmp_path) == [FIRST]


def test_checkpoints_of_an_earlier_version_are_refused(tmp_path):
    (tmp_path / "round-00000004.ckpt").write_bytes(b"digest, then safetensors")
    with pytest.raises(RunError, match=r"round-00000004.ckpt was written by an earlier version of fedmoe.*--dir"):
        load(tmp_path)


def test_checkpoints_are_for_the_owner_only(tmp_path):
    save(tmp_path, 1)
    assert (tmp_path / FIRST).stat().st_mode & 0o777 == 0o600


def test_what_follows_the_last_round_leaves_the_rounds_there(tmp_path):
    for number in range(1, 8):
        save_checkpoint(tmp_path, Checkpoint(number, server(number), {}), RUN, rounds=4)
    assert [int(name[6:14]) for name in names(tmp_path)] == [3, 4, 6, 7]
    assert drop_from(tmp_path, 4) == 3 and oldest_round(tmp_path) == 3 and len(names(tmp_path)) == 1
