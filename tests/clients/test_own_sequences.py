import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedmoe
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.errors import DataError
from fedmoe.models import split_mask


def ids(lengths, first=1):
    return [torch.arange(first, first + length) for length in lengths]


def steps(lengths, channels=2):
    return [np.full((length, channels), float(length)) for length in lengths]


def labels(size):
    return np.arange(size) % 2


def test_ids_are_padded_with_zeros_to_the_longest_that_may_be_shared():
    federation = federation_from_clients(
        {"ada": (ids(range(1, 11)), labels(10)), "bob": (ids([3] * 10), labels(10))}, sequence_length="longest",
        test_share=0,
    )  # fmt: skip
    assert federation.input_shape == (10,) and federation.vocabulary_size == 11
    for client in range(2):
        values, mask = split_mask(federation.load(client).train.x)
        assert torch.equal(mask.sum(1), values.max(1).values) and not values[~mask].any()


def test_numbers_get_a_channel_that_says_what_is_real():
    federation = federation_from_clients({"ada": (steps(range(1, 11)), labels(10))}, sequence_length=12)
    assert federation.input_shape == (12, 3) and federation.vocabulary_size is None
    values, mask = split_mask(federation.load(0).train.x)
    assert values.shape[-1] == 2
    assert torch.equal(mask.sum(1).float(), values.amax((1, 2)))
    assert not values[~mask].any() and torch.equal(mask, mask.sort(1, descending=True).values)


def test_zeros_among_the_numbers_are_real_steps():
    rows = [torch.zeros(length) for length in (2, 5)] * 5
    x = federation_from_clients({"ada": (rows, labels(10))}, sequence_length="longest").load(0).train.x
    assert set(split_mask(x)[1].sum(1).tolist()) == {2, 5}


def test_datasets_and_collate_may_give_sequences():
    class Texts(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return torch.arange(1, 3 + index), index % 2

    plain = federation_from_clients({"ada": Texts()}, sequence_length=20, vocabulary_size=20)
    collated = federation_from_clients(
        {"ada": Texts()}, collate=lambda rows: ([x for x, _ in rows], [y for _, y in rows]), sequence_length=20,
        vocabulary_size=20,
    )  # fmt: skip
    assert plain.digest == collated.digest


@pytest.mark.parametrize("private", [{"opted_out": ["bob"]}, {"unseen": ["bob"]}])
def test_private_rows_neither_lengthen_sequences_nor_add_ids(private):
    shared = (ids([4] * 10), labels(10))
    longer = {"ada": shared, "bob": (ids([4] * 9 + [7]), labels(10))}
    with pytest.raises(DataError, match=r"client 'bob'.* a sequence of length 7, .* go up to 4.*sequence_length=7\."):
        federation_from_clients(longer, sequence_length="longest", test_share=0, **private)
    with pytest.raises(DataError, match=r"client 'bob'.* the id 7, .*go up to 4.*Declare vocabulary_size=8\."):
        federation_from_clients(longer, sequence_length=7, test_share=0, **private)
    declared = federation_from_clients(longer, sequence_length=7, vocabulary_size=8, test_share=0, **private)
    assert declared.input_shape == (7,) and declared.vocabulary_size == 8


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*ids([3] * 9), torch.tensor([0, 1])], "row 9: an id is 0, but 0 is padding"),
        ([*ids([3] * 9), torch.ones(2)], r"row 9: x is torch.float32 of shape \(2,\)"),
        (steps([3] * 9) + steps([2], 5), r"\[2, 5\] channels"),
        (ids([3] * 9) + ids([30]), "a sequence of 30 steps, beyond sequence_length=9"),
    ],
)
def test_what_is_no_sequence_is_refused(rows, words):
    with pytest.raises(DataError, match=words):
        federation_from_clients({"ada": (rows, labels(10))}, sequence_length=9)


def test_rows_of_different_lengths_without_the_setting_are_told_of_it():
    with pytest.raises(DataError, match="sequence_length='longest'"):
        federation_from_clients({"ada": (ids(range(1, 11)), labels(10))})


class MeanOfSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        values, mask = split_mask(x)
        return self.out((values * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1))


@pytest.mark.parametrize("model", ["own", "text_lstm"])
def test_own_sequences_train_own_modules_and_those_of_the_catalog(tmp_path, model):
    rows = steps(range(1, 21)) if model == "own" else ids(range(1, 21))
    clients = {name: (rows, labels(20)) for name in ("ada", "bob")}
    federation = federation_from_clients(clients, sequence_length=20, num_classes=2, vocabulary_size=21)
    config = {
        "algorithm": {"name": "fedavg"},
        "schedule": {"rounds": 1, "clients_per_round": "all"},
        "engine": {"workers": 1},
        "model": {"name": "text_lstm", "embedding": 4, "hidden": 3} if model == "text_lstm" else {"name": "mlp"},
    }
    own = (
        {"expert": MeanOfSteps, "gate": lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 1))} if model == "own" else {}
    )
    result = fedmoe.run(config, federation=federation, directory=tmp_path, **own)
    assert result.personal_model("ada")(federation.load(0).test.x).isfinite().all()
