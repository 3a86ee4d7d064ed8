"""Which way to train: a plain rule from the models and the device."""

from collections.abc import Iterable

from fedmoe.models.network import Network
from fedmoe.training.inference import Way


def choose_way(networks: Iterable[Network]) -> Way:
    """Stacked where every layer batches well on a CPU (dense models), looped elsewhere."""
    return "stacked" if all(network.stacking_pays for network in networks) else "looped"
