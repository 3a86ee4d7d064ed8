"""Public rows that nobody holds, and unseen clients without labels, by which settings are chosen or not."""

import numpy as np
import pytest
import torch

import fedmoe
from fedmoe.config import parse_config
from fedmoe.data.dataset import Dataset, Table
from fedmoe.errors import ConfigError
from fedmoe.federations import build_federation
from fedmoe.partition.draw import draw_split
from fedmoe.partition.settings import DirichletSplit, KLabelsSplit, MajoritySplit, NaturalSplit
from fedmoe.partition.split import Split

CLASSES = 10


def dataset(train_per_class=60, test_per_class=20):
    def table(count):
        y = torch.arange(CLASSES).repeat(count)
        return Table(torch.arange(len(y), dtype=torch.float32)[:, None], y, {"owner": torch.arange(len(y)) % 7})

    return Dataset("numbers", table(train_per_class), table(test_per_class), tuple("0123456789"))


SIZES = {
    "num_clients": 6,
    "num_unseen": 4,
    "train_size": 20,
    "validation_size": 4,
    "test_size": 8,
    "global_test_size": 20,
}
PUBLIC = {"public_size": 100, "public_validation_size": 30}
KINDS = {
    "majority": MajoritySplit(**SIZES, **PUBLIC),
    "k_labels": KLabelsSplit(**SIZES, **PUBLIC, replacement=True),
    "dirichlet": DirichletSplit(**SIZES, **PUBLIC, alpha=0.1, equal_sizes=True, replacement=True),
    "natural": NaturalSplit(field="owner", num_unseen=2, **PUBLIC),
}


def labels_of(data, shards, client):
    return data.train.y.numpy()[shards.of(client)]


@pytest.mark.parametrize("kind", KINDS)
def test_public_rows_are_balanced_and_nobody_holds_them(kind):
    data = dataset()
    split = draw_split(KINDS[kind], data, seed=0)
    public = {*split.public.tolist(), *split.public_validation.tolist()}
    assert len(split.public) == 100 and len(split.public_validation) == 30 and len(public) == 130
    held = {*split.train.rows.tolist(), *split.validation.rows.tolist()}
    held |= {*split.test.rows.tolist()} if split.own_test == "train" else set()
    assert held and not held & public and max(held) < len(data.train.y)
    assert np.bincount(data.train.y.numpy()[split.public]).tolist() == [10] * CLASSES
    assert split.digest != draw_split(KINDS[kind].model_copy(update={"public_size": 90}), data, seed=0).digest


@pytest.mark.parametrize("kind", KINDS)
def test_without_public_rows_a_split_is_what_it_was_before_they_existed(kind):
    config = KINDS[kind].model_copy(update={"public_size": 0, "public_validation_size": 0})
    split = draw_split(config, dataset(), seed=0)
    assert not len(split.public) and "public" not in split.arrays()


def test_the_global_validation_is_balanced_and_nobody_holds_it(tmp_path):
    config, data = MajoritySplit(**SIZES, global_validation_size=20), dataset()
    split = draw_split(config, data, seed=0)
    validation = split.global_validation
    assert np.bincount(data.train.y.numpy()[validation]).tolist() == [2] * CLASSES and not len(split.public)
    assert not {*split.train.rows, *split.validation.rows} & {*validation}
    split.save(tmp_path / "split")
    assert np.array_equal(Split.load(tmp_path / "split").global_validation, validation)


def test_every_model_is_scored_on_the_global_validation(tmp_path):
    sizes = {**SIZES, "num_clients": 3, "num_unseen": 0, "global_validation_size": 40}
    table = {"split": {**sizes, "kind": "majority"}, "schedule": {"rounds": 1, "clients_per_round": 2}}
    scores = fedmoe.run({**table, "algorithm": {"name": "fedavg"}}, directory=tmp_path).scores
    found = [score for score in scores if score.data == "global_validation"]
    assert [score.client for score in found] == [0, 1, 2] and {score.examples for score in found} == {40}


def test_a_split_is_stored_with_its_public_rows(tmp_path):
    split = draw_split(KINDS["k_labels"].model_copy(update={"num_validation": 2}), dataset(), seed=0)
    split.save(tmp_path / "split.safetensors")
    again = Split.load(tmp_path / "split.safetensors")
    assert again.digest == split.digest and again.num_validation == 2
    assert np.array_equal(again.public, split.public) and np.array_equal(
        again.public_validation, split.public_validation
    )


@pytest.mark.parametrize("kind", ["k_labels", "dirichlet"])
def test_with_replacement_clients_may_share_rows_but_none_holds_one_twice(kind):
    data = dataset(train_per_class=20)  # 200 rows for ten clients of 24
    split = draw_split(KINDS[kind].model_copy(update={"public_size": 0, "public_validation_size": 0}), data, seed=0)
    rows = split.train.rows.tolist() + split.validation.rows.tolist()
    assert len(set(rows)) < len(rows)
    for client in range(10):
        own = [*split.train.of(client), *split.validation.of(client)]
        assert len(set(own)) == len(own) == 24
    if kind == "k_labels":
        assert all(np.bincount(labels_of(data, split.train, c), minlength=10).max() == 5 for c in range(10))


