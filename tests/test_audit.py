"""The audit on real digits: what it finds, that it changes nothing, and what it refuses."""

import json
import re
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedmoe
from builders import make_expert, make_gate, read_private, tiny_config, tiny_federation
from fedmoe.algorithms.partial_personalization import aggregate
from fedmoe.audit import audit_labels
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.config import parse_config
from fedmoe.config_sections import OptOutConfig
from fedmoe.errors import RunError
from fedmoe.evaluation.label_attacks import Observed, attacks_on, bias_change
from fedmoe.evaluation.label_leakage import normalised_shares
from fedmoe.experiment import Stopped, run_events
from fedmoe.storage.rundir import RunDirectory
from fedmoe.training.settings import LocalTraining


def digits(algorithm="fedavg", **changes):
    federated = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 100, **changes}
    return parse_config(
        {
            "algorithm": {"name": algorithm},
            "split": {"num_clients": 6, "train_size": 40, "validation_size": 10, "test_size": 20, "share": 0.8},
            "model": {"hidden": [16]},
            "training": {"federated": federated, "local": {"epochs": 1}, "personal": {"epochs": 1}},
            "schedule": {"rounds": 3, "clients_per_round": 3},
            "opt_out": {"clients": [4]},
            "engine": {"workers": 1},
        }
    )


ROWS = "output weights, length of rows"


def by_attack(found, number):
    return {reading["attack"]: reading for reading in found["attacks"] if reading["round"] == number}


def test_one_full_step_of_a_fresh_model_nearly_gives_the_label_distribution_away(tmp_path):
    fedmoe.run(digits(), directory=tmp_path)
    found = audit_labels(tmp_path)
    first, later = by_attack(found, 1), by_attack(found, 4)
    assert first["output bias, eq. 15"]["mean"] < 0.1 < 0.4 < found["uniform_guess"]["mean"]
    assert set(first) == set(later) == {"output bias, eq. 15", "output bias, normalised", ROWS}
    assert json.loads((tmp_path / "audit_labels.json").read_bytes()) == found


def test_the_truth_is_that_of_opted_in_training_records(tmp_path):
    config = digits().model_copy(update={"opt_out": OptOutConfig(clients=(4,), record_fraction=0.5)})
    result = fedmoe.run(config, directory=tmp_path)
    truth = audit_labels(tmp_path)["truth"]
    assert set(truth) == {"0", "1", "2", "3", "5"}  # 4 opted out and is not even asked
    held = result.federation.load(0)
    labels = held.train.y[held.train_opted_in]
    assert 0 < len(labels) < len(held.train.y)
    assert truth["0"] == pytest.approx((np.bincount(labels, minlength=10) / len(labels)).tolist())


def test_adam_is_read_without_its_rate(tmp_path):
    fedmoe.run(digits(optimizer="adam", learning_rate=1e-3, batch_size=10), directory=tmp_path)
    found = audit_labels(tmp_path)
    assert set(by_attack(found, 1)) == {"output bias, normalised", ROWS}
    assert by_attack(found, 1)["output bias, normalised"]["mean"] < found["uniform_guess"]["mean"] / 2


def test_centralised_training_sends_the_labels_themselves(tmp_path):
    fedmoe.run(digits("centralized"), directory=tmp_path)
    stated = by_attack(audit_labels(tmp_path), 1)["labels, sent as they are"]
    assert stated["farthest"] == 0 and len(stated["clients"]) == 5


def contents(folder):
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "clients"}
    return files, read_private(RunDirectory(folder).private_store)


def test_the_run_stays_as_it_is_and_the_audit_repeats(tmp_path):
    fedmoe.run(digits("lg_fedavg"), directory=tmp_path)
    files, private = contents(tmp_path)
    found = audit_labels(tmp_path)
    (tmp_path / "audit_labels.json").unlink()
    assert contents(tmp_path) == (files, private) and private
    assert audit_labels(tmp_path) == found


