"""Algorithms with the same rounds train them once."""

from fedmoe.comparison import _rounds_key
from fedmoe.config import parse_config


def key(**algorithm: object) -> object:
    return _rounds_key(parse_config({"algorithm": algorithm}).algorithm, 0)


def test_methods_that_begin_with_fedavg_share_its_rounds_whatever_they_do_afterwards() -> None:
    assert key(name="fedavg") == key(name="fine_tuned") == key(name="knn_per", num_neighbors=3)


def test_another_setting_of_the_rounds_makes_other_rounds() -> None:
    assert key(name="fedavg") != key(name="fine_tuned", validate_every=7)
    assert key(name="fedprox") is None
