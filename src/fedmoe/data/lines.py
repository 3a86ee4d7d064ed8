"""Text files line by line: UTF-8 and JSON lines, with errors named by file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmoe.data.formats import REMEDY
from fedmoe.errors import DataError


def decode(content: bytearray, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8. "
            "Download the file again, or convert it to UTF-8."
        ) from error


def json_lines(content: bytearray, path: Path, fields: dict[str, type]) -> Iterator[dict[str, Any]]:
    """One object per line, each with these fields of these types."""
    for number, line in enumerate(decode(content, path).removesuffix("\n").split("\n"), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON ({error}). {REMEDY}") from error
        for name, kind in fields.items():
            if not isinstance(record, dict) or type(record.get(name)) is not kind:
                raise DataError(
                    f"{path}, line {number}: expected an object whose {name!r} is a {kind.__name__}. "
                    f"The file is of another data set. {REMEDY}"
                )
        yield record


def require_all(values: list[Any], kind: type, name: str, path: Path, line: int) -> None:
    if not all(type(value) is kind for value in values):
        raise DataError(f"{path}, line {line}: {name!r} must be a list of {kind.__name__} only. {REMEDY}")


def require_rows(found: int, expected: int, path: Path) -> None:
    if found != expected:
        raise DataError(f"{path} has {found} rows, but the published file has {expected}. {REMEDY}")