def test_what_is_attacked_is_what_the_server_receives(tmp_path, monkeypatch):
    """The third round is attacked before it takes place, private states and all; then the run goes on."""
    config = tiny_config("lg_fedavg", rounds=3)
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    asked = iter([False, False])  # before the first and the second round
    with pytest.raises(Stopped):
        list(run_events(config, tmp_path, **own, should_stop=lambda: next(asked, True)))
    predicted = by_attack(audit_labels(tmp_path, **own), 3)["output bias, normalised"]["clients"]

    received = []

    def spy(config, server, updates):
        received.extend((client, Observed(server, update)) for client, update in updates.items())
        return aggregate(config, server, updates)

    monkeypatch.setattr("fedmoe.algorithms.partial_personalization.aggregate", spy)
    list(run_events(config, tmp_path, **own))
    assert len(received) == 3
    for client, reply in received:
        expected = normalised_shares(bias_change("3.bias", reply)).tolist()
        assert predicted[str(client)] == pytest.approx(expected, abs=1e-5)


def test_what_an_expert_mixture_reports_is_solved_for_labels_where_it_is_about_labels():
    sent = namedtuple("Sent", "posterior")(torch.tensor([[9.0, 0.0], [0.0, 9.0]]))
    reply = Observed(sent, namedtuple("Update", "usage")(torch.tensor([0.75, 0.25])))

    def attacks(condition, objective):
        return attacks_on(SimpleNamespace(condition=condition, objective=objective), LocalTraining(), "bias", 10)

    read = attacks("label", "variational")["q(z|s) and phi"](reply)
    torch.testing.assert_close(read, torch.tensor([0.75, 0.25]).double(), atol=1e-3, rtol=0)
    assert attacks("label", "variational")["output bias, normalised"](reply) is None
    assert "q(z|s) and phi" not in attacks("client", "variational") | attacks("label", "mixture")


