"""`fedmoe.contract` is enough to write the methods of this package from outside."""

import ast
import re
from pathlib import Path

import pytest

import fedmoe.algorithms
from fedmoe import contract

HERE = Path(fedmoe.algorithms.__file__).parent


def test_every_public_name_is_there_and_explained() -> None:
    assert contract.__doc__ is not None
    assert all(hasattr(contract, name) for name in contract.__all__)
    assert [name for name in contract.__all__ if not re.search(rf"\b{name}\b", contract.__doc__)] == []


def imported(path: Path) -> set[str]:
    """Names that a method imports from this package; other methods, which it may build on, are left out."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    methods = {f"fedmoe.algorithms.{file.stem}" for file in HERE.glob("*.py")} - {
        "fedmoe.algorithms.algorithm",
        "fedmoe.algorithms.setup",
    }
    return {
        name.name
        for node in nodes
        if node.module and node.module.split(".")[0] == "fedmoe"
        if node.module not in methods | {"fedmoe.algorithms"}
        for name in node.names
    }


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "fine_tuned",
        "local_only",
        "specialist_mixture",
        "local_global_mixture",
        "partial_personalization",
    ],
)
def test_a_method_of_this_package_could_be_written_with_them_alone(name: str) -> None:
    used = imported(HERE / f"{name}.py")
    assert len(used) >= 5 and used <= {*contract.__all__}, used - {*contract.__all__}
