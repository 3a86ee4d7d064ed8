"""What a node is asked when it is first met, and what it says: which client it serves, with which fedmoe."""

from importlib.metadata import version

from fedmoe.core_types import ClientId
from fedmoe.framing import Bytes, pack, unpack


def is_hello(frame: Bytes) -> bool:
    return unpack(frame)[0].get("do") == "hello"


def reply_to_hello(client: ClientId) -> Bytes:
    return pack({"client": client, "version": version("fedmoe")})
