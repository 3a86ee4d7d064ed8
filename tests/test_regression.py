"""Numbers instead of classes, from the user's data to the report."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import nn

import fedmoe
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.errors import ConfigError, DataError, MessageError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.regression import mae, r2, rmse
from fedmoe.evaluation.score_message import score_message, scores_in
from fedmoe.models.expert_mixture import gaussian_log_likelihoods
from fedmoe.report.text import clients_text

FEATURES = 3
WEIGHTS = torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 1.0]])
REFUSING = {"average_ensembles", "fedrod", "knn_per", "prior_mixture"}
ON_A_COMMON_EXPERT = {"common_expert", "fedjets", "fedmix_common"}  # which answers with classes
PLAN = {"epochs": 10, "batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd"}


def rows_of(shift: float, *, targets: int, rows: int = 40):
    generator = torch.Generator().manual_seed(int(10 * shift))
    x = torch.randn(rows, FEATURES, generator=generator) + shift
    y = x @ WEIGHTS + 0.5
    return x, (y[:, 0] if targets == 1 else y)


def federation_of(targets: int = 1, **options):
    clients = {name: rows_of(shift, targets=targets) for name, shift in (("a", 0.0), ("b", 0.5), ("c", -0.5))}
    return fedmoe.federation_from_clients(clients, task="regression", **options)


def table_of(name: str, **training):
    plans = dict.fromkeys(("federated", "local", "personal"), PLAN)
    return {
        "algorithm": {"name": name},
        "schedule": {"rounds": 5, "clients_per_round": "all"},
        "training": {**plans, **training},
        "engine": {"workers": 1},
    }


def run(name: str, folder: Path, targets: int = 1, **training):
    return fedmoe.run(
        table_of(name, **training),
        federation=federation_of(targets),
        expert=lambda: nn.Linear(FEATURES, targets),
        gate=lambda: nn.Linear(FEATURES, 1),
        directory=folder,
    )


@pytest.mark.parametrize(
    "name", sorted(CATALOG.keys() - REFUSING - ON_A_COMMON_EXPERT - {"fedmix", "fedrep", "lg_fedavg"})
)
def test_every_algorithm_whose_mathematics_admits_it_learns_numbers(name: str, tmp_path: Path) -> None:
    """A linear task and a linear expert: errors fall far below the spread of the targets, which is above 1."""
    result = run(name, tmp_path)
    own = [score for score in result.data["scores"] if score["data"] == "own"]
    last = [score["metrics"] for score in own if score["model"] == own[0]["model"]]
    assert result.data["task"] == "regression" and "accuracy" not in own[0]
    assert np.mean([one["rmse"] for one in last]) < 0.2, last
    x, y = rows_of(0.0, targets=1)
    model = result.personal_model("a")
    assert (model(x)[:, 0] - y).abs().max() < 1.0  # numbers, not their exponentials


@pytest.mark.slow
@pytest.mark.parametrize("targets", [1, 2])
def test_fedmix_finds_clients_with_opposite_functions(targets: int, tmp_path: Path) -> None:
    """Half of the clients see y, half -y: one model predicts nothing, two experts with a q of each client's own do."""
    clients = {}
    for number in range(4):
        x, y = rows_of(0.1 * number, targets=targets)
        clients[str(number)] = (x, y if number % 2 else -y)
    errors = {}
    for name, options in (("fedavg", {}), ("fedmix", {"num_experts": 2, "condition": "client"})):
        table = table_of(name) | {"algorithm": {"name": name, **options}}
        table["schedule"] = {"rounds": 40, "clients_per_round": "all"}
        result = fedmoe.run(
            table, federation=fedmoe.federation_from_clients(clients, task="regression"),
            expert=lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, targets)),
            gate=lambda: nn.Linear(FEATURES, 1), directory=tmp_path / name,
        )  # fmt: skip
        own = [score for score in result.data["scores"] if score["data"] == "own"]
        errors[name] = np.mean([score["metrics"]["rmse"] for score in own if score["model"] == own[-1]["model"]])
    assert errors["fedmix"] < 0.5 * errors["fedavg"], errors


def test_fedmix_learns_numbers_by_side_information_and_answers_without_it(tmp_path: Path) -> None:
    """Two functions, and each row of training says which it follows; the gate must find that out from x alone."""
    clients = {}
    for number in range(3):
        x, y = rows_of(0.1 * number, targets=1, rows=120)
        group = (x[:, 0] > 0).long()
        clients[str(number)] = (x, torch.where(group == 1, y, -y), {"group": group})
    errors, averaging = {}, {"server_optimizer": {"name": "sgd", "learning_rate": 1.0}}
    for name, options in (("fedavg", {}), ("fedmix", {"num_experts": 2, "condition": "group", **averaging})):
        table = table_of(name) | {"algorithm": {"name": name, **options}}
        table["schedule"] = {"rounds": 30, "clients_per_round": "all"}
        result = fedmoe.run(
            table, federation=fedmoe.federation_from_clients(clients, task="regression"),
            expert=lambda: nn.Linear(FEATURES, 1), gate=lambda: nn.Linear(FEATURES, 1), directory=tmp_path / name,
        )  # fmt: skip
        own = [score for score in result.data["scores"] if score["data"] == "own"]
        errors[name] = np.mean([score["metrics"]["rmse"] for score in own if score["model"] == own[-1]["model"]])
    assert errors["fedmix"] < 0.5 * errors["fedavg"], errors


