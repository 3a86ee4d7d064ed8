"""Runs with differential privacy, from the config to the ledger."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedmoe
from builders import make_expert, make_gate, tiny_federation, tiny_records, with_records
from fedmoe.accounting import epsilon, rdp_epsilon, solve_noise_multiplier, steps_within
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.cli import app
from fedmoe.config import parse_config
from fedmoe.errors import ConfigError, RunError
from fedmoe.privacy_report import privacy_of
from fedmoe.private_steps import Charge
from fedmoe.storage.results import read_results

PRIVACY = {"sampling_rate": 0.25, "expected_batch_size": 2.0, "noise_multiplier": 1.1, "noise_source": "seeded"}
PLAN = {"epochs": 1, "steps": 2, "batch_size": 4, "learning_rate": 0.2, "optimizer": "sgd"}
REFUSED = {
    "scaffold", "ifca", "fedem", "fedmix", "fedrep", "centralized", "fedjets", "fedmix_common", "average_ensembles",
    "common_expert",
}  # fmt: skip


def table_of(name: str = "fedavg", rounds: int = 3, **sections):
    return {
        "algorithm": {"name": name},
        "schedule": {"rounds": rounds, "clients_per_round": "all"},
        "training": dict.fromkeys(("federated", "local", "personal"), PLAN),
        "engine": {"workers": 1},
        "privacy": PRIVACY,
        **sections,
    }


def run(folder: Path, federation=None, **options):
    given = {"expert": make_expert, "gate": make_gate}
    return fedmoe.run(table_of(**options), federation=federation or tiny_federation(), directory=folder, **given)


def charges_in(folder: Path) -> dict[int, list[Charge]]:
    return {one.client: list(one.charges) for one in privacy_of(folder).spent}


# The accountants


def test_epsilon_is_that_of_dp_accounting_and_never_above_opacus() -> None:
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    for sigma, rate, steps in ((1.0, 0.01, 1000), (2.0, 0.2, 100), (0.7, 1.0, 3)):
        theirs = PLDAccountant()
        gaussian = dp_event.GaussianDpEvent(sigma)
        theirs.compose(gaussian if rate == 1 else dp_event.PoissonSampledDpEvent(rate, gaussian), steps)
        ours = [Charge("gradient", steps, rate, sigma, 5.0)]
        assert epsilon(ours, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)
        assert epsilon(ours, 1e-5) <= rdp_epsilon(ours, 1e-5)
    assert epsilon([Charge("gradient", 1000, 0.01, 1.0, 1.0)], 1e-5) == pytest.approx(1.828, abs=1e-3)


def test_charges_add_up_and_label_counts_are_charged_once() -> None:
    step, counts = Charge("gradient", 10, 0.1, 1.5, 1.0), Charge("label_counts", 1, 1.0, 1.5, 1.0)
    assert epsilon([step, step], 1e-5) == epsilon([step._replace(steps=20)], 1e-5)
    assert epsilon([counts, step, counts], 1e-5) == epsilon([step, counts], 1e-5) > epsilon([step], 1e-5)
    assert epsilon([step, step._replace(noise_multiplier=0.0)], 1e-5) == float("inf") and epsilon([], 1e-5) == 0


def test_noise_is_solved_for_a_target_and_steps_for_a_budget() -> None:
    sigma = solve_noise_multiplier(2.0, 1e-5, 0.2, 50, label_counts=False)
    spent = [epsilon([Charge("gradient", 50, 0.2, s, 1.0)], 1e-5) for s in (sigma, 0.99 * sigma)]
    assert spent[0] <= 2.0 < spent[1]
    step = Charge("gradient", 1, 0.2, sigma, 1.0)
    assert 50 <= steps_within(2.0, step, [], 1e-5, 200) < 60
    with pytest.raises(ConfigError, match="out of reach"):
        solve_noise_multiplier(1e-6, 1e-12, 1.0, 10**6, label_counts=False)


# What is sent


@pytest.mark.parametrize("name", sorted(CATALOG.keys() - REFUSED - {"local_only"}))
def test_every_sound_algorithm_runs_and_is_charged_for_what_it_sent(name: str, tmp_path: Path) -> None:
    result = run(tmp_path, name=name, rounds=2)
    spent = charges_in(tmp_path)
    assert [*spent] == [0, 1, 3, 4]
    for charges in spent.values():
        assert sum(charge.steps for charge in charges if charge.kind == "gradient") == 4
    sent = result.data["traffic"]
    reported = result.data["history"][0]["reports"].keys() - {"gradient_norm"}  # which the server computes
    assert sent["bytes_up"] > 0 and not reported
    assert not any("loss" in tensor for tensor in _sent_names(tmp_path))


def _sent_names(folder: Path) -> list[str]:
    import json

    sent = json.loads((folder / "manifest.json").read_text())["sent_by_clients"]
    return [name for exchange in sent.values() for name in exchange]


@pytest.mark.parametrize("name", sorted(REFUSED & CATALOG.keys() - {"common_expert", "fedjets", "fedmix_common"}))
def test_the_others_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be trained with differential privacy: [a-z]+"):
        run(tmp_path, name=name)


def test_an_algorithm_from_outside_must_say_that_it_is_sound(tmp_path: Path) -> None:
    def mine(setup):
        return CATALOG["fedavg"].factory(CATALOG["fedavg"].config(), setup)._replace(no_guarantee="because")

    with pytest.raises(ConfigError, match="because"):
        fedmoe.run(
            {key: value for key, value in table_of().items() if key != "algorithm"},
            federation=tiny_federation(), expert=make_expert, algorithm=mine, directory=tmp_path,
        )  # fmt: skip


def test_example_counts_do_not_leave(tmp_path: Path) -> None:
    """Clients of one and of seven records look alike to the server, but for the noised models."""
    parts = fedmoe.build(table_of(), federation=tiny_federation(), expert=make_expert, gate=make_gate)
    exchange = parts.algorithm.round[0]
    assert parts.algorithm.validation is None and exchange.report_type.__name__ == "NoReport"


def test_private_work_beside_the_exchange_has_no_noise_and_costs_nothing(tmp_path: Path) -> None:
    run(tmp_path / "ditto", name="ditto")
    run(tmp_path / "fedavg", name="fedavg")
    assert charges_in(tmp_path / "ditto") == charges_in(tmp_path / "fedavg")


def test_label_frequencies_are_noised_once_and_charged_once(tmp_path: Path) -> None:
    run(tmp_path, name="fedrod", rounds=3)
    charges = charges_in(tmp_path)[3]
    assert Charge("label_counts", 1, 1.0, 1.1, 1.0) in charges
    alone = [charge for charge in charges if charge.kind == "gradient"]
    assert epsilon(charges, 1e-5) == epsilon([*alone, Charge("label_counts", 1, 1.0, 1.1, 1.0)], 1e-5)


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_the_seed_gives_the_noise_away_only_where_that_is_asked_for(source: str, tmp_path: Path) -> None:
    privacy = PRIVACY | {"noise_source": source}
    models = [run(tmp_path / str(n), privacy=privacy).session.server.model for n in range(2)]
    same = all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert same == (source == "seeded")
    assert (tmp_path / "0" / "manifest.json").read_text().count(f'"noise_source": "{source}"') == 1


def test_opted_out_records_change_no_byte_that_leaves(tmp_path: Path) -> None:
    records = tiny_records()
    changed = records[0]._replace(train=records[0].train._replace(x=records[0].train.x.clone()))
    changed.train.x[~records[0].train_opted_in] = 99.0
    servers = [
        run(tmp_path / str(n), federation=with_records(tiny_federation(), one)).session.server.model
        for n, one in enumerate(({}, {0: changed}))
    ]
    assert all(torch.equal(servers[0][name], servers[1][name]) for name in servers[0])


# The ledger


def test_the_ledger_is_printed_or_the_reason_why_there_is_none(tmp_path: Path) -> None:
    run(tmp_path / "on")
    shown = CliRunner().invoke(app, ["privacy", str(tmp_path / "on")])
    assert shown.exit_code == 0, shown.output
    assert "add or remove one record" in " ".join(shown.output.split()) and "1.1" in shown.output
    report = privacy_of(tmp_path / "on")
    assert report.epsilon == pytest.approx(epsilon([Charge("gradient", 6, 0.25, 1.1, 1.0)], 1e-5))
    run(tmp_path / "zero", privacy=PRIVACY | {"noise_multiplier": 0.0})
    fedmoe.run(
        {key: value for key, value in table_of().items() if key != "privacy"},
        federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=tmp_path / "off",
    )  # fmt: skip
    stored = read_results(tmp_path / "on")["privacy"]
    assert [one["epsilon"] for one in stored["clients"]] == [one.epsilon for one in report.spent]
    assert "The privacy ledger" in (tmp_path / "on" / "report.html").read_text()
    assert "there is no noise" in read_results(tmp_path / "zero")["privacy"]["no_guarantee"]
    assert "privacy" not in read_results(tmp_path / "off")
    for name, words in (("zero", "there is no noise"), ("off", "switched off")):
        shown = CliRunner().invoke(app, ["privacy", str(tmp_path / name)])
        assert shown.exit_code == 0 and "no guarantee" in shown.output and words in " ".join(shown.output.split())
        assert privacy_of(tmp_path / name).epsilon is None and "epsilon" not in shown.output


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import fedmoe
    from builders import make_expert, make_gate, tiny_federation
    from fedmoe.clients.privacy_ledger import PrivacyLedger
    from test_private_runs import table_of
    record, times = PrivacyLedger.record, [0]
    def dies(self, *arguments):
        {before}
        record(self, *arguments)
        times[0] += 1
        if times[0] == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
    PrivacyLedger.record = dies
    fedmoe.run(table_of(rounds=4, schedule={{"rounds": 4, "clients_per_round": "all", "checkpoint_every": 2}}),
        federation=tiny_federation(), expert=make_expert, gate=make_gate, directory={folder!r})
"""


