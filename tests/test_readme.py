"""What the README shows works as printed."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from fedmoe.cli import main

README = Path(__file__).parents[1] / "README.md"


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)


def test_the_example_with_own_data_and_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks()
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 22
    exec(compile(block, str(README), "exec"), {})
    assert "manifest.json" in capsys.readouterr().out


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


TINY = """
name = "digits"
compare = ["fedavg", "fine_tuned"]
split = { num_clients = 4, train_size = 12, validation_size = 6, test_size = 20, global_test_size = 50 }
model = { hidden = [4] }
training = { local = { epochs = 2 }, personal = { epochs = 2 } }
schedule = { rounds = 2, clients_per_round = 2 }
engine = { workers = 1 }
"""


def test_the_commands_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"## Command line\n\n```\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) >= 9 and all(words[0] == "fedmoe" for words in commands)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/digits.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    for words in commands:
        if words[1:3] == ["data", "get"]:  # needs a network
            continue
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code, shlex.join(words)
    assert (tmp_path / "runs/together/report.html").exists()
