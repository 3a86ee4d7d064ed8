"""Personalised federated learning with mixtures of experts.

Names are imported when they are first used (PEP 562): `import fedmoe` and `fedmoe --help` do not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedmoe.errors import ConfigError, DataError, FedmoeError, MessageError, RunError

if TYPE_CHECKING:
    from fedmoe.api import build, compare, run
    from fedmoe.assembly import Parts
    from fedmoe.clients.federation import Federation
    from fedmoe.clients.own_data import federation_from_clients
    from fedmoe.clients.own_table import federation_from_table
    from fedmoe.data.dataset import Dataset, Table
    from fedmoe.deployment.onboarding import onboard
    from fedmoe.loading import load
    from fedmoe.partition.split import Shards, Split
    from fedmoe.result import Result

    __version__: str

__all__ = [
    "ConfigError",
    "DataError",
    "Dataset",
    "Federation",
    "FedmoeError",
    "MessageError",
    "Parts",
    "Result",
    "RunError",
    "Shards",
    "Split",
    "Table",
    "build",
    "compare",
    "federation_from_clients",
    "federation_from_table",
    "load",
    "onboard",
    "run",
]

# Must name what the imports under TYPE_CHECKING name; a test compares the two.
_HOMES = {
    "Dataset": "fedmoe.data.dataset",
    "Federation": "fedmoe.clients.federation",
    "Parts": "fedmoe.assembly",
    "Result": "fedmoe.result",
    "Shards": "fedmoe.partition.split",
    "Split": "fedmoe.partition.split",
    "Table": "fedmoe.data.dataset",
    "build": "fedmoe.api",
    "compare": "fedmoe.api",
    "federation_from_clients": "fedmoe.clients.own_data",
    "federation_from_table": "fedmoe.clients.own_table",
    "load": "fedmoe.loading",
    "onboard": "fedmoe.deployment.onboarding",
    "run": "fedmoe.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedmoe")
    if name == "models":  # fedmoe.models.to_group_norm, without an import of its own
        return importlib.import_module("fedmoe.models")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmoe' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
