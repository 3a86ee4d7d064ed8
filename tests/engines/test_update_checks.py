from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.fedavg import Broadcast, Update
from fedmoe.core_types import Tensors
from fedmoe.engines.update_checks import fault_in_report, fault_in_update, faults_in_reports, faults_in_updates

SENT = Broadcast({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
EXPECTED = Update(SENT.model, torch.zeros(()))
GOOD = {"model/weight": torch.ones(2, 2), "model/bias": torch.zeros(2), "num_examples": torch.tensor(3.0)}


def fault(changes: Tensors, max_norm: float | None = None, *, without: str = "") -> str | None:
    update = {name: tensor for name, tensor in {**GOOD, **changes}.items() if name != without}
    return fault_in_update(update, EXPECTED, SENT, max_norm)


def test_a_good_update_comes_in() -> None:
    assert fault({}) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gate/weight": torch.zeros(1)}, "it holds 'gate/weight', which is not declared"),
        ({"model/bias": torch.zeros(3)}, r"model/bias is torch.float32 (3,), not torch.float32 (2,)"),
        ({"model/bias": torch.zeros(2, dtype=torch.float64)}, "torch.float64"),
        ({"model/bias": torch.tensor([0.0, torch.nan])}, "model/bias holds NaN or infinity"),
        ({"num_examples": torch.tensor(torch.inf)}, "num_examples holds NaN or infinity"),
    ],
)
def test_a_bad_update_is_refused_with_the_reason(changes: Tensors, reason: str) -> None:
    assert reason in (fault(changes) or "")


def test_a_missing_tensor_is_named() -> None:
    assert fault({}, without="model/bias") == "it lacks 'model/bias'"


def test_the_first_fault_by_name_is_told() -> None:
    bad = torch.full((2,), torch.nan)
    backwards = {"num_examples": torch.tensor(torch.nan), "model/weight": torch.ones(2, 2), "model/bias": bad}
    assert (fault_in_update(backwards, EXPECTED, SENT, None) or "").startswith("model/bias")


def test_an_update_may_move_as_far_as_the_bound_and_no_further() -> None:
    """The change is 1 in four weights: norm 2. Counts are no part of it."""
    assert fault({}, max_norm=2.0) is None
    assert "norm 2, above schedule.max_update_norm=1.9" in (fault({}, max_norm=1.9) or "")


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"loss": torch.tensor(1.0), "age": torch.tensor(42.0)}, "its report holds 'age', which is not declared"),
        ({"loss": torch.tensor(torch.nan)}, "its report of loss is not finite"),
        ({"loss": torch.zeros(1000)}, "its report of loss has shape (1000,)"),
        ({}, "its report lacks 'loss'"),
    ],
)
def test_a_bad_report_is_refused_with_the_reason(report: Tensors, reason: str) -> None:
    assert reason in (fault_in_report(report, ("loss",)) or "")


def test_a_good_report_comes_in() -> None:
    assert fault_in_report({"loss": torch.tensor(1.0)}, ("loss",)) is None


class Experts(NamedTuple):
    experts: Tensors
    expert_ids: Tensor


HELD = Experts({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, torch.tensor([1, 4]))


def fault_in_experts(which: list[int], max_norm: float | None = None, **experts: Tensor) -> str | None:
    update = {"expert_ids": torch.tensor(which), **{f"experts/{name}": leaf for name, leaf in experts.items()}}
    return fault_in_update(update, HELD, HELD, max_norm)


def test_a_client_may_keep_experts_back_but_not_parts_of_one_and_not_send_others() -> None:
    assert fault_in_experts([1, 4], w=torch.ones(2, 3), b=torch.ones(2)) is None
    assert fault_in_experts([4], w=torch.ones(1, 3), b=torch.ones(1)) is None
    assert fault_in_experts([4], w=torch.ones(1, 3)) == "it lacks 'experts/4/b'"
    assert fault_in_experts([2], w=torch.ones(1, 3), b=torch.ones(1)) == "it holds 'experts/2/b', which is not declared"
    assert "experts/4/w is torch.float32 (5,)" in (fault_in_experts([4], w=torch.ones(1, 5), b=torch.ones(1)) or "")


def test_the_change_of_an_expert_is_measured_against_that_expert() -> None:
    assert "norm 2," in (fault_in_experts([4], max_norm=1.9, w=torch.ones(1, 3), b=torch.ones(1)) or "")


# Groups that answer together


def in_group(*updates):
    stacked = {name: torch.stack([update[name] for update in updates]) for name in updates[0]}
    return faults_in_updates(stacked, EXPECTED, [SENT] * len(updates), None)


def test_of_a_group_only_the_client_at_fault_is_refused():
    good = trees.to_named(EXPECTED)
    for strange in (torch.nan, torch.inf, -torch.inf):
        name = next(name for name, tensor in sorted(good.items()) if tensor.is_floating_point() and tensor.dim())
        bad = {**good, name: torch.full_like(good[name], strange)}
        first, second, third = in_group(good, bad, good)
        assert first is None and third is None and "NaN or infinity" in second
    assert in_group(good, good) == [None, None]


def test_a_sum_that_overflows_is_no_fault():
    good = trees.to_named(EXPECTED)
    huge = {n: torch.full_like(t, 3e38) if t.is_floating_point() else t for n, t in good.items()}
    assert in_group(huge, huge) == [None, None]


def test_a_message_of_fewer_clients_than_it_says_is_refused():
    good = {name: tensor[None] for name, tensor in trees.to_named(EXPECTED).items()}
    assert all("not of 2 clients" in fault for fault in faults_in_updates(good, EXPECTED, [SENT] * 2, None))


def test_reports_of_a_group_are_checked_one_by_one_where_one_is_odd():
    report = {"loss": torch.tensor([1.0, torch.nan])}
    assert faults_in_reports(report, ("loss",), [None, None])[0] is None
    assert "not finite" in faults_in_reports(report, ("loss",), [None, None])[1]
    assert faults_in_reports({"loss": torch.tensor([1.0, 2.0])}, ("loss",), ["earlier", None]) == ["earlier", None]
