import json

import torch

from fedmoe.engines.manifest import Manifest


def test_a_manifest_goes_on_from_a_saved_one() -> None:
    whole = Manifest()
    count_one(whole, 0)
    parts = Manifest(json.loads(json.dumps(whole.as_dict())))
    for manifest in (whole, parts):
        count_one(manifest, 1)
    assert parts.as_dict() == whole.as_dict()
    assert parts.totals() == {"bytes_up": 24, "bytes_down": 16, "clients_that_sent": 2, "refused": 2}


def count_one(manifest: Manifest, client: int) -> None:
    manifest.count_up("train", [client], [1], {"w": torch.zeros(3, 2)}, {"loss": torch.zeros(3)})
    manifest.count_down("train", {"w": torch.zeros(2)}, 1)
    manifest.refuse(1, "train", 9, "it lacks 'w'")


def test_clients_are_listed_by_number() -> None:
    manifest = Manifest()
    for client in (10, 9):
        count_one(manifest, client)
    assert list(manifest.as_dict()["messages_of_client"]) == ["9", "10"]
    assert manifest.as_dict([3])["opted_out_clients"] == [3]
