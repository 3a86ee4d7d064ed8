"""What a worker may be asked for, checked before anything is done: a server could send any bytes.

Whatever is not a request of the declared form is a MessageError that says which field and why.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from fedmoe import wire
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.encoding import Bytes
from fedmoe.engines.protocol import Phase, exchanges_of
from fedmoe.engines.replies import shown_reason
from fedmoe.errors import MessageError

Header = dict[str, Any]
Check = Callable[[Any], bool]

MAX_COUNT = 2**63 - 1  # of rounds and versions: the private store counts in 64 bits
MAX_REPLY_TO = 200  # characters
# What is done with broadcasts to some clients.
ON_COHORTS = ("exchange", "personalize", "score", "validate", "export")


def read_request(frame: Bytes, algorithm: Algorithm, num_clients: int) -> tuple[Header, list[memoryview]]:
    """The header and the broadcasts of a request; `num_clients` counts those that never train, too."""
    header, blobs = wire.unpack(frame)
    work = header.get("do")
    if not isinstance(work, str) or work not in FIELDS:
        raise MessageError(f"a request asks to {shown_reason(repr(work))}; known: {', '.join(FIELDS)}.")
    for name, (is_right, expected) in FIELDS[work].items():
        if name not in header or not is_right(header[name]):
            raise _wrong(name, header, expected)
    if work in ("drop", "find_missing"):
        _check_clients([client for client, *_ in header["states"]], num_clients, header)
    if work in ON_COHORTS:
        _check_cohort(header, num_clients, len(blobs))
        _check_superseded(header)
    if work in ("exchange", "personalize") and (version := header["version"]) is not None:
        _check_later(version, header)
    if work == "exchange" and not 0 <= header["index"] < (count := len(exchanges_of(algorithm, header["phase"]))):
        raise _wrong("index", header, f"one of the {count} exchanges of phase {header['phase']!r}")
    if work == "personalize" and algorithm.personalize is None:
        raise MessageError("a request asks to personalize, but this algorithm does not.")
    return header, blobs


def _check_cohort(header: Header, num_clients: int, num_blobs: int) -> None:
    clients = header["clients"]
    _check_clients(clients, num_clients, header)
    if not clients:
        raise _wrong("clients", header, "at least one")
    for name in ("state_versions", "broadcast_index"):
        if len(header[name]) != len(clients):
            raise _wrong(name, header, f"one for each of {len(clients)} clients")
    if max(header["broadcast_index"]) >= num_blobs:
        raise _wrong("broadcast_index", header, f"places among {num_blobs} broadcasts")


def _check_superseded(header: Header) -> None:
    """States that may go, which is told along with other work; most requests say nothing of it."""
    rows = header.setdefault("superseded", [])
    if not _are_rows_of(3)(rows) or any(client not in header["clients"] for client, *_ in rows):
        raise _wrong("superseded", header, "a list of [client, version, before] of its clients")


def _check_later(version: int, header: Header) -> None:
    if version <= max(header["state_versions"]):  # it would overwrite what it starts from
        raise _wrong("version", header, "later than the state_versions")


def _check_clients(clients: list[int], num_clients: int, header: Header) -> None:
    if len(set(clients)) != len(clients) or any(client >= num_clients for client in clients):
        name = "clients" if header["do"] in ON_COHORTS else "states"
        raise _wrong(name, header, f"different clients from 0 to {num_clients - 1}")


def _wrong(name: str, header: Header, expected: str) -> MessageError:
    found = shown_reason(repr(header.get(name)))
    return MessageError(f"a request to {header['do']!r} has {name} = {found}, which should be {expected}.")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_rows_of(length: int) -> Check:
    return lambda value: isinstance(value, list) and all(_are_counts(row) and len(row) == length for row in value)


COUNTS = (_are_counts, "a list of whole numbers from 0")
COHORT = {"clients": COUNTS, "state_versions": COUNTS, "broadcast_index": COUNTS}
COUNT = (_is_count, "a whole number from 0")
COUNT_OR_NONE = (_is_count_or_none, "a whole number from 0, or null")
REPLY_TO = (lambda value: isinstance(value, str) and len(value) <= MAX_REPLY_TO, "a short text")
PHASE = (lambda value: isinstance(value, str) and value in get_args(Phase), f"one of {', '.join(get_args(Phase))}")
FLAG = (lambda value: isinstance(value, bool), "true or false")

FIELDS: Mapping[str, Mapping[str, tuple[Check, str]]] = {
    "exchange": {
        **COHORT, "phase": PHASE, "index": COUNT, "round": COUNT, "version": COUNT_OR_NONE, "reply_to": REPLY_TO,
    },
    "personalize": {**COHORT, "version": COUNT},
    "personalized": {"version": COUNT},
    "score": {**COHORT, "final": COUNT_OR_NONE, "send": FLAG, "reply_to": REPLY_TO},
    "export": {**COHORT, "final": COUNT_OR_NONE},
    "validate": {**COHORT, "reply_to": REPLY_TO},
    "forget": {"clients": COUNTS, "version": COUNT},
    "drop": {"states": (_are_rows_of(3), "a list of [client, version, before]")},
    "find_missing": {"states": (_are_rows_of(2), "a list of [client, version]")},
}  # fmt: skip
