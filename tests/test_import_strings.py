"""Data, a split and a model of the user's own, named by import strings in a config."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmoe
from fedmoe import federations, import_strings
from fedmoe.config import parse_config, read_config
from fedmoe.data.dataset import Dataset
from fedmoe.errors import ConfigError, RunError
from fedmoe.models.catalog import build_model
from fedmoe.storage.rundir import RunDirectory

MODULE = """
import numpy as np
import torch
from torch import nn

import fedmoe
from fedmoe.data.dataset import Dataset, Table
from fedmoe.partition.split import Shards, Split


def rows(count, seed, shift=0.0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)) + shift
    return x, (x[:, 0] > shift).long()


def clients(seed, shift=0.0):
    return fedmoe.federation_from_clients({name: rows(30, seed + n, shift) for n, name in enumerate("abc")}, seed=seed)


def table(seed, size=200, folder=None):
    if folder is not None:
        size = int((folder / "size.txt").read_text())
    return Dataset("mine", Table(*rows(size, seed)), Table(*rows(100, seed + 1)), ("low", "high"))


def by_turns(dataset, seed, num_clients=3, first=0):
    turns = [np.arange(client, 90, num_clients) + first for client in range(num_clients)]
    test = [np.arange(10) for _ in turns]
    parts = (Shards.from_lists([rows[:-5] for rows in turns]), Shards.from_lists([rows[-5:] for rows in turns]))
    return Split(num_clients, 0, *parts, Shards.from_lists(test), np.arange(50))


def one_client_short(dataset, seed):
    split = by_turns(dataset, seed)
    return Split(4, 0, split.train, split.validation, split.test, split.global_test)


def net(input_shape, num_outputs, width=5):
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, num_outputs))


def text_net(input_shape, num_outputs, vocabulary_size):
    return nn.Sequential(nn.EmbeddingBag(vocabulary_size, num_outputs))


def nothing(*arguments):
    return None
