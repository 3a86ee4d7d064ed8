"""What docs/own_algorithm.md shows works as printed."""

import re
import sys
from pathlib import Path

import pytest

import fedmoe
from fedmoe.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "own_algorithm.md"


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


@pytest.fixture(scope="module")
def parts() -> tuple[list[str], list[str]]:
    """The blocks that make up ditto.py, and the scripts that use it."""
    before, after = PAGE.read_text(encoding="utf-8").split("\n## Run it\n")
    return blocks("python", before), blocks("python", after)


@pytest.fixture
def folder(parts: tuple[list[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on sys.path, with ditto.py."""
    (tmp_path / "ditto.py").write_text("\n\n".join(parts[0]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ditto", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(0, "ditto:ditto ditto\n", id="run"),
        pytest.param(1, "passed: kill and resume (batched)\n", id="check"),
        pytest.param(2, "", id="losses", marks=pytest.mark.slow),
    ],
)
def test_a_script_runs(
    number: int, words: str, parts: tuple[list[str], list[str]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(parts[1]) == 4  # the last is a file of its own
    exec(compile(parts[1][number], f"{PAGE} ({number})", "exec"), {"__name__": "script"})
    assert words in capsys.readouterr().out


def test_the_toml_file_runs_and_compares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = blocks("toml", PAGE.read_text(encoding="utf-8"))
    (folder / "ditto.toml").write_text(table)
    for command in ("run", "compare"):
        monkeypatch.setattr(sys, "argv", ["fedmoe", command, "ditto.toml"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    assert (folder / "runs/ditto/report.html").exists() and (
        folder / "runs/ditto-comparison/ditto_ditto-seed0"
    ).exists()


def test_parts_of_ones_own_run(
    parts: tuple[list[str], list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_parts.py").write_text(parts[1][-1])
    _, table = blocks("toml", PAGE.read_text(encoding="utf-8"))
    (folder / "my_parts.toml").write_text(table)
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    result = fedmoe.run("my_parts.toml", directory="run")
    assert result.federation.num_clients == 3 and result.data["model_weights"] == 8 * 8 + 8 + 8 * 4 + 4
    assert all(0 < score.metrics["brier"] < 2 for score in result.scores)


def test_the_method_is_short_and_uses_public_names_alone(parts: tuple[list[str], list[str]]) -> None:
    code = [line for block in parts[0] for line in block.splitlines() if line.strip()]
    assert len(code) <= 110
    assert {line.split()[1] for line in code if line.startswith("from fedmoe")} == {"fedmoe.contract"}


def test_every_link_and_file_of_the_page_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    package = PAGE.parents[1] / "src" / "fedmoe" / "algorithms"
    named = {name for name in re.findall(r"`(\w+\.py)`", text) if name not in ("ditto.py", "my_parts.py")}
    assert named and [name for name in named if not (package / name).exists()] == []
