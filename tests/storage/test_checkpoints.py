from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedmoe.core_types import Tensors
from fedmoe.errors import MessageError
from fedmoe.storage.checkpoints import load_newest, save_checkpoint


class Server(NamedTuple):
    model: Tensors
    best_loss: Tensor


class OtherServer(NamedTuple):
    router: Tensors


def server(value):
    return Server({"fc.weight": torch.full((3, 2), float(value))}, torch.tensor(torch.inf))


def save(folder, *rounds):
    for number in rounds:
        save_checkpoint(folder, number, server(number), {"seen": [number]})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    save(tmp_path, 12)
    checkpoint, notes = load_newest(tmp_path, Server)
    assert (checkpoint.round, checkpoint.note, notes) == (12, {"seen": [12]}, [])
    assert type(checkpoint.server) is Server and checkpoint.server.best_loss == torch.inf
    assert torch.equal(checkpoint.server.model["fc.weight"], server(12).model["fc.weight"])


def test_no_checkpoint_is_no_error(tmp_path):
    assert load_newest(tmp_path, Server) == (None, [])


def test_the_newest_two_are_kept(tmp_path):
    save(tmp_path, 9, 10, 11)
    assert names(tmp_path) == ["round-00000010.ckpt", "round-00000011.ckpt"]
    assert load_newest(tmp_path, Server)[0].round == 11


@pytest.mark.parametrize("keep", [0, 1, 16, 17, 100, -1])
def test_a_checkpoint_cut_short_is_passed_over_and_said(tmp_path, keep):
    save(tmp_path, 1, 2)
    newest = tmp_path / "round-00000002.ckpt"
    newest.write_bytes(newest.read_bytes()[:keep])
    checkpoint, notes = load_newest(tmp_path, Server)
    assert checkpoint.round == 1 and checkpoint.server.model["fc.weight"][0, 0] == 1
    assert len(notes) == 1 and "round-00000002.ckpt is damaged or cut short" in notes[0]


@pytest.mark.parametrize("place", [0, 15, 16, 30, 150, -1])
def test_a_single_flipped_bit_is_found(tmp_path, place):
    save(tmp_path, 1, 2)
    newest = tmp_path / "round-00000002.ckpt"
    content = bytearray(newest.read_bytes())
    content[place] ^= 1
    newest.write_bytes(content)
    checkpoint, notes = load_newest(tmp_path, Server)
    assert checkpoint.round == 1 and "round-00000002" in notes[0]


def test_if_all_are_damaged_there_is_none_and_each_is_said(tmp_path):
    save(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        path.write_bytes(b"rubbish")
    checkpoint, notes = load_newest(tmp_path, Server)
    assert checkpoint is None and len(notes) == 2


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(MessageError, match="OtherServer has no field"):
        load_newest(tmp_path, OtherServer)
