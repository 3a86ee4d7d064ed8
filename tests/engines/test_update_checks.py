from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.fedavg import Broadcast, Update, ValidationUpdate
from fedmoe.core_types import Tensors
from fedmoe.engines.update_checks import (
    UpdateLimits,
    report_rejection,
    report_rejections,
    update_rejection,
    update_rejections,
)
from fedmoe.wire import message

SENT = Broadcast({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
EXPECTED = Update(SENT.model, torch.zeros(()))
GOOD = {"model/weight": torch.ones(2, 2), "model/bias": torch.zeros(2), "num_examples": torch.tensor(3.0)}


def rejection(changes: Tensors, max_norm: float | None = None, *, without: str = "") -> str | None:
    update = {name: tensor for name, tensor in {**GOOD, **changes}.items() if name != without}
    return update_rejection(update, EXPECTED, SENT, UpdateLimits(max_norm))


def test_a_good_update_is_accepted() -> None:
    assert rejection({}) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gate/weight": torch.zeros(1)}, "it holds 'gate/weight', which is not declared"),
        ({"model/bias": torch.zeros(3)}, r"model/bias is torch.float32 (3,), not torch.float32 (2,)"),
        ({"model/bias": torch.zeros(2, dtype=torch.float64)}, "torch.float64"),
        ({"model/bias": torch.tensor([0.0, torch.nan])}, "model/bias holds NaN or infinity"),
        ({"model/bias": torch.tensor([0.0, -1e30])}, "model/bias holds -1e+30, beyond ±1e+06"),
        ({"num_examples": torch.tensor(torch.inf)}, "num_examples is inf, not from 0 to 1e+07"),
        ({"num_examples": torch.tensor(torch.nan)}, "num_examples is nan, not from 0 to 1e+07"),
        ({"num_examples": torch.tensor(3e38)}, "num_examples is 3e+38, not from 0 to 1e+07"),
        ({"num_examples": torch.tensor(-1.0)}, "num_examples is -1, not from 0 to 1e+07"),
    ],
)
def test_a_bad_update_is_rejected_with_the_reason(changes: Tensors, reason: str) -> None:
    assert reason in (rejection(changes) or "")


def test_a_missing_tensor_is_named() -> None:
    assert rejection({}, without="model/bias") == "it lacks 'model/bias'"


def test_the_first_problem_by_name_is_the_reason() -> None:
    bad = torch.full((2,), torch.nan)
    backwards = {"num_examples": torch.tensor(torch.nan), "model/weight": torch.ones(2, 2), "model/bias": bad}
    assert (update_rejection(backwards, EXPECTED, SENT) or "").startswith("model/bias")


def test_limits_are_inclusive_and_can_be_chosen() -> None:
    """Counts need not be whole: a client may add noise to them."""
    largest = {**GOOD, "model/bias": torch.tensor([1e6, -1e6]), "num_examples": torch.tensor(1e7)}
    assert update_rejection(largest, EXPECTED, SENT) is None
    assert rejection({"num_examples": torch.tensor(0.5)}) is None
    assert "not from 0 to 2" in (update_rejection(GOOD, EXPECTED, SENT, UpdateLimits(max_examples=2)) or "")
    assert "beyond ±0.5" in (update_rejection(GOOD, EXPECTED, SENT, UpdateLimits(max_value=0.5)) or "")


@pytest.mark.parametrize("value", [-3e38, 1e9, torch.nan])
@pytest.mark.parametrize("name", ["validation_loss", "num_examples"])
def test_a_validation_score_cannot_decide_alone(name: str, value: float) -> None:
    expected = ValidationUpdate(torch.zeros(()), torch.zeros(()))
    score = {"validation_loss": torch.tensor(1.0), "num_examples": torch.tensor(2.0), name: torch.tensor(value)}
    assert update_rejection(score, expected, SENT) is not None
    stacked = {name: tensor[None] for name, tensor in score.items()}
    assert update_rejections(stacked, [expected], [SENT]) != [None]


