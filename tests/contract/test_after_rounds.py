"""Exchanges after the last round: of everyone who opted in, each aggregated, checkpointed and resumed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from builders import (
    PARTICIPANTS,
    make_expert,
    make_gate,
    read_private,
    run_spied,
    tiny_config,
    tiny_federation,
    tiny_setup,
)
from contract.calibrated import CalibratedConfig, calibrated
from contract.probes import PROBES
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.errors import Stopped
from fedmoe.experiment import run_events


def test_everyone_who_opted_in_is_asked_each_time(tmp_path: Path) -> None:
    outcome, spy = run_spied(calibrated(CalibratedConfig(), tiny_setup()), tiny_federation(), tmp_path / "store")
    asked: dict[int, list[int]] = {}
    for sent in spy.exchanged:
        if sent.asked["phase"] == "after_rounds":
            asked.setdefault(sent.asked["index"], []).extend(sent.asked["clients"])
    assert asked == {index: list(PARTICIPANTS) for index in range(3)}
    assert [record.phase for record in outcome.records] == ["round"] * 2 + ["after_rounds"] * 3


def test_each_exchange_starts_from_the_aggregate_of_the_one_before(tmp_path: Path) -> None:
    scales = [scale_after(exchanges, tmp_path / str(exchanges)) for exchanges in range(4)]
    first, second, third = (abs(after - before) for before, after in pairwise(scales))
    assert scales[0] == 1.0 and first > second > third > 0  # as Newton's method does, if it goes on from where it was


def scale_after(exchanges: int, store: Path) -> float:
    outcome, _ = run_spied(calibrated(CalibratedConfig(exchanges), tiny_setup()), tiny_federation(), store)
    return float(outcome.server.scale)


def test_private_states_move_on_after_the_rounds(tmp_path: Path) -> None:
    run_spied(calibrated(CalibratedConfig(), tiny_setup()), tiny_federation(), tmp_path / "store")
    newest = {client: row for (_, client, _), row in sorted(read_private(tmp_path / "store").items())}
    assert {client: int(load(row)["after_rounds"]) for client, row in newest.items()} == dict.fromkeys(PARTICIPANTS, 3)


@pytest.mark.parametrize("after_step", [4, 5, 6])
def test_a_run_that_was_stopped_among_them_goes_on_there(
    after_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "calibrated", PROBES["calibrated"])
    expected = last(tmp_path / "whole")
    done: list[int] = []
    begun = events(tmp_path / "parts", lambda: bool(done) and done[-1] >= after_step)
    with pytest.raises(Stopped):
        for event in begun:
            done += [event.round] if hasattr(event, "round") else []
    steps = [event.round for event in events(tmp_path / "parts", lambda: False) if hasattr(event, "round")]
    assert steps == list(range(after_step + 1, 8))
    assert last(tmp_path / "parts").data["scores"] == expected.data["scores"]
    assert torch.equal(last(tmp_path / "parts").session.server.scale, expected.session.server.scale)


def events(folder: Path, should_stop: Any) -> Any:
    config = tiny_config("calibrated", rounds=4)
    return run_events(
        config, folder, federation=tiny_federation(), expert=make_expert, gate=make_gate, should_stop=should_stop
    )


def last(folder: Path) -> Any:
    *_, result = events(folder, lambda: False)
    return result
