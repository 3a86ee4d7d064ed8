"""What the README shows works as printed."""

import re
from pathlib import Path

import pytest

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
