"""Algorithms from outside: passed as a factory, named by an import string, or added by an installed package."""

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fedmoe
from builders import make_expert, make_gate, tiny_federation
from fedmoe.algorithms.catalog import find
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.config import parse_config
from fedmoe.contract import Algorithm, AlgorithmSetup
from fedmoe.errors import ConfigError, RunError

MODULE = """
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.contract import Algorithm, AlgorithmSetup


@dataclass(frozen=True)
class Settings:
    validate_every: int = 7
    exact: bool = False


@dataclass(frozen=True)
class NoToml:
    weights: Tensor | None = None


def plain(setup: AlgorithmSetup) -> Algorithm:
    return fedavg(FedAvgConfig(), setup)


def with_settings(config: Settings, setup: AlgorithmSetup) -> Algorithm:
    return fedavg(FedAvgConfig(validate_every=config.validate_every), setup)


class Method:
    def __call__(self, config: Settings, setup: AlgorithmSetup) -> Algorithm:
        return with_settings(config, setup)


method = Method()


def optional_argument(setup, rate=0.1):
    return plain(setup)


def not_annotated(config, setup):
    return plain(setup)


def no_toml(config: NoToml, setup: AlgorithmSetup) -> Algorithm:
    return plain(setup)


def not_a_dataclass(config: dict, setup):
    return plain(setup)


def unknown_name(config: Unknown, setup):
    return plain(setup)


def three(one, two, three):
    pass


def returns_none(setup):
    return None


A_NUMBER = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with the module `somebodys_method`, and one that cannot be imported."""
    (tmp_path / "somebodys_method.py").write_text(MODULE)
    (tmp_path / "broken_method.py").write_text("import a_module_that_is_missing")
    (tmp_path / "raising_method.py").write_text("raise ValueError('not today')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("somebodys_method", "broken_method", "raising_method"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def run(config: dict[str, Any], folder: Path, **options: Any) -> fedmoe.Result:
    engine = {"workers": 1, "backend": "sequential"}
    schedule = {"rounds": 2, "clients_per_round": 3}
    return fedmoe.run(
        {"schedule": schedule, "engine": engine, **config},
        federation=tiny_federation(),
        expert=make_expert,
        gate=make_gate,
        directory=folder,
        **options,
    )


def own(config: FedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    return fedavg(config, setup)


def another(setup: AlgorithmSetup) -> Algorithm:
    return fedavg(FedAvgConfig(), setup)


@dataclass(frozen=True)
class Required:
    rate: float


def with_required(config: Required, setup: AlgorithmSetup) -> Algorithm:
    return fedavg(FedAvgConfig(), setup)


class TestPassed:
    def test_a_factory_of_the_setup_alone(self, tmp_path: Path) -> None:
        result = run({}, tmp_path / "run", algorithm=another)
        assert result.data["algorithm"] == f"{__name__}:another" and result.data["title"] == "another"
        same = run({"algorithm": {"name": "fedavg"}}, tmp_path / "fedavg")
        assert result.data["scores"] == same.data["scores"]

    def test_its_settings_are_what_the_config_says_of_the_algorithm(self, tmp_path: Path) -> None:
        parts = fedmoe.build(
            {"algorithm": {"validate_every": 3, "label": "mine"}}, federation=tiny_federation(), algorithm=own
        )
        assert parts.title == "mine" and parts.algorithm.validation.every == 3  # type: ignore[union-attr]
        assert parts.config.algorithm.options() == FedAvgConfig(validate_every=3)
        assert parts.config.model_dump()["algorithm"]["divergence"] is False  # recorded with every default

    def test_a_parsed_config_will_do_as_well(self) -> None:
        config = parse_config({"seed": 3, "algorithm": {"validate_every": 4}}, own)
        again = fedmoe.build(config, federation=tiny_federation(), algorithm=own).config
        assert again.seed == 3 and again.algorithm.options() == FedAvgConfig(validate_every=4)

    def test_an_unknown_setting_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.validat is not a setting of .*:own.*'validate_every'"):
            parse_config({"algorithm": {"validat": 3}}, own)
        with pytest.raises(ConfigError, match=r"algorithm\.rate is not a setting of .*another. Known keys: none"):
            parse_config({"algorithm": {"rate": 3}}, another)
        with pytest.raises(ConfigError, match=r"algorithm\.rate.*[Ff]ield required"):
            parse_config({}, with_required)

    def test_one_server_optimizer_for_all_is_for_it_too(self) -> None:
        table: dict[str, Any] = {"schedule": {"server_optimizer": {"name": "adam"}}}
        options = parse_config(table, own).algorithm.options()
        assert options == parse_config({"algorithm": {"name": "fedavg"}, **table}).algorithm.options()
        assert options.server_optimizer is not None
        assert parse_config(table, another).algorithm.options() == find(f"{__name__}:another").config()
        with_its_own = {"algorithm": {"server_optimizer": {"name": "sgd"}}, **table}
        assert parse_config(with_its_own, own).algorithm.options().server_optimizer.name == "sgd"

    def test_a_config_that_names_another_algorithm_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"algorithm= is given .*algorithm\.name='fedavg'\. Remove one"):
            parse_config({"algorithm": {"name": "fedavg"}}, own)
        with pytest.raises(ConfigError, match=r"algorithm= is given"):
            fedmoe.build(parse_config({"algorithm": {"name": "fedavg"}}), federation=tiny_federation(), algorithm=own)

    def test_a_run_is_resumed_with_the_same_factory_only(self, tmp_path: Path) -> None:
        first = run({}, tmp_path / "run", algorithm=another)
        assert run({}, tmp_path / "run", algorithm=another).data == first.data
        assert fedmoe.run(
            tmp_path / "run" / "config.toml", federation=tiny_federation(), expert=make_expert, gate=make_gate,
            algorithm=another, directory=tmp_path / "run",
        ).data == first.data  # fmt: skip
        with pytest.raises(RunError, match=r"belongs to another run: algorithm\.name is '.*:another'"):
            run({}, tmp_path / "run", algorithm=functools.partial(own, FedAvgConfig()))

    def test_a_factory_without_a_name_goes_by_its_type(self, tmp_path: Path) -> None:
        result = run({}, tmp_path / "run", algorithm=functools.partial(own, FedAvgConfig()))
        assert result.data["algorithm"] == "functools:partial"


class TestImported:
    def test_from_a_config(self, package: Path, tmp_path: Path) -> None:
        table = {"algorithm": {"name": "somebodys_method:with_settings", "validate_every": 1}}
        result = run(table, tmp_path / "run")
        assert result.data["algorithm"] == "somebodys_method:with_settings"
        assert result.data["title"] == "with_settings"
        assert result.data["config"]["algorithm"]["exact"] is False
        same = run({"algorithm": {"name": "fedavg", "validate_every": 1}}, tmp_path / "fedavg")
        assert result.data["scores"] == same.data["scores"]

    def test_a_callable_object_and_an_optional_argument_will_do(self, package: Path) -> None:
        assert find("somebodys_method:method").config.__name__ == "Settings"
        assert find("somebodys_method:optional_argument").config.__name__ == "NoSettings"

    def test_values_of_a_plain_dataclass_are_checked(self, package: Path) -> None:
        name = "somebodys_method:with_settings"
        with pytest.raises(ConfigError, match=r"algorithm\.validate_every='often'.*integer"):
            parse_config({"algorithm": {"name": name, "validate_every": "often"}})
        with pytest.raises(ConfigError, match=r"algorithm\.exect is not a setting of .*'exact'"):
            parse_config({"algorithm": {"name": name, "exect": True}})
        with pytest.raises(ConfigError, match=r"algorithm\.validate_every=true is a boolean"):
            parse_config({"algorithm": {"name": name, "validate_every": True}})

    def test_it_can_be_compared(self, package: Path) -> None:
        (choice,) = parse_config({"compare": ["somebodys_method:plain"]}).choices()
        assert choice.folder == "somebodys_method_plain" and choice.entry.rounds is None

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("a_module_that_is_missing:f", "there is no module 'a_module_that_is_missing'. Install it"),
            ("somebodys_method.sub:f", "import fails with|there is no module 'somebodys_method.sub'"),
            ("broken_method:f", "'broken_method' exists, but its import fails with ModuleNotFoundError"),
            ("raising_method:f", "'raising_method' exists, but its import fails with ValueError: not today"),
            ("somebodys_method:plane", "has no 'plane'. Did you mean 'plain'"),
            ("somebodys_method:", "is no import string"),
            (":plain", "is no import string"),
            ("somebodys_method:f.<locals>.g", "was made inside a function"),
            ("somebodys_method:<lambda>", "was made inside a function"),
            ("somebodys_method:A_NUMBER", "is no function but a value of type builtins.int"),
            ("somebodys_method:not_annotated", "first argument 'config' must say what its settings are.*it has none"),
            ("somebodys_method:not_a_dataclass", "<class 'dict'> is none"),
            ("somebodys_method:unknown_name", "name 'Unknown' is not defined"),
            ("somebodys_method:three", r"is no factory of algorithms: its arguments are \(one, two, three\)"),
            ("somebodys_method:no_toml", "NoToml has a field that is no number"),
        ],
    )
    def test_what_cannot_be_used_is_said(self, package: Path, name: str, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            parse_config({"algorithm": {"name": name}})

    def test_a_factory_that_returns_something_else_is_said(self, package: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="somebodys_method:returns_none' returned a NoneType, not a fedmoe"):
            run({"algorithm": {"name": "somebodys_method:returns_none"}}, tmp_path / "run")
        assert not (tmp_path / "run" / "config.toml").exists()


class TestInstalled:
    @pytest.fixture
    def install(self, package: Path) -> Any:
        def install(distribution: str, entry_points: str) -> None:
            info = package / f"{distribution}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[fedmoe.algorithms]\n{entry_points}\n")

        return install

    def test_an_installed_package_adds_a_name(self, install: Any, tmp_path: Path) -> None:
        install("somebodys", "somebodys = somebodys_method:with_settings")
        result = run({"algorithm": {"name": "somebodys", "validate_every": 1}}, tmp_path / "run")
        assert (result.data["algorithm"], result.data["title"]) == ("somebodys", "somebodys")

    def test_known_names_include_those_of_packages_and_nothing_else_is_imported(self, install: Any) -> None:
        install("somebodys", "somebodys = raising_method:f")
        with pytest.raises(ConfigError, match="Did you mean 'somebodys'"):
            find("somebody")
        with pytest.raises(ConfigError, match=r"Choose one of fedavg, .*, somebodys, or 'package.module:name'"):
            find("qqq")
        find("fedavg")
        assert "raising_method" not in sys.modules

    def test_an_entry_point_that_does_not_work_is_said(self, install: Any) -> None:
        install("somebodys", "somebodys = somebodys_method:missing")
        with pytest.raises(ConfigError, match="somebodys_method' has no 'missing'"):
            find("somebodys")

    def test_no_package_replaces_a_name_of_the_catalog(self, install: Any) -> None:
        install("somebodys", "fedavg = somebodys_method:plain")
        assert find("fedavg").factory is fedavg

    def test_one_name_of_two_packages_is_refused(self, install: Any) -> None:
        install("somebodys", "shared = somebodys_method:plain")
        install("others", "shared = somebodys_method:with_settings")
        with pytest.raises(
            ConfigError, match=r"several installed packages.*somebodys_method:plain, somebodys_method:w"
        ):
            find("shared")


def test_the_command_line_reads_an_import_string(package: Path, tmp_path: Path) -> None:
    (package / "mine.toml").write_text('algorithm.name = "somebodys_method:plane"')
    command = [sys.executable, "-m", "fedmoe", "run", "mine.toml"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Did you mean 'plain'" in " ".join(done.stderr.split())
