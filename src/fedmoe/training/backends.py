"""Which backend trains: a plain rule from the models and the machine, never a race."""

from collections.abc import Callable, Sequence
from typing import Literal

from fedmoe.models.network import Network
from fedmoe.native.build import library_note

Backend = Literal["native", "batched", "sequential"]

# Weights of dense networks up to which a client's round, some ten batches, lasts about as long as a message: 0.1 ms.
LIGHT = 20_000
# Weights that a cohort holds at most, unless one client has more: they are in memory some five times, with the moments
# of the optimizer and the messages.
HEAVY = 4_000_000


def choose_backend(networks: Sequence[Network]) -> Backend:
    """Native where kernels know every network, batched where every layer batches well on a CPU, else sequential."""
    if not any(network.obstacle for network in networks):
        return "native"
    return "batched" if all(network.batching_pays for network in networks) else "sequential"


def cohort_size(networks: Sequence[Network], backend: Backend) -> Callable[[int], int]:
    """How many of the clients at work are computed together.

    It depends on how many they are, never on the number of workers: the composition of cohorts must not. Native kernels
    compute each client by itself, so there a cohort only saves messages: dense networks are so quick that two messages
    are enough, and light ones so that a second message costs more than a second worker gains; others are split into
    eight or more, to keep a handful of workers busy to the end of a round: ten clients are ten messages, since of five
    pairs one of two workers would get three. Of large ones few clients fit into memory side by side.
    """
    if backend != "native":
        return lambda _clients: {"sequential": 1, "batched": 16}[backend]
    weights = sum(network.num_weights for network in networks)
    most = min(16, max(HEAVY // max(weights, 1), 1))
    if all(network.batching_pays for network in networks):
        parts = 1 if weights < LIGHT else 2
        return lambda clients: min(-(-clients // parts), most)
    return lambda clients: min(max(clients // 8, 1), most)


def missing_kernels(networks: Sequence[Network], backend: Backend) -> str | None:
    """A note to the user where only a compiler is missing for the native backend."""
    if backend == "native" or not all(network.is_chain for network in networks):
        return None
    obstacle = next((network.obstacle for network in networks if network.obstacle), None)
    return obstacle and f"native kernels are not available: {obstacle}. Training runs at PyTorch's speed."


def kernel_notes(networks: Sequence[Network], backend: Backend) -> list[str]:
    """What a user should know of the native kernels in this process: that they are missing, or not from the cache."""
    notes = [missing_kernels(networks, backend), library_note() if backend == "native" else None]
    return [note for note in notes if note]


def reason(networks: Sequence[Network], backend: Backend) -> str:
    """Why `choose_backend` says so, in a sentence for the user."""
    if backend == "native":
        return "the native kernels know every layer of every network"
    obstacles = [f"the {network.name} cannot run natively: {network.obstacle}" for network in networks]
    first = next(text for text, network in zip(obstacles, networks, strict=True) if network.obstacle)
    general = (
        "all layers batch well over clients" if backend == "batched" else "one client at a time in one worker per core"
    )
    return f"{first}; {general}"
