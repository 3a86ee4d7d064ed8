"""Replies as honest workers send them, made without an engine, to be changed by tests."""

import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from builders import PARTICIPANTS, tiny_federation, tiny_setup
from fedmoe import trees, wire
from fedmoe.algorithms.algorithm import Exchange
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedmix.algorithm import fedmix
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.core_types import ClientId, Tensors
from fedmoe.encoding import Bytes
from fedmoe.engines.frames import Cohort, shared
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.replies import Reply, read_replies
from fedmoe.engines.update_checks import UpdateLimits
from fedmoe.streams import Streams

ASKED = "round:2:0"


class Asked(NamedTuple):
    """An exchange, whom it asked with what, and the honest reply."""

    exchange: Exchange
    cohort: Cohort
    frame: bytes

    def __repr__(self) -> str:
        return f"Asked({self.exchange.name} of {self.cohort.clients})"

    def read(self, frame: Bytes, manifest: Manifest | None = None, **limits: Any) -> dict[ClientId, Reply]:
        manifest = Manifest() if manifest is None else manifest
        return read_replies(self.exchange, self.cohort, ASKED, frame, manifest, UpdateLimits(**limits))


def ask(exchange: Exchange, server: Any, init_client: Callable[..., Any]) -> Asked:
    clients = list(PARTICIPANTS)
    broadcasts = list(shared({client: exchange.broadcast(server, client, []) for client in clients}).values())
    states = [init_client(broadcast, client, 0) for broadcast, client in zip(broadcasts, clients, strict=True)]
    data = tiny_federation().data(clients, opted_in_only=True)
    rng = Streams(0, "round:train", 2, tuple(clients))
    _, update_S, report_S = exchange.local_update(trees.stack(broadcasts), trees.stack(states), data, rng)
    groups, updates, reports = [clients], [update_S], [report_S]
    if isinstance(update_S, list):
        groups = [[client] for client in clients]
        updates = [trees.stack([update]) for update in update_S]
        reports = [trees.stack([report]) for report in trees.unstack(report_S, len(clients))]
    blobs = list(map(wire.encode_reply, updates, reports))
    return Asked(exchange, Cohort(clients, broadcasts), bytes(wire.pack({"reply_to": ASKED, "groups": groups}, blobs)))


def fedavg_asked() -> Asked:
    algorithm = fedavg(FedAvgConfig(), tiny_setup())
    return ask(algorithm.round[0], algorithm.init_server(0), algorithm.init_client)


def validation_asked() -> Asked:
    algorithm = fedavg(FedAvgConfig(), tiny_setup())
    assert algorithm.validation is not None
    return ask(algorithm.validation.exchange, algorithm.init_server(0), algorithm.init_client)


def fedmix_asked() -> Asked:
    """Each client holds two of three experts, not all of them the same two."""
    algorithm = fedmix(FedMixConfig(num_experts=3, prune_threshold=0.3), tiny_setup())
    server = algorithm.init_server(0)
    server.usage[list(PARTICIPANTS)] = torch.tensor([0.5, 0.5, 0.0])
    server.usage[PARTICIPANTS[-1]] = torch.tensor([0.0, 0.4, 0.6])
    return ask(algorithm.round[0], server, algorithm.init_client)


def parts_of(frame: Bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Header and messages, read by other means than ours; raises anything where there are none."""
    frame = bytes(frame)
    start = 8 + int.from_bytes(frame[:8], "big")
    head = json.loads(frame[8:start])
    blobs = []
    for size in head["sizes"]:
        blobs.append(frame[start : start + size])
        start += size + -size % 8
    return head["header"], blobs


def packed(header: Any, blobs: list[bytes]) -> bytes:
    return bytes(wire.pack(header, [[blob] for blob in blobs]))


def with_header(frame: bytes, **changes: Any) -> bytes:
    header, blobs = parts_of(frame)
    return packed({**header, **changes}, blobs)


def with_tensors(frame: bytes, change: Callable[[Tensors], Tensors]) -> bytes:
    """Other tensors in each message."""
    header, blobs = parts_of(frame)
    return packed(header, [save(change(load(blob))) for blob in blobs])


def tensors_in(frame: Bytes, clients: Collection[ClientId] = PARTICIPANTS) -> dict[ClientId, Tensors]:
    """What each of these clients sent, read by the safetensors library."""
    header, blobs = parts_of(frame)
    found = {}
    for group, blob in zip(header["groups"], blobs, strict=True):
        named = load(blob) if set(group) & set(clients) else {}
        found |= {client: {name: leaf[s] for name, leaf in named.items()} for s, client in enumerate(group)}
    return found
