"""What clients replied while they were delivered their model, as a file: a model is delivered again without asking.

Most algorithms ask nothing then. One whose clients choose their experts does, and only their data could tell again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedmoe import trees
from fedmoe.algorithms.algorithm import Exchange
from fedmoe.core_types import ClientId, Tree
from fedmoe.encoding import decode_tensors, encode_tensors
from fedmoe.errors import MessageError, RunError
from fedmoe.storage.files import read_bytes, write_atomically


class DeliveryRecord(NamedTuple):
    replies: Mapping[ClientId, Sequence[Tree]]  # one for each question that the client answered
    versions: Mapping[ClientId, int]  # of the private states that clients came to on the way


def save_delivery(path: Path, record: DeliveryRecord) -> None:
    named = {
        f"{client}/{index}/{name}": tensor
        for client, replies in record.replies.items()
        for index, reply in enumerate(replies)
        for name, tensor in trees.to_named(reply).items()
    }
    metadata = {"versions": json.dumps({str(client): version for client, version in record.versions.items()})}
    write_atomically(path, b"".join(encode_tensors(named, metadata)))


def read_delivery(path: Path, questions: Sequence[Exchange]) -> DeliveryRecord:
    try:
        content = memoryview(bytearray(read_bytes(path)))
        header = json.loads(bytes(content[8 : 8 + int.from_bytes(content[:8], "little")]))
        versions = {int(client): version for client, version in json.loads(header["__metadata__"]["versions"]).items()}
        by_client = trees.nested(decode_tensors(content))
        replies = {
            int(client): [
                trees.from_named(question.update_type, trees.to_named(given[str(index)]))
                for index, question in enumerate(questions[: len(given)])
            ]
            for client, given in by_client.items()
        }
    except (FileNotFoundError, ValueError, KeyError, MessageError) as error:
        raise RunError(
            f"{path}, what clients replied when their models were delivered, cannot be read: {error}. Run the same "
            "command again with the clients' data."
        ) from error
    return DeliveryRecord(replies, versions)