"""
SIZES = {"num_clients": 3, "train_size": 8, "validation_size": 4, "test_size": 5, "global_test_size": 10}
SMALL: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "schedule": {"rounds": 2, "clients_per_round": 2},
    "engine": {"workers": 1, "backend": "sequential"},
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "somebodys_parts", raising=False)


def build(**sections: Any) -> fedmoe.Parts:
    return fedmoe.build({**SMALL, **sections})


class TestData:
    def test_a_function_that_returns_a_federation(self) -> None:
        federation = build(data={"name": "somebodys_parts:clients", "shift": 3.0}, seed=4).federation
        assert federation.names == ["a", "b", "c"] and float(federation.load(0).train.x.mean()) > 2
        other = build(data={"name": "somebodys_parts:clients", "shift": 3.0}, seed=5).federation
        assert federation.digest != other.digest

    def test_a_function_that_returns_a_data_set_which_is_then_split(self) -> None:
        parts = build(data={"name": "somebodys_parts:table"}, split={**SIZES, "share": 1.0}, opt_out={"clients": [1]})
        assert parts.federation.participants.tolist() == [0, 2] and parts.federation.class_names == ("low", "high")
        assert len(parts.federation.load(0).train.y) == 8

    def test_its_content_is_part_of_what_makes_a_run_the_same(self, tmp_path: Path) -> None:
        table = {**SMALL, "split": {"kind": "somebodys_parts:by_turns"}}
        (tmp_path / "size.txt").write_text("200")
        table["data"] = {"name": "somebodys_parts:table", "folder": str(tmp_path)}
        fedmoe.run(table, directory=tmp_path / "run")
        fedmoe.run(tmp_path / "run" / "config.toml", directory=tmp_path / "run")
        (tmp_path / "size.txt").write_text("201")  # the same rows are dealt out, from other data
        with pytest.raises(RunError, match=r"belongs to another run: recorded\.split_digest"):
            fedmoe.run(table, directory=tmp_path / "run")

    def test_a_run_of_it_is_recorded_and_read_again(self, tmp_path: Path) -> None:
        table = {**SMALL, "data": {"name": "somebodys_parts:clients", "shift": 1.0}}
        first = fedmoe.run(table, directory=tmp_path / "run")
        recorded = RunDirectory(tmp_path / "run").read_config()
        assert recorded["data"]["name"] == "somebodys_parts:clients" and recorded["data"]["shift"] == 1.0
        again = fedmoe.run(tmp_path / "run" / "config.toml", directory=tmp_path / "run")
        assert again.scores == first.scores

    @pytest.mark.parametrize(
        "section", [{"split": {"kind": "dirichlet"}}, {"split": {"num_clients": 3}}, {"opt_out": {"clients": [0]}}]
    )
    def test_sections_that_a_federation_leaves_nothing_to_do_for(self, section: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=rf"returned a Federation.*\[{next(iter(section))}\] does nothing"):
            build(data={"name": "somebodys_parts:clients"}, **section)

    def test_the_folder_is_relative_to_the_config(self, tmp_path: Path) -> None:
        (tmp_path / "size.txt").write_text("150")
        (tmp_path / "mine.toml").write_text('data = { name = "somebodys_parts:table", folder = "." }')
        config = read_config(tmp_path / "mine.toml")
        made, _ = federations._data(config, config.data)
        assert isinstance(made, Dataset) and len(made.train.y) == 150

    def test_other_data_have_no_such_settings(self) -> None:
        with pytest.raises(ConfigError, match=r"config key 'data\.nme' is not known\. Did you mean 'data\.name'"):
            parse_config({"data": {"nme": "digits"}})


class TestSplit:
    def test_a_function_of_the_data_and_the_seed(self) -> None:
        split = {"kind": "somebodys_parts:by_turns", "num_clients": 2}
        parts = build(data={"name": "somebodys_parts:table"}, split=split)
        assert parts.source.split is not None
        assert parts.source.split.train.of(1).tolist() == list(range(1, 90, 2))[:-5]
        assert parts.config.model_dump()["split"] == split

    @pytest.mark.parametrize(
        ("split", "sentence"),
        [
            ({"kind": "somebodys_parts:by_turns", "first": 500}, "train names rows 500 to .*, but there are 200"),
            ({"kind": "somebodys_parts:by_turns", "first": -1}, "train names rows -1 to"),
            ({"kind": "somebodys_parts:one_client_short"}, "train has rows of 3 clients, but there are 4"),
            ({"kind": "somebodys_parts:nothing"}, "returned None, not fedmoe.partition.split.Split"),
        ],
    )
    def test_a_split_that_does_not_fit_the_data_is_said(self, split: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            build(data={"name": "somebodys_parts:table"}, split=split)


class TestModel:
    def test_a_function_of_the_shapes(self) -> None:
        parts = build(data={"name": "somebodys_parts:clients"}, model={"name": "somebodys_parts:net", "width": 7})
        assert parts.expert.num_weights == 6 * 7 + 7 + 7 * 2 + 2 and parts.gate.num_weights == 6 * 7 + 7 + 7 + 1
        assert parts.config.model_dump()["model"].items() >= {"name": "somebodys_parts:net", "width": 7}.items()

    def test_another_structure_is_another_run(self, tmp_path: Path) -> None:
        table = {**SMALL, "data": {"name": "somebodys_parts:clients"}, "model": {"name": "somebodys_parts:net"}}
        fedmoe.run(table, directory=tmp_path / "run")
        sys.modules["somebodys_parts"].net = lambda shape, outputs: nn.Linear(*shape, outputs)  # type: ignore[attr-defined]
        with pytest.raises(RunError, match=r"belongs to another run: recorded\.modules\.expert"):
            fedmoe.run(table, directory=tmp_path / "run")

    def test_texts_come_with_their_vocabulary(self) -> None:
        config = parse_config({"model": {"name": "somebodys_parts:text_net"}}).model
        module = build_model(config, (4,), 3, 50)
        assert module(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 3)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"data": {"name": "missing_parts:f"}}, r"data\.name='missing_parts:f': there is no module 'missing_parts'"),
        ({"data": {"name": "somebodys_parts:cleints"}}, r"has no 'cleints'\. Did you mean 'clients'"),
        ({"data": {"name": "somebodys_parts:nn"}}, "is no function but a value of type builtins.module"),
        (
            {"data": {"name": "somebodys_parts:nothing"}},
            r"returned None, not fedmoe\..*Federation or fedmoe\..*Dataset",
        ),
        (
            {"data": {"name": "somebodys_parts:clients", "shfit": 1}},
            r"cannot be called as \(seed, shfit=…\): got an unexpected keyword argument 'shfit'. The other keys of \[",
        ),
        ({"model": {"name": "somebodys_parts:nothing"}}, "returned None, not torch.nn.modules.module.Module"),
        ({"model": {"name": "somebodys_parts:net", "depth": 3}}, r"as \(input_shape, num_outputs, depth=…\)"),
    ],
)
def test_what_cannot_be_used_is_said(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build(**section)


def test_an_unknown_kind_is_told_of_import_strings() -> None:
    with pytest.raises(ConfigError, match=r"model\.name='qqqq' is not known\. .*mlp.*package\.module:name"):
        parse_config({"model": {"name": "qqqq"}})


def test_nothing_is_imported_that_was_not_named() -> None:
    parse_config({"data": {"name": "somebodys_parts:clients"}, "model": {"name": "somebodys_parts:net"}})
    assert "somebodys_parts" not in sys.modules  # not even that, before it is needed


def test_a_function_built_in_is_called_as_it_is() -> None:
    with pytest.raises(TypeError):
        import_strings.call("data.name", "builtins:iter", {"seed": 0}, {}, int)
    assert np.isclose(import_strings.call("data.name", "math:sqrt", {"seed": 4}, None, float), 2.0)
