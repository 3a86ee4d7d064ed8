"""results.json of a finished run, read back for tables and pages: whatever is not as a run writes it is named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmoe.errors import RunError
from fedmoe.storage.files import read_bytes

Types = type | tuple[type, ...]
NUMBER = (int, float)

RESULT: dict[str, Types] = {
    "name": str, "algorithm": str, "title": str, "seed": int, "config": dict, "versions": dict, "scores": list,
    "history": list, "traffic": dict, "rounds": int, "seconds": NUMBER,
}  # fmt: skip
SCORE: dict[str, Types] = {"client": int, "model": str, "data": str, "unseen": bool}
OF_CLASSES: dict[str, Types] = {"accuracy": NUMBER}
OF_NUMBERS: dict[str, Types] = {"metrics": dict}
ROUND: dict[str, Types] = {"round": int, "reports": dict}
TRAFFIC: dict[str, Types] = {"bytes_up": NUMBER, "bytes_down": NUMBER}


def read_results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        results = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise RunError(f"{folder} holds no finished run ({path.name} is missing). Run it to its end first.") from None
    except (ValueError, RecursionError) as error:
        raise _altered(path, f"it is no JSON ({error})") from error
    _check(path, "it", results, RESULT)
    figures = OF_NUMBERS if results.get("task") == "regression" else OF_CLASSES
    for index, score in enumerate(results["scores"]):
        _check(path, f"scores[{index}]", score, SCORE | figures)
    for index, record in enumerate(results["history"]):
        _check(path, f"history[{index}]", record, ROUND)
    _check(path, "traffic", results["traffic"], TRAFFIC)
    found: dict[str, Any] = results
    return found


def _check(path: Path, where: str, value: Any, keys: Mapping[str, Types]) -> None:
    if not isinstance(value, dict):
        raise _altered(path, f"{where} is {_shown(value)}, where an object should be")
    for key, types in keys.items():
        if key not in value:
            raise _altered(path, f"{where} lacks {key!r}")
        is_wrong_bool = isinstance(value[key], bool) and types is not bool  # which Python counts among the numbers
        if is_wrong_bool or not isinstance(value[key], types):
            raise _altered(path, f"{where} has {key!r}: {_shown(value[key])}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _altered(path: Path, what: str) -> RunError:
    return RunError(f"{path} is not as a run wrote it: {what}. Run the same command again to write it anew.")
