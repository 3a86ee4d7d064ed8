"""A finished run goes on: to the last bit as if it had had all rounds from the start."""

import shutil
import tomllib
from dataclasses import replace

import pytest

from builders import make_common_expert, make_expert, make_gate, tiny_config, tiny_federation, tiny_setup
from contract.probes import PROBES
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.config_sections import EvaluationConfig
from fedmoe.errors import RunError, Stopped
from fedmoe.experiment import Started, run_events
from fedmoe.testing.resume import end_state
from fedmoe.training.rates import RateSchedule

RELEASING = [
    name for name, entry in {**CATALOG, **PROBES}.items() if entry.factory(entry.config(), tiny_setup()).release
]


@pytest.fixture(autouse=True)
def probes_in_catalog(monkeypatch):
    for name, entry in PROBES.items():
        monkeypatch.setitem(CATALOG, name, entry)


def config(name, rounds, *, rates=None, every=None, **schedule):
    made = tiny_config(name, rounds=rounds, release=name in RELEASING, **schedule)
    plan = replace(made.training.federated, rate_over_rounds=rates)
    training = made.training.model_copy(update={"federated": plan})
    return made.model_copy(update={"training": training, "evaluation": EvaluationConfig(every=every)})


def events(name, rounds, directory, *, should_stop=lambda: False, **options):
    made = config(name, rounds, **options)
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    return run_events(made, directory, **own, common_expert=make_common_expert(), should_stop=should_stop)


def run(*arguments, **options):
    *_, result = events(*arguments, **options)
    return result


# Validation, private states, control variates, several experts, exchanges after the rounds, none at all.
QUICK = ("fedavg", "ditto", "scaffold", "ifca", "calibrated", "local_only")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in {**CATALOG, **PROBES}]
)
def test_a_finished_run_goes_on_as_if_it_had_never_ended(name, tmp_path):
    """The rounds, what follows them, private states, the curve and all that was counted; FedAvg and its kin validate
    the last round, which is then no longer the last."""
    expected = end_state(run(name, 4, tmp_path / "whole", every=1))
    run(name, 2, tmp_path / "parts", every=1)
    assert end_state(run(name, 4, tmp_path / "parts", every=1)) == expected
    assert tomllib.loads((tmp_path / "parts" / "config.toml").read_text())["schedule"]["rounds"] == 4


def test_also_where_checkpoints_are_rare(tmp_path):
    expected = end_state(run("calibrated", 7, tmp_path / "whole", checkpoint_every=2))
    run("calibrated", 5, tmp_path / "parts", checkpoint_every=2)
    first, *_ = events("calibrated", 7, tmp_path / "parts", checkpoint_every=2)
    assert isinstance(first, Started) and first.resumed_from == 4
    assert end_state(run("calibrated", 7, tmp_path / "parts", checkpoint_every=2)) == expected


def test_an_unfinished_run_goes_on_to_more_rounds_too(tmp_path):
    answers = iter([False, False, True])
    with pytest.raises(Stopped):
        run("ditto", 3, tmp_path / "parts", should_stop=lambda: next(answers))
    resumed = run("ditto", 5, tmp_path / "parts")
    assert end_state(resumed) == end_state(run("ditto", 5, tmp_path / "whole"))


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_that_is_stopped_again_while_it_goes_on_resumes(stop, tmp_path):
    run("ditto", 3, tmp_path / "parts")
    answers = iter([False] * (stop - 1) + [True] * 9)
    with pytest.raises(Stopped):
        run("ditto", 5, tmp_path / "parts", should_stop=lambda: next(answers))
    assert end_state(run("ditto", 5, tmp_path / "parts")) == end_state(run("ditto", 5, tmp_path / "whole"))


def test_damaged_checkpoints_cost_rounds_and_nothing_else(tmp_path):
    expected = end_state(run("ditto", 5, tmp_path / "whole"))
    run("ditto", 3, tmp_path / "parts")
    for path in (tmp_path / "parts" / "checkpoints").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:60])
    resumed = end_state(run("ditto", 5, tmp_path / "parts"))
    assert {**resumed, "notes": []} == {**expected, "notes": []}


def test_fewer_rounds_or_another_setting_are_another_run_and_leave_it_as_it_is(tmp_path):
    run("fedavg", 3, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"schedule\.rounds is 3 there and 2 here"):
        run("fedavg", 2, tmp_path / "run")
    with pytest.raises(RunError, match=r"schedule\.min_clients is 1 there and 2 here"):
        run("fedavg", 5, tmp_path / "run", min_clients=2)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_learning_rate_that_depends_on_the_number_of_rounds_is_refused(tmp_path):
    run("fedavg", 3, tmp_path / "run", rates=RateSchedule("cosine"))
    with pytest.raises(RunError, match=r"begun with 3 rounds.*rate_over_rounds\.over"):
        run("fedavg", 5, tmp_path / "run", rates=RateSchedule("cosine"))
    over = RateSchedule("cosine", over=8)
    run("fedavg", 3, tmp_path / "over", rates=over)
    went_on, whole = (end_state(run("fedavg", 5, tmp_path / home, rates=over)) for home in ("over", "whole"))
    assert went_on == whole


def test_a_run_that_ended_early_would_end_there_again(tmp_path):
    stops = {"stop_at": {"accuracy": 0.0}, "validate_every": 2}
    run("fedavg", 3, tmp_path / "run", **stops)
    with pytest.raises(RunError, match=r"ended after round 2, since validation accuracy.*other settings"):
        run("fedavg", 5, tmp_path / "run", **stops)


def test_a_kill_while_the_run_is_made_ready_to_go_on_loses_nothing(tmp_path, monkeypatch):
    """At each write: before it the run is what it was, or has a round less."""
    expected = end_state(run("ditto", 5, tmp_path / "whole"))
    run("ditto", 3, tmp_path / "finished")
    for name in ("unmark_finished", "drop_from"):
        home = tmp_path / name
        shutil.copytree(tmp_path / "finished", home)
        with monkeypatch.context() as patched:
            patched.setattr("fedmoe.storage.rundir.RunDirectory.record_rounds", _killed)
            patched.setattr(f"fedmoe.resuming.{name}", _killed)
            with pytest.raises(KeyboardInterrupt):
                run("ditto", 5, home)
        assert run("ditto", 3, home).data["rounds"] == 3
        assert end_state(run("ditto", 5, home)) == expected


def _killed(*_arguments):
    raise KeyboardInterrupt
