"""The summary that all benchmarks write: results/speed.json, from which `report.py` makes docs/speed.md."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SUMMARY = Path(__file__).parent.parent / "results" / "speed.json"


def record(section: str, key: str, line: dict[str, Any]) -> None:
    """Print the measurement as one line of JSON, and put it in its place in the summary."""
    line = {"measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), **line}
    print(json.dumps({"section": section, "key": key, **line}), flush=True)
    summary = read_summary()
    summary.setdefault(section, {})[key] = line
    fresh = SUMMARY.with_suffix(".tmp")
    fresh.write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    fresh.replace(SUMMARY)


def read_summary() -> dict[str, Any]:
    return json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
