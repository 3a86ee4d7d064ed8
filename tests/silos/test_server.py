"""What the ServerApp refuses before it sends anything, and which folder it takes."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from fedmoe.errors import ConfigError, RunError
from fedmoe.silos.app_files import write_app
from fedmoe.silos.node import Agreement
from fedmoe.silos.place import HOME
from fedmoe.silos.server import _next_attempt, check_home, serve, server_home
from silos.apps import silo_config
from silos.test_commands import run_on_nodes


def test_what_a_run_needs_of_its_folder(tmp_path: Path) -> None:
    check_home(tmp_path / "new", resume=False)
    with pytest.raises(RunError, match="holds no run to go on with"):
        check_home(tmp_path / "new", resume=True)
    old = run_on_nodes(tmp_path, "fedavg", Agreement())
    check_home(old, resume=True)
    with pytest.raises(RunError, match=r"holds a run already.*fedmoe flower resume"):
        check_home(old, resume=False)
    config = old / "config.toml"
    config.write_text(config.read_text().replace(f'fedmoe = "{version("fedmoe")}"', 'fedmoe = "0.0.1"'))
    with pytest.raises(RunError, match=r"was made by fedmoe 0.0.1, and this is .*Resume it with that one"):
        check_home(old, resume=True)


def test_each_start_is_another_attempt(tmp_path: Path) -> None:
    assert [_next_attempt(tmp_path / "run") for _ in range(3)] == [1, 2, 3]
    assert (tmp_path / "run" / "attempt").stat().st_mode & 0o777 == 0o600


def test_the_folder_is_what_the_run_says_or_one_named_after_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    assert server_home(silo_config(), {"directory": "/srv/run1"}) == Path("/srv/run1")
    assert server_home(silo_config(), {"directory": ""}) == tmp_path / "servers" / silo_config().name


def test_a_config_of_another_engine_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_app(tmp_path / "silo_app")
    path = tmp_path / "silo_app" / "fedmoe.toml"
    path.write_text(path.read_text().replace('name = "flower"', 'name = "embedded"'))
    with pytest.raises(ConfigError, match=r"engine.name='embedded' in fedmoe.toml: an app of Flower needs 'flower'"):
        serve(None, {"directory": str(tmp_path / "run")}, path)
    assert not (tmp_path / "run").exists()


def test_the_template_takes_no_count_of_examples_on_trust(tmp_path: Path) -> None:
    write_app(tmp_path / "silo_app")
    table = tomllib.loads((tmp_path / "silo_app" / "fedmoe.toml").read_text())
    assert table["algorithm"]["max_weight"] < table["schedule"]["max_examples"] < 1e7
