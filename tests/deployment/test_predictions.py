import csv

import numpy as np
import pandas as pd
import pytest
import torch

import fedmoe
from deployment.wards import ward_rows
from fedmoe.deployment.predictions import BATCH, predict, reader_of, write_predictions
from fedmoe.errors import ConfigError, DataError
from fedmoe.testing.federation import draw_examples


@pytest.fixture
def predicted(wards):
    return predict(wards.personal_model("north"), reader_of(wards).values(ward_rows(7, seed=1)))


def test_rows_of_a_table_get_probabilities_and_class_names(wards, predicted):
    x = wards.federation.table.encode(ward_rows(7, seed=1))
    wanted = wards.personal_model("north")(x)
    assert predicted.class_names == ("ill", "well") and np.array_equal(predicted.answers_NC, wanted.numpy())
    assert predicted.classes == [("ill", "well")[best] for best in wanted.argmax(1)]


def test_many_rows_are_computed_in_batches(wards):
    model, x = wards.personal_model("coast"), torch.randn(2 * BATCH + 3, 4)
    np.testing.assert_allclose(predict(model, x).answers_NC, model(x).numpy(), atol=1e-6)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_they_are_written_as_a_table(predicted, tmp_path, suffix):
    path = tmp_path / f"predicted.{suffix}"
    write_predictions(predicted, path)
    frame = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    assert list(frame.columns) == ["class", "p(ill)", "p(well)"] and list(frame["class"]) == predicted.classes
    np.testing.assert_allclose(frame[["p(ill)", "p(well)"]], predicted.answers_NC, rtol=1e-6)


def test_another_ending_is_refused(predicted, tmp_path):
    with pytest.raises(ConfigError, match=r"predicted\.xlsx: predictions are written as \.csv or \.parquet"):
        write_predictions(predicted, tmp_path / "predicted.xlsx")


def test_what_a_model_cannot_read_is_said(wards):
    model = wards.personal_model("north")
    model.facts = model.facts._replace(input_shape=(3,))
    with pytest.raises(DataError, match="the model cannot read these rows"):
        predict(model, torch.zeros(2, 3))


def test_a_file_on_the_command_line(wards, tmp_path, monkeypatch, capfd):
    from test_cli import invoke

    rows = ward_rows(25, seed=2)
    data, to = tmp_path / "new.csv", tmp_path / "out.csv"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name != "outcome"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    command = ("predict", wards.directory, "--client", "north", "--data", data)
    shown = invoke(monkeypatch, capfd, *command)
    assert shown.code == 0 and "p(well)" in shown.out and "the first 20 of 25 rows" in shown.out
    assert invoke(monkeypatch, capfd, *command, "--to", to).code == 0
    wanted = predict(wards.personal_model("north"), wards.federation.table.encode(rows))
    assert list(pd.read_csv(to)["class"]) == wanted.classes
    wrong = invoke(monkeypatch, capfd, "predict", wards.directory, "--client", "nort", "--data", data)
    assert wrong.code == 2 and "no client named 'nort'. Known: north, south, coast" in wrong.out
    (tmp_path / "bad.csv").write_text("age,pressure\n1,2\n")
    missing = invoke(monkeypatch, capfd, *command[:-1], tmp_path / "bad.csv")
    assert missing.code == 2 and "has no column 'smoker'" in missing.out and "Traceback" not in missing.out


def test_a_module_of_the_users_own_is_named_on_the_command_line(tmp_path, monkeypatch, capfd):
    from builders import tiny_federation
    from fedmoe.testing.federation import make_expert, make_gate, tiny_config
    from test_cli import invoke

    config = tiny_config("fedavg", rounds=1)
    fedmoe.run(config, federation=tiny_federation(), directory=tmp_path / "run", expert=make_expert, gate=make_gate)
    x = draw_examples(3, "new").x
    np.savez(tmp_path / "new.npz", x=x)
    command = ("predict", tmp_path / "run", "--client", "3", "--data", tmp_path / "new.npz")
    refused = invoke(monkeypatch, capfd, *command)
    assert refused.code == 2 and "--expert package.module:factory" in refused.out
    names = ("--expert", "fedmoe.testing.federation:make_expert", "--gate", "fedmoe.testing.federation:make_gate")
    assert invoke(monkeypatch, capfd, *command, *names).code == 0


def test_a_regression_gives_numbers(tmp_path):
    x = torch.randn(40, 3)
    federation = fedmoe.federation_from_clients({"a": (x, x[:, 0] + 2), "b": (x, x[:, 0] - 2)}, task="regression")
    schedule = {"rounds": 1, "clients_per_round": "all"}
    config = {"algorithm": {"name": "fine_tuned"}, "schedule": schedule, "engine": {"workers": 1}}
    done = fedmoe.run(config, federation=federation, directory=tmp_path / "run")
    loaded = fedmoe.load(tmp_path / "run")
    predicted = predict(loaded.personal_model("a"), x[:5])
    assert np.array_equal(predicted.answers_NC, done.personal_model("a")(x[:5]).numpy())
    assert (
        list(predicted.columns()) == ["value 0"]
        and predicted.columns()["value 0"] == predicted.answers_NC[:, 0].tolist()
    )