def test_what_fedmix_cannot_do_with_numbers_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a row for each class, and a regression has none"):
        run("fedmix", tmp_path)
    table = table_of("fedmix", loss="absolute") | {"algorithm": {"name": "fedmix", "condition": "client"}}
    with pytest.raises(ConfigError, match=r"training\.loss='absolute', but FedMix maximises a likelihood"):
        fedmoe.run(table, federation=federation_of(), expert=lambda: nn.Linear(FEATURES, 1), directory=tmp_path)


def test_the_likelihood_of_numbers_is_gaussian() -> None:
    means, y = torch.randn(3, 5, 2), torch.randn(5, 2)
    expected = torch.distributions.Normal(means, 0.7).log_prob(y).sum(-1).T
    torch.testing.assert_close(gaussian_log_likelihoods(means, y, 0.7), expected)


@pytest.mark.parametrize("name", sorted(REFUSING))
def test_the_others_refuse_and_say_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot predict numbers: [a-z ]+"):
        run(name, tmp_path)
    assert not (tmp_path / "config.toml").exists()


@pytest.mark.parametrize("name", ["fedavg", "specialist_mixture"])
@pytest.mark.parametrize("loss", ["squared", "absolute", "huber"])
def test_several_targets_are_learnt_by_every_loss_on_every_backend(name: str, loss: str, tmp_path: Path) -> None:
    found = []
    for backend in ("batched", "native", "sequential"):
        table = table_of(name, loss=loss) | {"engine": {"backend": backend, "workers": 1}}
        result = fedmoe.run(
            table,
            federation=federation_of(2),
            expert=lambda: nn.Linear(FEATURES, 2),
            gate=lambda: nn.Linear(FEATURES, 1),
            directory=tmp_path / backend,
        )
        final = [s for s in result.data["scores"] if s["data"] == "own"]
        found.append([score["metrics"]["rmse"] for score in final])
        assert max(found[-1]) < 0.6
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)
    np.testing.assert_allclose(found[0], found[2], rtol=1e-3)


def test_the_report_and_the_tables_speak_of_errors(tmp_path: Path) -> None:
    result = run("fine_tuned", tmp_path)
    assert "RMSE" in result.summary() and "rmse" in clients_text(result.data) and "RMSE" in repr(result)
    page = " ".join((tmp_path / "report.html").read_text("utf-8").split())
    shown = re.sub(r"<(script|style)\b.*?</\1>", "", page)
    assert "<h2>RMSE</h2>" in shown and "Bold: lowest mean" in shown and "ccuracy" not in shown
    assert "| MAE | R² |" in (tmp_path / "table.md").read_text("utf-8")


def test_metrics_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    y, predicted = (torch.randn(30, 2, generator=generator) for _ in range(2))
    assert mae(predicted, y) == pytest.approx(mean_absolute_error(y.double(), predicted.double()), rel=1e-6)
    assert r2(predicted, y) == pytest.approx(r2_score(y.double(), predicted.double()), rel=1e-6)
    assert rmse(predicted, y) == pytest.approx(root_mean_squared_error(y.flatten(), predicted.flatten()), rel=1e-6)
    assert np.isnan(r2(predicted[:1], y[:1]))


def test_metrics_of_the_other_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'auc' is for classification, and these data are a regression"):
        fedmoe.run(
            table_of("fedavg") | {"evaluation": {"metrics": ["auc"]}},
            federation=federation_of(),
            expert=lambda: nn.Linear(FEATURES, 1),
            directory=tmp_path,
        )
    with pytest.raises(ConfigError, match="always measured in a regression"):
        fedmoe.run({"evaluation": {"metrics": ["rmse"]}}, directory=tmp_path)


def test_scores_of_a_regression_carry_no_accuracy() -> None:
    metrics = {"rmse": 1.0, "mae": 0.5, "r2": 0.1}
    score = Score(0, False, "before", "own", float("nan"), 1.0, 3, metrics)
    (read,) = scores_in(score_message([score]), 0, unseen=False, metrics=metrics)
    assert read.metrics == metrics
    with pytest.raises(MessageError, match="accuracy"):
        scores_in(score_message([score._replace(accuracy=0.5)]), 0, unseen=False, metrics=metrics)
    with pytest.raises(MessageError, match="accuracy"):
        scores_in(score_message([score._replace(metrics={})]), 0, unseen=False)


def test_opted_out_test_rows_are_not_in_the_test_of_everyone() -> None:
    assert len(federation_of().global_test.y) == 24
    assert len(federation_of(opted_out={"a": True}).global_test.y) == 16