def test_an_update_may_move_as_far_as_the_bound_and_no_further() -> None:
    """The change is 1 in four weights: norm 2. Counts are no part of it."""
    assert rejection({}, max_norm=2.0) is None
    assert "norm 2, above schedule.max_update_norm=1.9" in (rejection({}, max_norm=1.9) or "")


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"loss": torch.tensor(1.0), "age": torch.tensor(42.0)}, "its report holds 'age', which is not declared"),
        ({"loss": torch.tensor(torch.nan)}, "in its report, loss holds NaN"),
        ({"loss": torch.tensor(1.7e308, dtype=torch.float64)}, "in its report, loss holds 1.7e+308, beyond"),
        ({"loss": torch.tensor(2**62)}, "in its report, loss holds 4.612e+18, beyond"),
        ({"loss": torch.zeros(1000)}, "its report of loss is torch.float32 (1000,)"),
        ({"loss": torch.zeros((), dtype=torch.complex64)}, "its report of loss is torch.complex64 ()"),
        ({"loss": torch.zeros(()).to(torch.float8_e5m2)}, "its report of loss is torch.float8_e5m2 ()"),
        ({}, "its report lacks 'loss'"),
    ],
)
def test_a_bad_report_is_rejected_with_the_reason(report: Tensors, reason: str) -> None:
    assert reason in (report_rejection(report, ("loss",)) or "")
    stacked = {name: torch.stack([tensor, tensor]) for name, tensor in report.items()}
    assert all(reason in (found or "") for found in report_rejections(stacked, ("loss",), [None, None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_good_report_is_accepted(dtype: torch.dtype) -> None:
    assert report_rejection({"loss": torch.tensor(1.0).to(dtype)}, ("loss",)) is None
    assert report_rejections({"loss": torch.tensor([1.0]).to(dtype)}, ("loss",), [None]) == [None]


# Experts


@message(experts="models", expert_ids="ids")
class Experts(NamedTuple):
    models: Tensors
    ids: Tensor


HELD = Experts({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, torch.tensor([1, 4]))


def of_experts(ids: list[int], max_norm: float | None = None, **experts: Tensor) -> str | None:
    update = {"ids": torch.tensor(ids), **{f"models/{name}": leaf for name, leaf in experts.items()}}
    return update_rejection(update, HELD, HELD, UpdateLimits(max_norm))


def test_a_client_may_keep_experts_back_but_not_parts_of_one_and_not_send_others() -> None:
    assert of_experts([1, 4], w=torch.ones(2, 3), b=torch.ones(2)) is None
    assert of_experts([4], w=torch.ones(1, 3), b=torch.ones(1)) is None
    assert of_experts([4], w=torch.ones(1, 3)) == "it lacks 'models/b'"
    assert of_experts([2], w=torch.ones(1, 3), b=torch.ones(1)) == "it holds expert 2, which it was not sent"
    assert "models/w is torch.float32 (1, 5), not torch.float32 (1, 3)" in (
        of_experts([4], w=torch.ones(1, 5), b=torch.ones(1)) or ""
    )
    assert "each expert once" in (of_experts([4, 4], w=torch.ones(2, 3), b=torch.ones(2)) or "")
    unnamed = {"models/w": torch.ones(1, 3), "models/b": torch.ones(1)}
    assert update_rejection(unnamed, HELD, HELD) == "it lacks 'ids'"


def test_the_change_of_an_expert_is_measured_against_that_expert() -> None:
    assert "norm 2," in (of_experts([4], max_norm=1.9, w=torch.ones(1, 3), b=torch.ones(1)) or "")
    apart = Experts({"w": torch.tensor([[1.0], [4.0]])}, torch.tensor([1, 4]))
    for ids, rows in (([1, 4], [[1.0], [4.0]]), ([4, 1], [[4.0], [1.0]]), ([4], [[4.0]])):
        update = {"ids": torch.tensor(ids), "models/w": torch.tensor(rows)}
        assert update_rejection(update, apart, apart, UpdateLimits(max_norm=0.1)) is None
    swapped = {"ids": torch.tensor([4, 1]), "models/w": torch.tensor([[1.0], [4.0]])}
    assert "norm 4.243" in (update_rejection(swapped, apart, apart, UpdateLimits(max_norm=0.1)) or "")


def test_the_change_is_measured_where_only_the_broadcast_says_which_experts_they_are() -> None:
    class Trained(NamedTuple):
        models: Tensors

    change = {"models/w": torch.ones(2, 3), "models/b": torch.zeros(2)}
    reason = update_rejection(change, Trained(HELD.models), HELD, UpdateLimits(max_norm=1.0))
    assert "norm 2.449" in (reason or "")


# Groups that reply together


def in_group(*updates):
    stacked = {name: torch.stack([update[name] for update in updates]) for name in updates[0]}
    return update_rejections(stacked, [EXPECTED] * len(updates), [SENT] * len(updates))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, -1.1e6])
def test_of_a_group_only_the_client_with_bad_values_is_rejected(value):
    bad = {**GOOD, "model/bias": torch.full((2,), value)}
    first, second, third = in_group(GOOD, bad, GOOD)
    assert first is None and third is None and second.startswith("model/bias holds")


def test_only_single_values_have_this_limit_not_their_norm():
    large = {**GOOD, "model/weight": torch.full((2, 2), 9e5)}
    assert in_group(large, large) == [None, None]


def test_a_message_of_fewer_clients_than_it_says_is_rejected():
    good = {name: tensor[None] for name, tensor in GOOD.items()}
    assert all("not of 2 clients" in reason for reason in update_rejections(good, [EXPECTED] * 2, [SENT] * 2))


def test_each_client_of_a_group_is_held_to_what_it_was_sent_itself():
    other = Broadcast({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})
    expected = [EXPECTED, Update(other.model, torch.zeros(()))]
    stacked = {name: torch.stack([tensor, tensor]) for name, tensor in GOOD.items()}
    first, second = update_rejections(stacked, expected, [SENT, other])
    assert first is None and "model/bias is torch.float32 (2,), not torch.float32 (3,)" in second
    held = [HELD, HELD._replace(ids=torch.tensor([2, 4]))]
    stacked = trees.to_named(trees.stack([HELD, HELD._replace()]))
    assert update_rejections(stacked, held, held) == [None, "it holds expert 1, which it was not sent"]


def test_reports_of_a_group_are_checked_one_by_one_where_one_is_odd():
    report = {"loss": torch.tensor([1.0, torch.nan])}
    first, second = report_rejections(report, ("loss",), [None, None])
    assert first is None and "loss holds NaN" in second
    assert report_rejections({"loss": torch.tensor([1.0, 2.0])}, ("loss",), ["earlier", None]) == ["earlier", None]
