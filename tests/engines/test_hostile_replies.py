"""Any change of an honest reply ends in the acceptance of what it holds, or in a rejection with a reason.

What is accepted is compared with what other means read from the same bytes: JSON, and the safetensors library.
"""

import json
import tracemalloc
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from builders import PARTICIPANTS
from engines.reply_builders import (
    ASKED,
    Asked,
    fedavg_asked,
    fedmix_asked,
    packed,
    parts_of,
    tensors_in,
    validation_asked,
)
from fedmoe import trees
from fedmoe.core_types import Tensors
from fedmoe.encoding import DTYPES
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.replies import MAX_REASON
from fedmoe.engines.update_checks import UpdateLimits

HONEST = {"fedavg": fedavg_asked(), "fedmix": fedmix_asked(), "validation": validation_asked()}
asked_of = st.sampled_from(list(HONEST.values()))
LIMITS = UpdateLimits()


def check(asked: Asked, frame: bytes) -> None:
    """Everybody has one outcome, the manifest counts just who was accepted, and can be written."""
    manifest = Manifest()
    replies = asked.read(bytearray(frame), manifest)
    assert list(replies) == list(PARTICIPANTS)
    accepted = {client for client, reply in replies.items() if reply.rejection is None}
    for client, reply in replies.items():
        if client not in accepted:
            assert reply.rejection and reply.rejection.isprintable() and len(reply.rejection) <= MAX_REASON
            assert reply.update is None and reply.report is None
    if accepted:
        sent = tensors_in(frame, accepted)
        for client in accepted:
            check_accepted(asked, client, replies[client].update, replies[client].report, sent[client])
    assert {int(client) for client in json.loads(json.dumps(manifest.as_dict()))["messages_of_client"]} == accepted


def check_accepted(asked: Asked, client: int, update: Any, report: Any, sent: Tensors) -> None:
    assert type(update) is asked.exchange.update_type and type(report) is asked.exchange.report_type
    named = trees.to_named({"update": update, "report": report})
    assert named.keys() == sent.keys()
    for name, tensor in named.items():
        assert tensor.dtype == sent[name].dtype and torch.equal(tensor, sent[name])
        if name.endswith("num_examples"):
            assert 0 <= tensor <= LIMITS.max_examples
        elif tensor.is_floating_point() and tensor.numel():
            assert tensor.abs().max() <= LIMITS.max_value
    if hasattr(update, "expert_ids"):
        broadcast = asked.cohort.broadcasts[asked.cohort.clients.index(client)]
        assert set(update.expert_ids.tolist()) <= set(broadcast.expert_ids.tolist())


# Bytes


@settings(deadline=None)
@given(asked_of, st.data())
def test_changed_bytes(asked: Asked, data: st.DataObject) -> None:
    frame = bytearray(asked.frame)
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    check(asked, bytes(frame))


@settings(deadline=None)
@given(asked_of, st.data())
def test_cut_and_spliced_bytes(asked: Asked, data: st.DataObject) -> None:
    frame = asked.frame
    places = st.integers(0, len(frame))
    start, end, source, size = data.draw(places), data.draw(places), data.draw(places), data.draw(st.integers(0, 64))
    check(asked, frame[:start])
    check(asked, frame[:start] + frame[end:])
    check(asked, frame[:start] + frame[source : source + size] + frame[start:])


@settings(deadline=None)
@given(asked_of, st.binary(max_size=200))
def test_any_bytes(asked: Asked, data: bytes) -> None:
    check(asked, data)
    check(asked, len(data).to_bytes(8, "big") + data)


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("other", HONEST)
def test_the_reply_of_another_exchange(name: str, other: str) -> None:
    check(HONEST[name], HONEST[other].frame)
    if name != other:
        assert all(reply.rejection for reply in HONEST[name].read(HONEST[other].frame).values())


# Headers

JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 3, 2**63, 1e308, "", "0", ASKED, [], [[]], [0], [[0]], {}, {"0": 0}, list(PARTICIPANTS)]
)