@pytest.mark.parametrize(
    ("clients", "options", "words"),
    [
        ({"a": (torch.ones(2, 1), torch.tensor([1.0, float("nan")]))}, {}, "row 1: y holds NaN"),
        ({"a": (torch.ones(2, 1), torch.ones(2, 3, 1))}, {}, "Give one or more numbers per row"),
        ({"a": (torch.ones(4, 1), torch.ones(4)), "b": (torch.ones(4, 1), torch.ones(4, 2))}, {}, "y is"),
        ({"a": (torch.ones(2, 1), torch.ones(2))}, {"num_classes": 3}, "has no classes"),
        ({"a": (torch.ones(2, 1), torch.tensor([0.5, 1.0]))}, {"task": "classification"}, "task='regression'"),
    ],
)
def test_bad_targets_are_named(clients, options, words) -> None:
    with pytest.raises(DataError, match=words):
        fedmoe.federation_from_clients(clients, **{"task": "regression", **options})


def test_a_loss_of_the_other_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs classes"):
        run("fedavg", tmp_path, loss="cross_entropy")
    with pytest.raises(ConfigError, match="is a loss of a regression"):
        fedmoe.run({"training": {"loss": "squared"}}, directory=tmp_path)


def test_rounds_end_at_an_error_and_not_at_an_accuracy(tmp_path: Path) -> None:
    def ends_at(target, home):
        table = table_of("fedavg")
        table["schedule"] |= {"stop_at": target, "validate_every": 1}
        expert = lambda: nn.Linear(FEATURES, 1)  # noqa: E731
        return fedmoe.run(table, federation=federation_of(), expert=expert, directory=tmp_path / home)

    result = ends_at({"rmse": 100.0}, "rmse")
    assert result.data["rounds"] == 1 and "rmse" in result.data["stopped"]["reason"]
    assert result.data["validations"][0]["accuracy"] is None
    with pytest.raises(ConfigError, match=r"stop_at.*'accuracy', but these data are a regression"):
        ends_at({"accuracy": 0.5}, "accuracy")
    with pytest.raises(ConfigError, match=r"stop_at.*'rmse', but these data have classes"):
        fedmoe.run({"schedule": {"stop_at": {"rmse": 1.0}}}, directory=tmp_path / "classes")


def test_a_folder_of_npz_files_is_a_regression_where_the_config_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    folder.mkdir()
    for name, shift in (("a", 0.0), ("b", 1.0)):
        x, y = rows_of(shift, targets=2)
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())
    table = table_of("fedavg") | {"data": {"name": "npz", "folder": str(folder), "task": "regression"}}
    result = fedmoe.run(table | {"model": {"name": "mlp", "hidden": [8]}}, directory=tmp_path / "run")
    assert {score["client"] for score in result.data["scores"]} == {0, 1}
    with pytest.raises(ConfigError, match=r"data\.task is for"):
        fedmoe.run({"data": {"name": "digits", "task": "regression"}}, directory=tmp_path / "other")


def test_the_synthetic_users_are_served(tmp_path: Path) -> None:
    """Each user's best linear model errs by about 15.3 and 11.0, and one for both can do no better than they."""
    table = table_of("fedavg") | {
        "data": {"name": "synthetic_regression"},
        "split": {"kind": "natural", "field": "user", "train_size": 250, "validation_size": 50, "test_size": 100},
        "schedule": {"rounds": 10, "clients_per_round": "all"},
    }
    result = fedmoe.run(table, expert=lambda: nn.Linear(2, 1), directory=tmp_path)
    errors = [score["metrics"]["rmse"] for score in result.data["scores"] if score["data"] == "own"]
    assert len(errors) == 2 and min(errors) > 5 and max(errors) < 25


def test_columns_of_a_table_are_targets_where_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "homes.csv"
    rows = [f"{'ab'[n % 2]},{n % 7},{n % 5},{0.5 * (n % 7) - 1},{n % 5}.25" for n in range(60)]
    file.write_text("\n".join(["town,rooms,age,price,rent", *rows]) + "\n")
    data = {"name": "table", "file": str(file), "client": "town", "label": ["price", "rent"], "task": "regression"}
    result = fedmoe.run(table_of("fedavg") | {"data": data}, expert=lambda: nn.Linear(2, 2), directory=tmp_path / "run")
    assert max(score["metrics"]["rmse"] for score in result.data["scores"]) < 1.0
    federation = fedmoe.federation_from_table(str(file), client="town", label="price", task="regression")
    assert federation.target_shape == () and federation.load(0).train.y[0] == -1.0
    assert type(federation.table).from_dict(federation.table.to_dict()) == federation.table
    for label, task, words in (
        ("price", "classification", "say task='regression'"),
        (["price", "rent"], "classification", "needs task='regression'"),
        (["price", "price"], "regression", "one twice"),
        ("town", "regression", "no finite number"),
    ):
        with pytest.raises(DataError, match=words):
            fedmoe.federation_from_table(str(file), client="town", label=label, task=task, features=["rooms"])