@pytest.mark.parametrize("before", ["pass", "if times[0] + 1 == 4: os.kill(os.getpid(), signal.SIGKILL)"])
def test_kill_and_resume_count_neither_less_nor_more_and_send_the_same_bytes(before: str, tmp_path: Path) -> None:
    schedule = {"rounds": 4, "clients_per_round": "all", "checkpoint_every": 2}
    plain = run(tmp_path / "plain", rounds=4, schedule=schedule)
    folder = tmp_path / "killed"
    here = str(Path(__file__).parent)
    code = textwrap.dedent(KILLED.format(tests=here, folder=str(folder), at=4, before=before))
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    resumed = run(folder, rounds=4, schedule=schedule)
    assert all(
        torch.equal(resumed.session.server.model[name], tensor) for name, tensor in plain.session.server.model.items()
    )
    assert charges_in(folder) == charges_in(tmp_path / "plain")


def test_a_question_that_differs_gets_a_fresh_draw(tmp_path: Path) -> None:
    """Another broadcast in the same round: the noise of the first reply is never used for the second."""
    from fedmoe.engines.private_replies import PrivateReplies, _requests

    header = {"phase": "round", "index": 0, "round": 3, "state_versions": [0, 0], "broadcast_index": [0, 1]}
    first = _requests(header, [memoryview(b"one"), memoryview(b"two")])
    assert first[0] != first[1] and first == _requests(header, [memoryview(b"one"), memoryview(b"two")])
    assert first[0] != _requests({**header, "round": 4}, [memoryview(b"one"), memoryview(b"two")])[0]
    parts = fedmoe.build(table_of(), federation=tiny_federation(), expert=make_expert, gate=make_gate)
    replies = PrivateReplies.of(parts, tmp_path / "private.sqlite", "0" * 32)
    assert replies is not None
    steps = []

    def compute(asked, _blobs, private):
        for client in asked["clients"]:
            steps.append((client, private.begin_step(client, 1.0)))
        return [[client] for client in asked["clients"]], [
            [b"reply to ", bytes([asked["round"]])] for _ in asked["clients"]
        ]

    question = {**header, "clients": [0, 3], "broadcast_index": [0, 0]}
    answers = [replies.answer(question, [memoryview(blob)], compute) for blob in (b"x", b"x", b"y")]
    assert answers[0] == answers[1] and steps == [(0, 0), (3, 0), (0, 1), (3, 1)]
    replies.close()