@pytest.mark.parametrize("kind", ["k_labels", "dirichlet"])
def test_unlabelled_unseen_clients_hold_test_rows_alone_as_many_as_is_said(kind):
    new = {"unseen_labelled": False, "unseen_test_size": 16}
    split = draw_split(KINDS[kind].model_copy(update=new), dataset(), seed=0)
    assert split.train.sizes.tolist() == [20] * 6 + [0] * 4 and split.validation.sizes.tolist()[6:] == [0] * 4
    assert split.test.sizes[6:].tolist() == [16] * 4 and split.test.sizes[:6].max() == 8


def test_they_hold_combinations_of_labels_that_no_training_client_has():
    split = draw_split(KINDS["k_labels"].model_copy(update={"unseen_labelled": False}), dataset(), seed=3)
    y = dataset().test.y.numpy()
    held = [frozenset(y[split.test.of(client)].tolist()) for client in range(10)]
    assert all(len(labels) == 4 for labels in held) and not {*held[6:]} & {*held[:6]}


@pytest.mark.parametrize("kind", ["k_labels", "dirichlet"])
def test_clients_by_which_settings_are_chosen_share_no_test_row_with_those_that_test(kind):
    new = {"unseen_labelled": False, "unseen_test_size": 16, "num_validation": 2}
    split = draw_split(KINDS[kind].model_copy(update=new), dataset(), seed=0)
    chosen_by = {int(row) for client in (6, 7) for row in split.test.of(client)}
    others = {int(row) for client in (0, 1, 2, 3, 4, 5, 8, 9) for row in split.test.of(client)} | {
        *split.global_test.tolist()
    }
    assert chosen_by and not chosen_by & others and split.num_validation == 2
    assert len(split.test.of(8)) == 16 and 0 < len(split.test.of(6)) <= 16


def test_groups_of_labels_have_none_in_common_and_anchors_stay_in_theirs():
    config = KLabelsSplit(
        num_clients=10, num_unseen=0, train_size=10, validation_size=5, test_size=5, global_test_size=20,
        labels_per_client=3, num_anchors=4, labels_per_anchor=2, label_groups=2,
    )  # fmt: skip
    data = dataset()
    split = draw_split(config, data, seed=1)
    of_group = [set(), set()]
    for client in range(10):
        of_group[client % 2] |= {*labels_of(data, split.train, client).tolist()}
    assert not of_group[0] & of_group[1] and [len(labels) for labels in of_group] == [5, 5]
    anchors = [frozenset(labels_of(data, split.train, client).tolist()) for client in range(4)]
    assert all(len(a) == 2 for a in anchors) and len(frozenset.union(*anchors)) == 8


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (MajoritySplit(**SIZES, public_size=700), r"split\.public_size=700: .* needs 70 examples of class"),
        (MajoritySplit(**SIZES, public_validation_size=7), "held out of nothing"),
        (KLabelsSplit(**SIZES, num_validation=5), r"split\.num_validation=5 is above split\.num_unseen=4"),
        (KLabelsSplit(**SIZES, unseen_test_size=81), r"split\.unseen_test_size=81 needs 21 examples"),
        (KLabelsSplit(**SIZES, label_groups=5), r"label_groups=5 leaves 2 of 10 .*labels_per_client=4"),
        (KLabelsSplit(**SIZES, num_anchors=3, labels_per_anchor=3, label_groups=2), "labels_per_anchor=3 needs 6"),
        (DirichletSplit(**SIZES, replacement=True), r"set split\.equal_sizes = true"),
    ],
)
def test_what_cannot_work_is_refused(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        draw_split(config, dataset(), seed=0)


def test_a_federation_has_its_public_rows_and_its_new_clients_inputs():
    table = {
        "split": {
            **SIZES, **PUBLIC, "kind": "k_labels", "unseen_labelled": False, "num_validation": 1, "num_clients": 4,
            "num_unseen": 3, "global_test_size": 50,
        }
    }  # fmt: skip
    federation = build_federation(parse_config(table)).federation
    assert federation.public is not None
    public = federation.public()
    assert public.train.x.shape == (100, *federation.input_shape) and int(public.validation.counts) == 30
    data = federation.data([0, 5], opted_in_only=True)
    assert data.inputs.counts.tolist() == [20, 8] and data.train.counts.tolist() == [20, 0]
    torch.testing.assert_close(data.inputs.x[1, :8], federation.load(5).test.x)
    assert [federation.validates(client) for client in range(7)] == [False] * 4 + [True, False, False]
    assert fedmoe.build({**table, "algorithm": {"name": "fedavg"}}).setup.unlabelled_new_clients == (4, 5, 6)
