"""Learning curves: intermediate evaluations, which training never notices."""

import json
from pathlib import Path
from typing import Any

import pytest

from builders import make_common_expert, make_expert, make_gate, read_private, tiny_config, tiny_federation, tiny_setup
from contract.probes import EVERY_NAME, PROBES
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.config import ExperimentConfig
from fedmoe.config_sections import EvaluationConfig
from fedmoe.engines.session import Session
from fedmoe.errors import Stopped
from fedmoe.evaluation.curve import curve_point
from fedmoe.evaluation.metrics import Score
from fedmoe.experiment import run_events
from fedmoe.result import Result
from fedmoe.storage.rundir import RunDirectory
from fedmoe.testing.resume import end_state

RELEASING = [
    name for name, entry in {**CATALOG, **PROBES}.items() if entry.factory(entry.config(), tiny_setup()).release
]
TRAINING = ("sent_by_clients", "received_by_clients", "messages_of_client", "rejected")  # sections of a manifest
TRAFFIC = {"bytes_up": 3, "bytes_down": 4}


@pytest.fixture(autouse=True)
def probes_in_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in PROBES.items():
        monkeypatch.setitem(CATALOG, name, entry)


def config(name: str, every: int | None, **schedule: Any) -> ExperimentConfig:
    made = tiny_config(name, rounds=5, **schedule)
    return made.model_copy(update={"evaluation": EvaluationConfig(every=every)})


def run(config: ExperimentConfig, directory: Path, **options: Any) -> Result:
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    *_, result = run_events(config, directory, **own, common_expert=make_common_expert(), **options)
    assert isinstance(result, Result)
    return result


def trained(result: Result) -> dict[str, Any]:
    """What training came to, to the last bit."""
    state = end_state(result)
    manifest = {key: rows for key, rows in json.loads(state["manifest"]).items() if key in TRAINING}
    return {**{key: state[key] for key in ("server", "private", "scores", "history")}, "manifest": manifest}


@pytest.mark.parametrize("name", EVERY_NAME)
def test_training_never_notices_an_intermediate_evaluation(name, tmp_path):
    options = {"release": name in RELEASING}
    plain, watched = (run(config(name, every, **options), tmp_path / str(every)) for every in (None, 1))
    assert trained(watched) == trained(plain)
    assert plain.data["curve"] == []


def test_a_curve_has_a_point_every_so_many_rounds_and_ends_where_the_rounds_end(tmp_path):
    result = run(config("fedmix", 2, release=True), tmp_path)
    curve = result.data["curve"]
    assert [point["round"] for point in curve] == [2, 4, 5]
    before = [score for score in result.scores if score.model == "before"]
    assert curve[-1] == {"round": 5, **curve_point(before, curve[-1])}
    assert curve[0]["bytes_up"] < curve[1]["bytes_up"] < curve[2]["bytes_up"]
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [{**point, "event": "curve"} for point in curve] == [e for e in events if e["event"] == "curve"]


def test_a_point_of_the_curve_counts_the_bytes_of_the_rounds_and_nothing_else(tmp_path):
    result = run(config("chosen_experts", 1), tmp_path)
    sent = [sum(sum(sizes.values()) for sizes in event["sent"].values()) for event in rounds_of(tmp_path)]
    assert [point["bytes_up"] for point in result.data["curve"]] == [sum(sent[: i + 1]) for i in range(5)]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(folder).read_metrics() if event["event"] == "round"]


@pytest.mark.parametrize("name", ["fedavg", "fedmix", "lg_fedavg", "chosen_experts"])
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_the_curve_of_a_resumed_run_is_that_of_a_straight_one(name, checkpoint_every, tmp_path):
    chosen = config(name, 1, checkpoint_every=checkpoint_every, release=name in RELEASING)
    expected = run(chosen, tmp_path / "whole").data["curve"]
    stops = iter([False] * 3 + [True] * 99)
    with pytest.raises(Stopped):
        run(chosen, tmp_path / "parts", should_stop=lambda: next(stops))
    assert run(chosen, tmp_path / "parts").data["curve"] == expected


def test_an_evaluation_after_a_replayed_round_does_not_see_private_states_of_a_later_one(tmp_path):
    """The process died after round 3, before its first checkpoint: clients hold states that were never to be."""
    chosen = config("lg_fedavg", 1, checkpoint_every=4)
    expected = run(chosen, tmp_path / "whole").data["curve"]
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    events = run_events(chosen, tmp_path / "parts", **own, common_expert=make_common_expert())
    for event in events:
        if getattr(event, "round", 0) == 3:
            break
    events.close()
    folder = RunDirectory(tmp_path / "parts")
    assert not list(folder.checkpoints.iterdir()) and len(read_private(folder.private_store)) > 3
    assert run(chosen, tmp_path / "parts").data["curve"] == expected


def test_a_point_holds_the_mean_of_each_kind_of_score():
    scores = [
        Score(0, False, "before", "own", 0.5, 1.0, 9),
        Score(1, False, "before", "own", 0.7, 1.0, 9),
        Score(0, False, "before", "global", 0.2, 1.0, 9),
        Score(2, True, "before", "own", 0.4, 1.0, 9),
        Score(2, True, "before", "global", 0.9, 1.0, 9),
        Score(3, True, "before", "pooled", 0.3, 1.0, 9),
        Score(4, True, "before", "tuning", 0.7, 1.0, 9),
    ]
    means = {"own": 0.6, "global": 0.2, "unseen": 0.4, "tuning": 0.7, "pooled": 0.3}
    assert curve_point(scores, TRAFFIC) == {**TRAFFIC, **means}
    assert curve_point(scores[:2], TRAFFIC)["pooled"] is None


def test_a_run_is_called_by_its_label(tmp_path):
    chosen = config("fedmix", None)
    labelled = chosen.model_copy(update={"algorithm": type(chosen.algorithm)(name="fedmix", label="FedMix K=4")})
    assert run(labelled, tmp_path).data["title"] == "FedMix K=4"


def test_what_is_scored_in_the_end_anyway_is_not_evaluated_before(tmp_path, monkeypatch):
    evaluated = []
    evaluate = Session.evaluate
    monkeypatch.setattr(
        Session, "evaluate", lambda self, clients: evaluated.append(self.step) or evaluate(self, clients)
    )
    run(config("fedmix", 2, release=True), tmp_path)
    assert evaluated == [2, 4]


def test_a_run_that_died_at_its_very_end_has_one_end_of_its_curve(tmp_path, monkeypatch):
    chosen = config("fedmix", 2)
    monkeypatch.setattr(RunDirectory, "write_json", lambda *_: (_ for _ in ()).throw(OSError))
    with pytest.raises(OSError):
        run(chosen, tmp_path)
    monkeypatch.undo()
    assert [point["round"] for point in run(chosen, tmp_path).data["curve"]] == [2, 4, 5]
    recorded = [event["round"] for event in RunDirectory(tmp_path).read_metrics() if event["event"] == "curve"]
    assert recorded == [2, 4, 5]
