"""One process of a sweep: reads which run to make, a line of JSON each, and writes how far it is, likewise.

The end of the input is the sign to stop: the parent asks for it, or is gone. The round under way is finished then.
"""

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from fedmoe.config import parse_config
from fedmoe.engines.steps import RoundRecord
from fedmoe.errors import FedmoeError, Stopped
from fedmoe.experiment import Advanced, Started, run_events

Line = dict[str, Any]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they may go to the whole group: how to end is the parent's to say
        signal.signal(number, signal.SIG_IGN)
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is no line of ours
    asked: queue.Queue[Line | None] = queue.Queue()
    ended = threading.Event()
    # Not from sys.stdin, which forked workers close: they would wait for ever for the lock that this thread holds.
    source = os.fdopen(os.dup(0))
    threading.Thread(target=_read, args=(source, asked, ended), daemon=True).start()
    while (task := asked.get()) is not None and not ended.is_set():
        try:
            for line in _run(task, ended.is_set):
                _tell(told, line)
        except Stopped:
            _tell(told, {"stage": "stopped"})
        except FedmoeError as error:
            _tell(told, {"stage": "failed", "words": str(error)})
        except Exception as error:  # a defect in one cell must not take the others with it
            _tell(told, {"stage": "failed", "words": f"{type(error).__name__}: {error}"})


def _read(source: TextIO, asked: "queue.Queue[Line | None]", ended: threading.Event) -> None:
    for line in source:
        asked.put(json.loads(line))
    ended.set()
    asked.put(None)


def _tell(told: TextIO, line: Line) -> None:
    try:
        told.write(json.dumps(line) + "\n")
    except BrokenPipeError:
        return  # nobody listens any more; the run goes on to its next checkpoint and stops


def _run(task: Line, should_stop: Callable[[], bool]) -> Iterator[Line]:
    config = parse_config(task["config"])
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"workers": task["workers"]})})
    source = None if task["rounds_of"] is None else Path(task["rounds_of"])
    total = 0
    for event in run_events(
        config, Path(task["directory"]), rounds_of=source, command=task["command"], should_stop=should_stop
    ):
        if isinstance(event, Started):
            total = event.rounds
            yield {"stage": "rounds", "done": event.resumed_from, "total": total}
        elif isinstance(event, RoundRecord):
            words = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in event.reports.items())
            yield {"stage": "rounds", "done": event.round, "total": total, "words": words}
        elif isinstance(event, Advanced):
            yield {"stage": event.stage, "done": event.done, "total": event.total}
    yield {"stage": "done"}


if __name__ == "__main__":
    main()
