"""Personal models asked under label frequencies of the user's choice, loaded from a finished run."""

import csv
import json

import numpy as np
import onnxruntime
import pytest
import torch

import fedmoe
from builders import make_expert, make_gate, tiny_config, tiny_federation
from deployment.wards import trained, ward_rows
from fedmoe.algorithms.prior_mixture.personal import CANDIDATES
from fedmoe.deployment.export import export
from fedmoe.deployment.predictions import predict
from fedmoe.deployment.programs import traced
from fedmoe.errors import ConfigError, DataError

FEW = {"name": "prior_mixture", "calibration": {"exchanges": 3}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """In the north nearly everybody is ill: frequencies that no chance explains."""
    rows = [row for row in ward_rows(120) if row["ward"] != "north" or row["outcome"] == "ill" or row["age"] < -1.5]
    return trained(tmp_path_factory.mktemp("priors") / "run", rows=rows, algorithm=FEW)


def test_own_balanced_and_estimated_are_answers_of_one_model(run):
    model, x = fedmoe.load(run.directory).personal_model("north"), torch.randn(40, 4)
    own, even, estimated = (model.log_prior(prior, x) for prior in ("own", "balanced", "estimated"))
    torch.testing.assert_close(model(x, own), model(x))  # what it stores
    torch.testing.assert_close(even.exp(), torch.full((2,), 0.5))
    assert torch.equal(estimated, model.estimate_prior(x.numpy()))
    assert torch.equal(model(x[3], even), model(x, even)[3])
    np.testing.assert_allclose(predict(model, x, "estimated").answers_NC, model(x, estimated), atol=1e-6)
    torch.testing.assert_close(model(x, even).sum(1), torch.ones(40))


def test_given_a_prior_pieces_are_answered_as_the_whole(run):
    model, x = run.personal_model("south"), torch.randn(11, 4)
    prior = model.estimate_prior(x)
    torch.testing.assert_close(torch.cat([model(part, prior) for part in x.split(3)]), model(x, prior))


def test_any_algorithm_trained_with_priors_can_be_asked_after_loading(tmp_path):
    for name in ("fedavg", "fine_tuned"):
        made = trained(tmp_path / name, algorithm={"name": name}, evaluation={"priors": True})
        model, x = fedmoe.load(made.directory).personal_model("north"), torch.randn(9, 4)
        torch.testing.assert_close(model(x), made.personal_model("north")(x))
        assert not torch.equal(model(x, model.log_prior("balanced")), model(x, torch.tensor([0.9, 0.1]).log()))


def test_a_client_without_labels_starts_from_even_frequencies_and_says_so(tmp_path):
    config = tiny_config("prior_mixture", rounds=1)
    made = fedmoe.run(
        config, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=tmp_path / "run"
    )
    assert made.personal_model(5).has_even_prior and not made.personal_model(3).has_even_prior


def test_bad_priors_are_explained(run, wards):
    model, x = run.personal_model("north"), torch.randn(4, 4)
    with pytest.raises(DataError, match=r"prior of shape .3,. is given, but the model knows 2"):
        model(x, torch.full((3,), 1 / 3).log())
    with pytest.raises(DataError, match="no distribution: its probabilities sum to 2"):
        model(x, torch.zeros(2))
    with pytest.raises(DataError, match="no questions to estimate"):
        model.estimate_prior(x[:0])
    with pytest.raises(DataError, match="estimated from questions"):
        model.log_prior("estimated")
    with pytest.raises(ConfigError, match="Specialist mixture answers under no other label frequencies"):
        wards.personal_model("north").estimate_prior(x)


def test_on_the_command_line(run, wards, tmp_path, monkeypatch, capfd):
    from test_cli import invoke

    rows, data = ward_rows(25, seed=2), tmp_path / "new.csv"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    assert not run.personal_model("north").has_even_prior
    shown = {
        prior: invoke(monkeypatch, capfd, "predict", run.directory, "--client", "north", "--data", data, *option)
        for prior, option in {"": (), "own": ("--prior", "own"), "balanced": ("--prior", "balanced")}.items()
    }
    assert all(one.code == 0 for one in shown.values())
    assert shown[""].out == shown["own"].out != shown["balanced"].out
    refused = invoke(
        monkeypatch, capfd, "predict", wards.directory, "--client", "north", "--data", data, "--prior", "estimated"
    )
    assert refused.code == 2 and "answers under no other label frequencies" in refused.out


def test_over_http_a_request_names_the_prior(run, wards):
    from deployment.test_service import Served, rows_of

    rows = rows_of(20, 3)
    with Served(run, "south") as server:
        answers = {prior: server.predict({"rows": rows, "prior": prior}) for prior in (None, "balanced", "estimated")}
        assert {status for status, _ in answers.values()} == {200}
        model, x = run.personal_model("south"), run.federation.table.encode(rows)
        for prior in ("balanced", "estimated"):
            wanted = model(x, model.log_prior(prior, x))
            np.testing.assert_allclose(answers[prior][1]["probabilities"], wanted, atol=1e-5)
        status, wrong = server.predict({"rows": rows, "prior": ["own"]})
        assert status == 400 and "one of own, balanced, estimated" in str(wrong)
    with Served(wards, "north") as server:
        status, refused = server.predict({"rows": rows, "prior": "own"})
        assert status == 422 and "answers under no other label frequencies" in str(refused)


def test_a_program_takes_rows_and_a_prior(run, tmp_path):
    """For each choice that a client may have made, under priors on both sides of where the shared expert takes over."""
    made = export(run, "north", tmp_path / "north")
    assert {"model.pt2", "model.onnx"} <= set(made.files), made.left_out
    known = json.loads((made.folder / "model.json").read_text())["log_prior"]
    model, x = run.personal_model("north"), torch.randn(9, 4)
    program = torch.export.load(made.folder / "model.pt2").module()
    session = onnxruntime.InferenceSession(str(made.folder / "model.onnx"))
    for prior in (torch.tensor(known["own"]), torch.tensor(known["balanced"]), torch.tensor([0.97, 0.03]).log()):
        wanted = model(x, prior)
        torch.testing.assert_close(program(x, prior), wanted, atol=1e-5, rtol=0)
        (found,) = session.run(None, {"x": x.numpy(), "log_prior": prior.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=0)
    assert "model(x, log_prior)" in (made.folder / "README.md").read_text()


@pytest.mark.parametrize("choice", range(len(CANDIDATES)))
def test_programs_of_every_choice(run, choice):
    model, x = run.personal_model("north"), torch.randn(9, 4)
    model.choice.fill_(choice)
    program = traced(model, x[:2]).module()
    for prior in (model.log_prior("own"), model.log_prior("balanced"), torch.tensor([0.03, 0.97]).log()):
        torch.testing.assert_close(program(x, prior), model(x, prior), atol=1e-6, rtol=0)
