"""Rounds that end before their number is up: by opted-in validation records alone, on record, and resumed exactly."""

import json
from dataclasses import replace

import pytest
import torch

import fedmoe
from builders import OPTED_OUT, PARTICIPANTS, make_expert, make_gate, tiny_config, tiny_federation, with_records
from contract.probes import PROBES
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.clients.federation import examples
from fedmoe.config_sections import EvaluationConfig
from fedmoe.errors import RunError, Stopped
from fedmoe.experiment import Ended, run_events
from fedmoe.report.notes import notes
from fedmoe.testing.resume import end_state

ENDS = {"stop_at": {"accuracy": 0.0}, "validate_every": 2}  # after two rounds, whatever happens


@pytest.fixture(autouse=True)
def probes_in_catalog(monkeypatch):
    for name, entry in PROBES.items():
        monkeypatch.setitem(CATALOG, name, entry)


def events_of(name, directory, *, federation=None, should_stop=lambda: False, evaluation=None, **schedule):
    config = tiny_config(name, **{"rounds": 5, **schedule})
    config = config.model_copy(update={"evaluation": evaluation or EvaluationConfig()})
    return run_events(
        config,
        directory,
        federation=federation or tiny_federation(),
        expert=make_expert,
        gate=make_gate,
        should_stop=should_stop,
    )


def run(*arguments, **options):
    *_, result = events_of(*arguments, **options)
    return result


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "calibrated"])
def test_rounds_end_where_the_target_is_reached_and_a_run_stopped_anywhere_ends_the_same(name, tmp_path):
    """`calibrated` asks clients again after the last round, whichever that is."""
    whole = run(name, tmp_path / "whole", **ENDS)
    assert whole.data["rounds"] == 2 and whole.data["stopped"]["round"] == 2
    assert [point["round"] for point in whole.data["validations"]] == [2]
    for question in (3, 2, 2):
        answers = iter([False] * (question - 1) + [True] * 99)
        try:
            run(name, tmp_path / "parts", should_stop=answers.__next__, **ENDS)
        except Stopped:
            continue
    assert end_state(run(name, tmp_path / "parts", **ENDS)) == end_state(whole)
    assert run(name, tmp_path / "parts", **ENDS).data["stopped"] == whole.data["stopped"]  # shown again


def test_a_run_that_ends_early_has_delivered_what_a_run_of_so_many_rounds_does(tmp_path):
    early, short = run("ditto", tmp_path / "early", **ENDS), run("ditto", tmp_path / "short", rounds=2)
    assert early.scores == short.scores and end_state(early)["private"] == end_state(short)["private"]
    loaded, x = fedmoe.load(tmp_path / "early", expert=make_expert, gate=make_gate), tiny_federation().global_test.x
    assert torch.equal(loaded.personal_model(0)(x), early.personal_model(0)(x))


def test_patience_is_counted_in_validations_and_the_end_is_said(tmp_path):
    """With a learning rate that moves nothing no validation is better than the first."""
    config = tiny_config("fedavg", rounds=9, patience=2, validate_every=2)
    still = replace(config.training.federated, learning_rate=1e-30)
    config = config.model_copy(update={"training": config.training.model_copy(update={"federated": still})})
    *_, result = events = list(
        run_events(config, tmp_path, federation=tiny_federation(), expert=make_expert, gate=make_gate)
    )
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert ended.round == 6 and "best after round 2 and no better in 2 validations" in ended.reason
    (said,) = [note for note in notes([result.data]) if "ended" in note]
    assert "FedAvg, seed 0: the rounds ended after 6 of 9, since the validation loss was best after round 2" in said
    assert "the rounds ended after 6 of 9" in (tmp_path / "report.html").read_text()
    on_disk = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert on_disk.count("validation") == 3 and on_disk.count("stopped") == 1


def test_without_the_settings_nobody_is_asked_and_nothing_is_said(tmp_path):
    result = run("fedavg", tmp_path)
    assert result.data["stopped"] is None and result.data["validations"] == []


def other_labels(rows, mask):
    """The same rows, with other labels where the mask says so."""
    return examples(rows.x, torch.where(mask, (rows.y + 1) % 3, rows.y), rows.extra)


@pytest.mark.parametrize("what", ["test rows", "opted-out validation rows", "everything of who opted out"])
def test_what_decides_is_opted_in_validation_data_alone(what, tmp_path):
    plain, changed = tiny_federation(), {}
    for client in range(plain.num_clients):
        held = plain.load(client)
        if what == "test rows":
            changed[client] = held._replace(test=other_labels(held.test, torch.ones(len(held.test.y)).bool()))
        elif what == "opted-out validation rows":
            changed[client] = held._replace(validation=other_labels(held.validation, ~held.validation_opted_in))
        elif client == OPTED_OUT:
            rows = other_labels(held.validation, torch.ones(len(held.validation.y)).bool())
            changed[client] = held._replace(validation=rows)
    stops = {"patience": 9, "validate_every": 1}
    one = run("fedmix", tmp_path / "one", **stops)
    other = run("fedmix", tmp_path / "other", federation=with_records(plain, changed), **stops)
    assert one.data["validations"] == other.data["validations"] != []
    with_rows = [c for c in PARTICIPANTS if plain.load(c).validation_opted_in.any()]
    assert {point["clients"] for point in one.data["validations"]} == {len(with_rows)}


def test_validation_is_counted_with_the_scores_and_not_with_the_training(tmp_path):
    plain, watched = (
        run("fedmix", tmp_path / str(stops), **({"patience": 9, "validate_every": 1} if stops else {}))
        for stops in (False, True)
    )
    assert watched.data["traffic"]["bytes_up"] == plain.data["traffic"]["bytes_up"]
    assert watched.data["traffic"]["score_bytes"] > plain.data["traffic"]["score_bytes"]
    assert watched.scores == plain.scores


def test_no_validation_rows_at_all_is_an_error_that_says_so(tmp_path):
    plain = tiny_federation()
    bare = {
        client: held._replace(
            validation=examples(held.validation.x[:0], held.validation.y[:0]),
            validation_opted_in=held.validation_opted_in[:0],
        )
        for client in range(plain.num_clients)
        for held in [plain.load(client)]
    }
    with pytest.raises(RunError, match="no client that takes part sent scores on any"):
        run("fedmix", tmp_path, federation=with_records(plain, bare), patience=1, validate_every=1)