def test_a_budget_ends_participation_and_the_worker_keeps_to_it_by_itself(tmp_path: Path) -> None:
    budget = epsilon([Charge("gradient", 5, 0.25, 1.1, 1.0)], 1e-5)  # two rounds of two steps, and not three
    result = run(tmp_path, rounds=4, privacy=PRIVACY | {"stop_at_epsilon": budget})
    assert {sum(c.steps for c in charges) for charges in charges_in(tmp_path).values()} == {4}
    assert privacy_of(tmp_path).epsilon <= budget and result.data["rounds"] == 4
    with pytest.raises(ConfigError, match="ends before the first round"):
        run(tmp_path / "none", privacy=PRIVACY | {"stop_at_epsilon": 0.01})


def test_a_ledger_of_another_run_or_without_its_rounds_is_refused(tmp_path: Path) -> None:
    schedule = {"rounds": 3, "clients_per_round": "all"}
    run(tmp_path, rounds=2, schedule=schedule | {"rounds": 2})
    for results in ("results.json", "report.html"):
        (tmp_path / results).unlink()
    ledger = tmp_path / "clients" / "privacy.sqlite"
    with sqlite3.connect(ledger) as db:
        db.execute("DELETE FROM entries WHERE client = 3 AND round = 2")
    db.close()
    with pytest.raises(RunError, match="no entry of client 3 for round 2"):
        run(tmp_path, rounds=2, schedule=schedule | {"rounds": 2})
    with sqlite3.connect(ledger) as db:
        db.execute("UPDATE meta SET run_id = 'other'")
    db.close()
    with pytest.raises(RunError, match="the privacy ledger of another run"):
        run(tmp_path, rounds=2, schedule=schedule | {"rounds": 2})


# Bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_epsilon": 0.0, "noise_multiplier": None}, "no noise gives an epsilon of 0"),
        ({"stop_at_epsilon": -1.0}, "no noise gives an epsilon of 0"),
        ({"delta": 0.5}, "not below 1 / N for the N = 8 records"),
        ({"delta": 1.5}, "is no probability"),
        ({"noise_multiplier": -0.5}, "is negative"),
        ({"sampling_rate": 1.5}, "no probability of a record"),
        ({"target_epsilon": 3.0}, "needs one of noise_multiplier and target_epsilon"),
        ({"noise_multiplier": None}, "needs one of noise_multiplier and target_epsilon"),
        ({"sampling": 0.1}, "not known"),
    ],
)
def test_bad_settings_are_named(changes, words, tmp_path: Path) -> None:
    privacy = {key: value for key, value in (PRIVACY | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, privacy=privacy)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"schedule": {"rounds": 2, "release": True}}, "release private parts"),
        ({"schedule": {"rounds": 2, "patience": 2}}, "validation losses"),
        ({"schedule": {"rounds": 2, "stop_at": {"accuracy": 0.9}}}, "validation scores"),
        ({"training": {"class_weights": "balanced"}}, "change the weights of all others"),
    ],
)
def test_what_would_leave_beside_the_noise_is_refused(sections, words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, **sections)


def test_layers_that_mix_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BatchNorm"):
        fedmoe.run(
            table_of(),
            federation=tiny_federation(),
            expert=lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
            gate=make_gate,
            directory=tmp_path,
        )


def test_a_config_without_the_section_has_no_privacy() -> None:
    assert parse_config({}).privacy is None


def test_more_rounds_than_the_budget_was_planned_for_are_refused(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    with pytest.raises(RunError, match=r"begun with 1 rounds, and the budget.*planned for so many"):
        run(tmp_path, rounds=2)
