"""Algorithms with the same rounds train them once."""

from fedmoe.comparison import _rounds_key
from fedmoe.config import parse_config


def key(*, priors: bool = False, **algorithm: object) -> object:
    return _rounds_key(parse_config({"algorithm": algorithm, "evaluation": {"priors": priors}}))


def test_methods_that_begin_with_fedavg_share_its_rounds_whatever_they_do_afterwards() -> None:
    assert key(name="fedavg") == key(name="fine_tuned") == key(name="knn_per", num_neighbors=3)


def test_another_setting_of_the_rounds_makes_other_rounds() -> None:
    assert key(name="fedavg") != key(name="fine_tuned", validate_every=7)
    assert key(name="fedprox") is None


def test_with_priors_fedavg_is_calibrated_after_its_rounds_so_that_others_share_them_without_it() -> None:
    assert key(name="fedavg", priors=True) is None
    assert key(name="fine_tuned", priors=True) == key(name="knn_per", priors=True) == key(name="fine_tuned")
