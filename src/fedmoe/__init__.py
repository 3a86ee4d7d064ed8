"""Personalised federated learning with mixtures of experts."""

from fedmoe.api import run
from fedmoe.clients.federation import Federation
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.errors import ConfigError, DataError, FedmoeError, MessageError, RunError
from fedmoe.result import Result

__all__ = [
    "ConfigError",
    "DataError",
    "Federation",
    "FedmoeError",
    "MessageError",
    "Result",
    "RunError",
    "federation_from_clients",
    "run",
]
