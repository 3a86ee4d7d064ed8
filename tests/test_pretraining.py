"""A common expert out of public rows: when it ends, what it writes, and what it has not seen."""

import pytest
import torch
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

import fedmoe
from fedmoe.cli import app
from fedmoe.config import parse_config
from fedmoe.data.loading import load_dataset
from fedmoe.errors import ConfigError
from fedmoe.federations import build_federation
from fedmoe.models.images import mlp
from fedmoe.models.start_weights import write_weights
from fedmoe.partition.draw import draw_split
from fedmoe.pretraining import Epoch, Pretrained, fit_temperature, pretrain_events

SPLIT = {
    "num_clients": 4, "train_size": 20, "validation_size": 5, "test_size": 20, "global_test_size": 50,
    "public_size": 400, "public_validation_size": 100,
}  # fmt: skip


def config(**split):
    return parse_config(
        {
            "split": {**SPLIT, **split},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"local": {"learning_rate": 0.01, "batch_size": 20}},
        }
    )


def run(until, max_epochs, **split):
    *epochs, made = pretrain_events(config(**split), until, max_epochs)
    assert isinstance(made, Pretrained) and all(isinstance(epoch, Epoch) for epoch in epochs)
    return epochs, made


def accuracy(weights, rows):
    model = mlp((1, 8, 8), 10, (16,))
    model.load_state_dict(weights)
    return float((model(rows.x).argmax(1) == rows.y).double().mean())


def test_it_ends_when_held_out_public_rows_say_that_it_is_good_enough():
    epochs, made = run(0.85, 40)
    assert made.reached and 1 < len(epochs) < 40
    assert epochs[-1].accuracy >= 0.85 > max(epoch.accuracy for epoch in epochs[:-1])
    public = build_federation(config()).federation.public()
    assert accuracy(made.weights, public.validation) == pytest.approx(made.epoch.accuracy)
    assert (made.num_rows, made.num_held_out) == (400, 100)


def test_a_run_whose_split_has_other_public_rows_is_warned(tmp_path):
    _, made = run(None, 1)
    write_weights(tmp_path / "common.safetensors", made.weights, made.notes)

    def notes(**split):
        table = config(**split).model_dump(mode="json", exclude_none=True)
        return fedmoe.build({**table, "common_expert": {"weights": str(tmp_path / "common.safetensors")}}).notes

    assert not any("other public rows" in note for note in notes())
    assert any("other public rows" in note for note in notes(public_size=300))
    first, second = (draw_split(config().split, load_dataset("digits", None), seed).public for seed in (0, 1))
    assert first.tolist() == second.tolist()  # whatever the seed


def test_a_target_out_of_reach_ends_with_the_best_epoch():
    epochs, made = run(1.0, 3)
    assert not made.reached and len(epochs) == 3
    assert made.epoch == max(epochs, key=lambda epoch: epoch.accuracy)


def test_without_a_target_all_epochs_are_trained():
    epochs, made = run(None, 2)
    assert made.reached and len(epochs) == 2


def test_the_temperature_is_that_of_the_lowest_cross_entropy():
    """Scores three times as large as those that the labels were drawn by."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 4, generator=generator)
    y = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
    assert fit_temperature(3 * scores, y) == pytest.approx(3.0, rel=0.05)
    cross_entropy = nn.functional.cross_entropy
    assert cross_entropy(scores, y) < cross_entropy(3 * scores, y)


@pytest.mark.parametrize(
    ("split", "until", "sentence"),
    [
        ({"public_size": 0, "public_validation_size": 0}, 0.5, "there are no public rows"),
        ({"public_validation_size": 0}, 0.5, r"split\.public_validation_size is 0"),
        ({}, 73.0, "--until-accuracy 73.0 is no share of rows"),
    ],
)
def test_what_cannot_work_is_refused(split, until, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run(until, 1, **split)


def test_the_command_writes_a_file_that_says_what_it_is(tmp_path):
    lines = "\n".join(f"{key} = {value}" for key, value in SPLIT.items())
    sections = "[model]\nname = 'mlp'\nhidden = [16]\n[common_expert]\nweights = 'deep/common.safetensors'\n"
    (tmp_path / "c.toml").write_text(f"[split]\n{lines}\n{sections}")
    done = CliRunner().invoke(
        app, ["pretrain", str(tmp_path / "c.toml"), "--until-accuracy", "0.99", "--max-epochs", "1"]
    )
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "was not reached in 1 epochs" in words and "400 public rows, which no client holds" in words
    with safe_open(tmp_path / "deep" / "common.safetensors", "pt") as file:
        assert file.metadata()["public_rows"] == "400" and float(file.metadata()["temperature"]) > 0
        assert set(file.keys()) == set(mlp((1, 8, 8), 10, (16,)).state_dict())
