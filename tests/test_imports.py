"""What a user waits for before anything happens: help, version and lists come without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedmoe

CODE = """
import sys
from fedmoe.cli import main
sys.argv = ["fedmoe", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    assert stop.code == {code}, stop.code
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "audit"),
        (["run", "--help"], 0, "--set"),
        (["--version"], 0, f"fedmoe {fedmoe.__version__}"),
        (["data", "list"], 0, "cifar10"),
        (["compare", __file__, "--seeds", "one"], 2, "--seeds 'one' is no list of whole numbers"),
        (["run", "missing.toml"], 2, "the config missing.toml cannot be read: there is no such file"),
    ],
)
def test_torch_is_not_imported_for(arguments: list[str], code: int, words: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(arguments=arguments, code=code)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert words in run.stdout + run.stderr


def test_the_package_can_be_run_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "fedmoe", "--version"], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == f"fedmoe {fedmoe.__version__}"


def test_public_names_are_the_same_for_a_reader_and_for_a_type_checker() -> None:
    tree = ast.parse(Path(fedmoe.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert typed == fedmoe._HOMES
    for name in fedmoe.__all__:
        assert getattr(fedmoe, name).__name__ == name
    assert set(fedmoe.__all__) <= set(dir(fedmoe))
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = fedmoe.rnu
