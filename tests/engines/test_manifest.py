import json
from typing import NamedTuple

import torch
from torch import Tensor

from fedmoe.algorithms.fedavg import Broadcast, Update
from fedmoe.core_types import Tensors
from fedmoe.engines.manifest import Manifest
from fedmoe.wire import message


@message(experts="models", expert_ids="ids")
class Held(NamedTuple):
    models: Tensors
    ids: Tensor


def test_a_manifest_goes_on_from_a_saved_one() -> None:
    whole = Manifest()
    count_one(whole, 0)
    parts = Manifest(json.loads(json.dumps(whole.as_dict())))
    for manifest in (whole, parts):
        count_one(manifest, 1)
    assert parts.as_dict() == whole.as_dict()
    assert parts.totals() == {
        "bytes_up": 24, "bytes_down": 16, "clients_that_sent": 2, "rejected": 2, "score_bytes": 8
    }  # fmt: skip


def count_one(manifest: Manifest, client: int) -> None:
    manifest.count_up("train", Update, [client], [1], {"w": torch.zeros(3, 2)}, {"loss": torch.zeros(3)})
    manifest.count_down("train", Broadcast({"w": torch.zeros(2)}), 1)
    manifest.reject(1, "train", 9, "it lacks 'w'")
    manifest.count_scores(client, {"accuracy": torch.zeros(())})


def test_clients_are_listed_by_number_and_named_where_names_are_given() -> None:
    manifest = Manifest()
    for client in (10, 9):
        count_one(manifest, client)
    written = manifest.as_dict([3], {10: "north", 9: "south"})
    assert list(written["messages_of_client"]) == list(written["score_messages_of_client"]) == ["9", "10"]
    assert written["opted_out_clients"] == [3]
    assert written["client_names"] == {"9": "south", "10": "north"}
    assert manifest.as_dict()["client_names"] == {}


def test_scores_are_counted_apart() -> None:
    manifest = Manifest()
    manifest.count_scores(4, {"accuracy": torch.zeros(3), "loss": torch.zeros(())})
    manifest.count_scores(4, {"accuracy": torch.zeros(3)})
    written = manifest.as_dict()
    assert written["scores_sent_by_clients"] == {
        "accuracy": {"dtype": "float32", "times": 2, "bytes": 24, "shape": [3]},
        "loss": {"dtype": "float32", "times": 1, "bytes": 4, "shape": []},
    }
    assert written["score_messages_of_client"] == {"4": {"messages": 2, "bytes": 28}}
    assert written["sent_by_clients"] == written["messages_of_client"] == {} and manifest.take_round() == {}
    assert manifest.totals() == {
        "bytes_up": 0, "bytes_down": 0, "clients_that_sent": 0, "rejected": 0, "score_bytes": 28
    }  # fmt: skip


def test_a_checkpoint_carries_all_but_what_rounds_on_record_tell() -> None:
    manifest = Manifest()
    count_one(manifest, 2)
    again = Manifest(json.loads(json.dumps(manifest.for_checkpoint())))
    again.replay([manifest.take_round()])
    assert again.as_dict() == manifest.as_dict()


def test_experts_are_counted_one_by_one_as_the_type_declares_them() -> None:
    manifest = Manifest()
    update_S = {"models/w": torch.zeros(2, 2, 3), "ids": torch.tensor([[0, 4], [4, 5]])}
    manifest.count_up("train", Held, [7, 8], [0, 1], update_S, {})
    manifest.count_down("train", Held({"w": torch.zeros(1, 3)}, torch.tensor([4])), 2)
    sent, received = (manifest.as_dict()[key]["train"] for key in ("sent_by_clients", "received_by_clients"))
    assert {name: row["times"] for name, row in sent.items()} == {
        "ids": 2, "models/0/w": 1, "models/4/w": 2, "models/5/w": 1
    }  # fmt: skip
    assert {name: row["bytes"] for name, row in received.items()} == {"ids": 16, "models/4/w": 24}
