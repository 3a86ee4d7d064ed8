import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.clients.opt_out import OptOut, opt_out
from fedmoe.data.dataset import Table
from fedmoe.errors import ConfigError
from fedmoe.partition.majority import split_by_majority
from fedmoe.partition.quotas import Labels
from fedmoe.partition.settings import MajoritySplit
from fedmoe.partition.split import Shards

LABELS = np.repeat(np.arange(4), 300)
TABLE = Table(torch.zeros(1200, 1), torch.from_numpy(LABELS), {"writer": torch.arange(1200) % 7})
SIZES = {"num_clients": 10, "num_unseen": 3, "train_size": 20, "validation_size": 8, "test_size": 4}
SPLIT = split_by_majority(Labels(LABELS, LABELS, 4), MajoritySplit(**SIZES, share=0.5, global_test_size=4), seed=0)


def choose(**settings) -> OptOut:
    return opt_out(SPLIT, TABLE, **{"seed": 0, **settings})


def per_client(flags: np.ndarray, shards: Shards) -> np.ndarray:
    """Opted-in records of each client."""
    return np.add.reduceat(flags.astype(int), shards.offsets[:-1])


def test_by_default_everything_is_opted_in():
    nothing = choose()
    assert nothing.client_opted_in.all() and len(nothing.client_opted_in) == 13
    assert nothing.train_opted_in.all() and len(nothing.train_opted_in) == 13 * 20
    assert nothing.validation_opted_in.all() and len(nothing.validation_opted_in) == 13 * 8
    assert nothing.participants(SPLIT).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("fraction", "staying"), [(0, 10), (0.05, 10), (0.1, 9), (0.55, 5), (0.7, 3), (0.9, 1), (0.95, 1), (1, 1)]
)
def test_a_fraction_of_clients_leaves_the_rest_rounded_up_and_at_least_one(fraction, staying):
    chosen = choose(client_fraction=fraction)
    assert chosen.client_opted_in[:10].sum() == staying == len(chosen.participants(SPLIT))
    assert chosen.client_opted_in[10:].all()


def test_who_leaves_goes_by_the_seed_and_grows_with_the_fraction():
    def staying(fraction: float, seed: int) -> set[int]:
        return set(choose(client_fraction=fraction, seed=seed).participants(SPLIT).tolist())

    assert staying(0.5, 0) == staying(0.5, 0)
    assert len({frozenset(staying(0.5, seed)) for seed in range(6)}) > 1
    assert staying(0.9, 0) < staying(0.5, 0) < staying(0.2, 0)


def test_a_client_that_opts_out_takes_all_its_records_along():
    chosen = choose(clients=[2, 11])
    assert np.flatnonzero(~chosen.client_opted_in).tolist() == [2, 11]
    for flags, shards in ((chosen.train_opted_in, SPLIT.train), (chosen.validation_opted_in, SPLIT.validation)):
        assert np.flatnonzero(per_client(flags, shards) == 0).tolist() == [2, 11]
        assert (np.delete(per_client(flags, shards), [2, 11]) == shards.sizes[0]).all()
    assert 2 not in chosen.participants(SPLIT) and len(chosen.participants(SPLIT)) == 9


@settings(deadline=None)
@given(fraction=st.floats(0, 0.97), seed=st.integers(0, 2**40))
def test_a_fraction_of_records_is_taken_from_every_client_alike(fraction, seed):
    chosen = choose(record_fraction=fraction, seed=seed)
    for flags, shards, size in (
        (chosen.train_opted_in, SPLIT.train, 20),
        (chosen.validation_opted_in, SPLIT.validation, 8),
    ):
        assert (per_client(~flags, shards) == np.floor(fraction * size + 0.5)).all()


def test_clients_draw_their_records_each_for_itself():
    flags = choose(record_fraction=0.5).train_opted_in.reshape(13, 20)
    assert len({row.tobytes() for row in flags}) > 10


def test_a_rule_on_labels_opts_out_those_records_and_no_others():
    chosen = choose(rules=[("label", [1, 3])])
    assert (chosen.train_opted_in == ~np.isin(LABELS[SPLIT.train.rows], [1, 3])).all()
    assert (chosen.validation_opted_in == ~np.isin(LABELS[SPLIT.validation.rows], [1, 3])).all()


def test_rules_on_further_fields_add_up():
    chosen = choose(rules=[("label", [1]), ("writer", [0])])
    out = (LABELS[SPLIT.train.rows] == 1) | (SPLIT.train.rows % 7 == 0)
    assert (chosen.train_opted_in == ~out).all()


def test_a_mask_says_of_each_training_record_whether_it_is_in():
    mask = np.arange(20) % 3 == 0
    chosen = choose(masks={4: mask})
    assert (chosen.train_opted_in[80:100] == mask).all()
    assert np.delete(chosen.train_opted_in, np.arange(80, 100)).all() and chosen.validation_opted_in.all()


def test_a_client_without_an_opted_in_training_record_does_not_take_part():
    chosen = choose(masks={4: np.zeros(20, dtype=bool)})
    assert chosen.client_opted_in[4]
    assert chosen.participants(SPLIT).tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": [13]}, r"opt_out\.clients names client 13, but clients go from 0 to 12"),
        ({"clients": [-1]}, r"opt_out\.clients names client -1"),
        ({"masks": {13: np.ones(20, dtype=bool)}}, r"opt_out\.masks names client 13"),
        ({"masks": {0: np.ones(19, dtype=bool)}}, r"client 0 is bool of shape \(19,\).* has 20 training records"),
        ({"masks": {0: np.ones(20)}}, r"client 0 is float64 .*one bool per record"),
        ({"clients": range(10)}, r"opt_out\.clients .*leave none of the 10 clients"),
        ({"record_fraction": 1.0}, r"no client .*Lower opt_out\.record_fraction"),
        ({"rules": [("label", range(4))]}, r"no client .*opt_out\.rules"),
        ({"rules": [("author", [1])]}, r"opt_out\.rules: .*no field 'author'\. Use one of: label, writer"),
        ({"client_fraction": 1.1}, r"opt_out\.client_fraction=1\.1 .*between 0 and 1"),
        ({"record_fraction": float("nan")}, r"opt_out\.record_fraction=nan"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        choose(**settings)
