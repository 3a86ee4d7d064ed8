"""TensorBoard as a sink: the metrics of a run's folder as scalars, while it trains or afterwards (extra `track`)."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from fedmoe.errors import ConfigError

SCORES = ("own", "global", "unseen", "pooled")


class TensorBoardSink:
    """Writes what is new in metrics.jsonl at each look. A file that became shorter, as a resume makes it, is read anew:
    TensorBoard keeps the last value of a step."""

    def __init__(self, run: Path, logs: Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard cannot be imported ({error}). Install it: pip install 'fedmoe[track]'."
            ) from error
        self._metrics, self._read = run / "metrics.jsonl", 0
        self._writer: Any = SummaryWriter(str(logs or run / "tensorboard"))

    def __enter__(self) -> "TensorBoardSink":
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.look()
        self._writer.close()

    def look(self) -> None:
        try:
            content = self._metrics.read_bytes()
        except FileNotFoundError:
            return
        start = self._read if len(content) >= self._read else 0
        whole = content.rfind(b"\n") + 1  # a line may be half written
        for line in content[start:whole].splitlines():
            self._write(json.loads(line))
        self._read = whole
        self._writer.flush()

    def _write(self, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            scalars = {f"rounds/{name}": value for name, value in event["reports"].items()}
            scalars |= {f"experts/load {k}": share for k, share in enumerate(event["experts"].get("load", ()))}
            if "usage_entropy" in event["experts"]:
                scalars["experts/entropy"] = event["experts"]["usage_entropy"]
        elif event["event"] == "curve":
            scalars = {f"scores/{kind}": event[kind] for kind in SCORES if event.get(kind) is not None}
        else:
            return
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, event["round"])
