"""A client that nobody has seen gets its experts by unlabelled rows, from what a finished run left on disk."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedmoe
from fedmoe.cli import app
from fedmoe.deployment.onboarding import fallback_threshold
from fedmoe.errors import DataError, RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.models.images import mlp

SPLIT = {
    "kind": "k_labels", "num_clients": 6, "labels_per_client": 3, "num_anchors": 3, "labels_per_anchor": 2,
    "replacement": True, "train_size": 24, "validation_size": 4, "test_size": 8, "global_test_size": 40,
    "num_unseen": 4, "num_validation": 2, "unseen_labelled": False, "unseen_test_size": 24,
}  # fmt: skip


def table(weights, algorithm="fedjets"):
    settings = {"num_experts": 3, "num_sent": 2, "router_hidden": 8} if algorithm == "fedjets" else {}
    return {
        "split": SPLIT,
        "model": {"name": "mlp", "hidden": [16]},
        "common_expert": {"weights": str(weights)},
        "algorithm": {"name": algorithm, **settings},
        "schedule": {"rounds": 2, "clients_per_round": 5, "anchors": {"number": 3, "per_round": 3}},
        "engine": {"workers": 1},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("onboarding")
    torch.manual_seed(0)
    save_file(mlp((64,), 10, (16,)).state_dict(), folder / "common.safetensors")
    return fedmoe.run(table(folder / "common.safetensors"), directory=folder / "run")


@pytest.fixture(scope="module")
def asked(run):
    """An unseen client's inputs, and what it was delivered at the end of the run."""
    client = run.federation.num_clients + 3
    return run.federation.load(client).test.x, run.delivered[client], run.personal_model(client)


def test_it_is_sent_what_a_new_client_of_the_run_was_sent_and_answered_alike(run, asked):
    x, delivered, model = asked
    found = fedmoe.onboard(run.directory, x.numpy())
    assert found.experts == delivered.expert_ids.tolist() and len(found.experts) == 2
    assert sum(found.scores_M) == pytest.approx(1, abs=1e-5)
    assert found.experts[0] == int(np.argmax(found.scores_M))
    if not found.fell_back:
        torch.testing.assert_close(torch.from_numpy(found.predictions.answers_NC), model(x), atol=1e-6, rtol=1e-5)
    assert len(found.answered_by) == len(x)


def test_bytes_are_k_experts_the_router_the_common_expert_and_the_choice(run, asked):
    found = fedmoe.onboard(run, asked[0].numpy())
    expert = sum(leaf[0].nbytes for leaf in run.session.server.experts.values())
    router = sum(leaf.nbytes for leaf in run.session.server.router.values())
    common = sum(tensor.nbytes for tensor in mlp((64,), 10, (16,)).state_dict().values())
    assert found.bytes_sent == {"router": router, "choice, up": 16, "experts": 2 * expert, "common expert": common}


def with_tuning(run, **changed):
    data = {**run.data, "scores": [_changed(score, changed) for score in run.data["scores"]]}
    return type(run)(data, run.directory, run.session)


def _changed(score, changed):
    if score["data"] != "tuning":
        return score
    return {**score, "accuracy": changed["accuracy"], "metrics": {**score["metrics"], **changed["metrics"]}}


def test_where_the_router_is_not_confident_the_common_expert_answers_and_it_is_said(run, asked):
    """Clients for tuning that the common expert serves better, at any confidence."""
    worse = with_tuning(run, accuracy=0.1, metrics={"confidence": 0.99, "common_accuracy": 0.9})
    found = fedmoe.onboard(worse, asked[0].numpy())
    assert found.fell_back and "the common expert answers" in found.why and set(found.answered_by) == {"common expert"}
    common = run.session.parts.setup.common
    expected = common.log_probs(asked[0]).exp()
    torch.testing.assert_close(torch.from_numpy(found.predictions.answers_NC), expected, atol=1e-6, rtol=1e-5)
    better = with_tuning(run, accuracy=0.9, metrics={"confidence": 0.01, "common_accuracy": 0.1})
    assert not fedmoe.onboard(better, asked[0].numpy()).fell_back


def score(sure, routed, common, data="tuning"):
    return Score(7, True, "after", data, routed, 1.0, 5, {"confidence": sure, "common_accuracy": common})


def test_the_threshold_is_the_cut_that_served_the_clients_for_tuning_best():
    clients = [score(0.3, 0.4, 0.6), score(0.5, 0.5, 0.6), score(0.8, 0.9, 0.6), score(0.2, 0.0, 1.0, data="own")]
    threshold = fallback_threshold(clients)
    assert threshold is not None and 0.5 < threshold < 0.8
    assert fallback_threshold([score(0.3, 0.9, 0.6)]) == 0
    assert fallback_threshold([score(0.3, 0.9, 0.6, data="own")]) is None


def test_without_clients_for_tuning_it_never_falls_back_and_says_why(run, asked):
    data = {**run.data, "scores": [one for one in run.data["scores"] if one["data"] != "tuning"]}
    found = fedmoe.onboard(type(run)(data, run.directory, run.session), asked[0].numpy())
    assert not found.fell_back and found.threshold is None and "no clients for tuning" in found.why


def test_the_command_reads_the_files_that_predict_reads_and_writes_its_answers(run, asked, tmp_path):
    np.savez(tmp_path / "new.npz", x=asked[0].numpy())
    arguments = ["onboard", str(run.directory), "--data", str(tmp_path / "new.npz")]
    done = CliRunner().invoke(app, [*arguments, "--to", str(tmp_path / "answers.csv")])
    assert done.exit_code == 0, done.output
    assert "confidence" in done.output and "bytes" in done.output
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert lines[0].startswith("class,by,") and len(lines) == len(asked[0]) + 1


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (5, 63), (5, 8, 8)])
def test_rows_of_another_shape_or_none_at_all_are_refused(run, shape, tmp_path):
    np.savez(tmp_path / "odd.npz", x=np.zeros(shape))
    with pytest.raises(DataError, match=r"x has shape .* but the model reads \(N, 1, 8, 8\)"):
        fedmoe.onboard(run, tmp_path / "odd.npz")


def test_a_run_without_a_router_is_refused(tmp_path, run):
    other = fedmoe.run(table(run.directory / "common_expert.safetensors", "fedavg"), directory=tmp_path / "run")
    with pytest.raises(RunError, match="trained with FedAvg, which has no router"):
        fedmoe.onboard(other, np.zeros((2, 1, 8, 8)))