def test_of_several_experts_the_summed_step_is_read():
    sent = namedtuple("Sent", "experts expert_ids")({"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, torch.tensor([0, 2]))
    update = namedtuple("Update", "experts expert_ids")({"b": torch.tensor([[3.5, 4.0]])}, torch.tensor([2]))
    assert bias_change("b", Observed(sent, update)).tolist() == [0.5, 0.0]
    whole = update._replace(experts={"b": torch.tensor([[3.0, 5.0], [1.5, 2.0]])}, expert_ids=torch.tensor([2, 0]))
    assert bias_change("b", Observed(sent, whole)).tolist() == [0.5, 1.0]


def test_an_algorithm_that_keeps_its_output_bias_is_read_by_the_rows_of_its_weights(tmp_path):
    fedmoe.run(digits("biased_fedavg"), directory=tmp_path)
    found = audit_labels(tmp_path)
    assert {row["attack"] for row in found["attacks"]} == {ROWS}
    assert by_attack(found, 1)[ROWS]["mean"] < found["uniform_guess"]["mean"]


def test_an_algorithm_that_sends_nothing_of_the_kind_is_named(tmp_path):
    fedmoe.run(digits("local_only"), directory=tmp_path)
    with pytest.raises(RunError, match="local_only sends no labels, no output layer"):
        audit_labels(tmp_path)
    assert not (tmp_path / "audit_labels.json").exists()


def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        audit_labels(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_run_on_other_data_asks_for_them(tmp_path):
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    fedmoe.run(tiny_config("fedavg"), directory=tmp_path, **own)
    with pytest.raises(RunError, match="other data than its config gives"):
        audit_labels(tmp_path)
    assert audit_labels(tmp_path, **own)["num_classes"] == 3


def test_few_clients_are_drawn_by_the_seed(tmp_path):
    fedmoe.run(digits(), directory=tmp_path)
    assert len(audit_labels(tmp_path, 2)["truth"]) == 2
    assert audit_labels(tmp_path, 2)["truth"] == audit_labels(tmp_path, 2)["truth"]


def damaged_store(folder):
    (folder / "clients" / "private.sqlite").write_bytes(b"noise" * 2000)


def folder_for_a_store(folder):
    (folder / "clients" / "private.sqlite").unlink()
    (folder / "clients" / "private.sqlite").mkdir()


@pytest.mark.parametrize("damage", [damaged_store, folder_for_a_store])
def test_a_damaged_store_is_a_sentence(damage, tmp_path):
    fedmoe.run(digits("lg_fedavg"), directory=tmp_path)
    damage(tmp_path)
    with pytest.raises(RunError, match=r"private\.sqlite"):
        audit_labels(tmp_path)


def no_metrics(folder):
    (folder / "metrics.jsonl").write_bytes(b"")


def no_states(folder):
    for path in (folder / "clients").glob("private.sqlite*"):
        path.unlink()


def cut_checkpoint(folder):
    newest = max((folder / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:99])


@pytest.mark.parametrize(
    ("damage", "said", "rounds"),
    [
        (no_metrics, "relies on .* bytes of metrics.jsonl", {1}),
        (no_states, "relies on private states of clients", {1}),
        (cut_checkpoint, "is damaged or cut short .*: using round-00000002", {1, 3}),
    ],
)
def test_an_audit_says_which_checkpoint_it_could_not_use_and_leaves_it(damage, said, rounds, tmp_path):
    """Private states of nobody knows when would be attacked in place of the run's."""
    fedmoe.run(digits("lg_fedavg"), directory=tmp_path)
    damage(tmp_path)
    before = sorted((tmp_path / "checkpoints").iterdir())
    found = audit_labels(tmp_path)
    assert re.search(said, found["notes"][0])
    assert {reading["round"] for reading in found["attacks"]} == rounds
    assert sorted((tmp_path / "checkpoints").iterdir()) == before


def test_other_modules_than_those_of_the_run_are_refused(tmp_path):
    own = {"federation": tiny_federation(), "gate": make_gate}
    config = tiny_config("fedavg", rounds=1)
    fedmoe.run(config, directory=tmp_path, expert=make_expert, **own)
    tanh = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    with pytest.raises(RunError, match=r"recorded\.modules\.expert"):
        audit_labels(tmp_path, expert=tanh, **own)


# Prior mixture: adjusted updates, and the calibration


def skewed_run(folder, **algorithm):
    """Clients with one label each in nine of ten records, trained by SGD from a start that knows nothing."""
    clients = {}
    for client in range(3):
        draw = np.random.default_rng(client)
        y = np.where(draw.random(60) < 0.9, client, draw.integers(0, 3, 60))
        x = np.eye(3, 4)[y] + 0.5 * draw.standard_normal((60, 4))
        clients[f"c{client}"] = {"train": (x[:40].astype("f4"), y[:40]), "validation": (x[40:].astype("f4"), y[40:])}
    federation = federation_from_clients(clients, num_classes=3)
    table = {
        "algorithm": {"name": "prior_mixture", "calibration": {"exchanges": 4}, **algorithm},
        "training": {key: {"optimizer": "sgd", "learning_rate": 0.1} for key in ("federated", "local", "personal")},
        "schedule": {"rounds": 6, "clients_per_round": "all"},
        "engine": {"backend": "batched", "workers": 1},
    }
    given = {"federation": federation, "expert": make_expert, "gate": make_gate}
    for _ in run_events(parse_config(table), folder, **given):
        pass
    return audit_labels(folder, **given)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    return skewed_run(tmp_path_factory.mktemp("skewed") / "run")


def reading(found, name, number=1):
    (row,) = [row for row in found["attacks"] if row["attack"] == name and row["round"] == number]
    return row


def test_adjustment_hides_labels_from_the_output_bias(skewed):
    """Without it the change of the bias tells which label a client has; with it, much less."""
    name = "output bias, normalised"
    plain, adjusted = reading(skewed, f"{name}, without adjustment"), reading(skewed, name)
    assert plain["mean"] < 0.2 < skewed["uniform_guess"]["mean"]
    assert adjusted["mean"] > plain["mean"] + 0.2


def test_rows_of_the_output_layer_are_read_too(skewed):
    """The audit is no advertisement: what adjustment does not hide is in the table."""
    rows = [row["attack"] for row in skewed["attacks"]]
    assert ROWS in rows and f"{ROWS}, without adjustment" in rows


def test_the_round_without_adjustment_is_fedavgs(skewed, tmp_path):
    plain = skewed_run(tmp_path / "plain", adjust=False)
    assert not any("without adjustment" in row["attack"] for row in plain["attacks"])
    name = "output bias, normalised"
    assert reading(skewed, f"{name}, without adjustment")["clients"] == reading(plain, name)["clients"]


def test_the_calibration_is_attacked_from_where_the_rounds_ended(skewed):
    for name in ("calibration, eq. 15", "calibration, normalised"):
        for how in ("first", "all"):
            row = reading(skewed, f"{name}, {how}", 7)
            assert {*row["clients"]} == {"0", "1", "2"}
            assert all(abs(sum(shares) - 1) < 1e-6 for shares in row["clients"].values())
    assert reading(skewed, "calibration, eq. 15, first", 7)["mean"] > 0.3  # of 0.6 for a uniform guess