@settings(deadline=None)
@given(asked_of, st.data())
def test_changed_headers(asked: Asked, data: st.DataObject) -> None:
    header, blobs = parts_of(asked.frame)
    head = {"sizes": [len(blob) for blob in blobs], "header": header}
    for _ in range(data.draw(st.integers(1, 2))):
        replace_somewhere(head, data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    check(asked, len(text).to_bytes(8, "big") + text + b"".join(blob + bytes(-len(blob) % 8) for blob in blobs))


def replace_somewhere(node: Any, data: st.DataObject) -> None:
    """Some value within becomes another, or goes, or is there twice."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = data.draw(st.sampled_from(keys)) if keys else None
    if key is not None and isinstance(node[key], dict | list) and data.draw(st.booleans()):
        replace_somewhere(node[key], data)
    elif key is None or (isinstance(node, list) and data.draw(st.booleans())):
        node.update({"more": 1}) if isinstance(node, dict) else node.append(node[key] if keys else 0)
    elif data.draw(st.booleans()):
        node[key] = deepcopy(data.draw(JUNK))
    else:
        del node[key]


@settings(deadline=None)
@given(asked_of, st.lists(st.lists(st.sampled_from([*PARTICIPANTS, 77]), max_size=5), max_size=5), st.data())
def test_other_groups_with_the_messages_of_anyone(asked: Asked, groups: list[list[int]], data: st.DataObject) -> None:
    _, blobs = parts_of(asked.frame)
    check(asked, packed({"reply_to": ASKED, "groups": groups}, [data.draw(st.sampled_from(blobs)) for _ in groups]))


# Tensors

VALUES = [0.0, -0.0, 1e-45, 1e5, -1e6, 1.1e6, -1e30, 3e38, float("nan"), float("inf"), -float("inf")]


@settings(deadline=None)
@given(asked_of, st.data())
def test_other_tensors(asked: Asked, data: st.DataObject) -> None:
    header, blobs = parts_of(asked.frame)
    place = data.draw(st.integers(0, len(blobs) - 1))
    named = load(blobs[place])
    for _ in range(data.draw(st.integers(1, 2))):
        named = changed(named, data)
    blobs[place] = save(named)
    check(asked, packed(header, blobs))


def changed(named: Tensors, data: st.DataObject) -> Tensors:
    if not named:
        return named
    name = data.draw(st.sampled_from(sorted(named)))
    tensor, others = named[name].contiguous(), {key: leaf for key, leaf in named.items() if key != name}
    kind = data.draw(st.sampled_from(["value", "one value", "dtype", "shape", "rows", "name", "drop", "ids"]))
    if kind == "value":
        return {**named, name: torch.full(tensor.shape, data.draw(st.sampled_from(VALUES))).to(tensor.dtype)}
    if kind == "one value" and tensor.numel():
        flat = tensor.clone().flatten()
        flat[data.draw(st.integers(0, len(flat) - 1))] = torch.tensor(data.draw(st.sampled_from(VALUES))).to(flat.dtype)
        return {**named, name: flat.view(tensor.shape)}
    if kind == "dtype":
        real = tensor.real.contiguous() if tensor.is_complex() else tensor
        return {**named, name: real.to(torch.float32).to(data.draw(st.sampled_from(list(DTYPES.values()))))}
    if kind == "shape":
        return {**named, name: data.draw(st.sampled_from([tensor[None], tensor.flatten(), tensor[..., None]])).clone()}
    if kind == "rows":
        return {
            **named,
            name: data.draw(st.sampled_from([tensor[:0], tensor[:1], torch.cat([tensor, tensor])])).clone(),
        }
    if kind == "name":
        odd = ["", "/", "update", "update/", "report/", "update//w", f"{name}/x", f"my_{name}", f"report/{name}", "é"]
        return {**others, data.draw(st.sampled_from(odd)): tensor}
    if kind == "ids" and "update/expert_ids" in named:
        ids = named["update/expert_ids"]
        return {
            **named,
            "update/expert_ids": torch.randint(-1, 4, ids.shape, generator=torch.Generator().manual_seed(0)),
        }
    return others


# Memory


@pytest.mark.parametrize("name", HONEST)
def test_stated_sizes_take_no_memory(name: str) -> None:
    asked = HONEST[name]
    header, blobs = parts_of(asked.frame)

    def head(sizes: list[int]) -> bytes:
        text = json.dumps({"sizes": sizes, "header": header}).encode()
        return len(text).to_bytes(8, "big") + text

    def tensor(shape: list[int], end: int) -> bytes:
        text = json.dumps({"update/model": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        return packed(header, [len(text).to_bytes(8, "little") + text] * len(blobs))

    frames = [
        (2**60).to_bytes(8, "big") + asked.frame[8:],
        head([2**60]),
        head([2**60] * 1000),
        head([0] * 5000),
        tensor([2**58], 2**60),
        tensor([2**60, 0], 0),
        tensor([0, 2**62], 0),
        tensor([1] * 5000, 4),
        packed({"reply_to": ASKED, "groups": [[0] * 5000]}, [blobs[0]]),
        packed({"reply_to": ASKED, "groups": [[client] for client in range(5000)]}, [b""] * 5000),
    ]
    for frame in frames:
        tracemalloc.start()
        check(asked, frame)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 << 20


@pytest.mark.parametrize("name", HONEST)
def test_deep_nesting(name: str) -> None:
    for deep in (b"[" * 50_000, b'{"a":' * 50_000, b'{"sizes":[],"header":' + b"[" * 50_000):
        check(HONEST[name], len(deep).to_bytes(8, "big") + deep)
        header, blobs = parts_of(HONEST[name].frame)
        check(HONEST[name], packed(header, [len(deep).to_bytes(8, "little") + deep] * len(blobs)))
