"""Cells side by side, one process per core: faster than workers inside a cell, since cells never wait for one another.

A cell is an ordinary run, so a sweep that is stopped or killed goes on where each of its cells was. Cells with the same
rounds wait for the first of them and take its rounds over. The processes (cell_process.py) are told what to run and say
how far they are in lines of JSON.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fedmoe.comparison import rounds_key
from fedmoe.engines.embedded import default_workers
from fedmoe.errors import RunError, Stopped
from fedmoe.experiment import never
from fedmoe.sweeps.plan import Cell, is_finished

PATIENCE = 0.2  # seconds between looks at whether to stop
LEAVING_SECONDS = 120.0  # for the round that is under way, and its checkpoint


class Progress(NamedTuple):
    """Of one cell. `stage`: rounds, personalise, score, done, found (finished before) or failed."""

    cell: int
    stage: str
    done: int = 0
    total: int = 0
    words: str = ""  # what the last round reported, or why it failed


def run_cells(
    cells: Sequence[Cell],
    *,
    processes: int | None = None,
    command: str = "",
    should_stop: Callable[[], bool] = never,
) -> Iterator[Progress]:
    """Run what is not finished. A cell that fails is reported and does not stop the others."""
    left = [index for index, cell in enumerate(cells) if not is_finished(cell)]
    for index in sorted(set(range(len(cells))) - set(left)):
        yield Progress(index, "found")
    if left:
        pool = _Pool(cells, left, max(1, min(processes or default_workers(), len(left))), command)
        yield from pool.events(should_stop)


class _Pool:
    def __init__(self, cells: Sequence[Cell], left: Sequence[int], count: int, command: str) -> None:
        self.cells, self.command = cells, command
        self.keys = [rounds_key(cell.config) for cell in cells]
        self.trained = {key: cells[i].directory for i, key in enumerate(self.keys) if key and i not in left}
        self.training: set[str] = set()  # keys of rounds that a cell is computing now
        self.waiting = list(left)
        self.busy: dict[int, int] = {}  # process -> cell
        self.said: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.inside = max(1, default_workers() // count)  # workers of a cell, where cells are fewer than cores
        self.processes = [_start() for _ in range(count)]
        self.listeners = [
            threading.Thread(target=self._listen, args=(place, process), daemon=True)
            for place, process in enumerate(self.processes)
        ]
        for listener in self.listeners:
            listener.start()

    def _listen(self, place: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.said.put((place, json.loads(line)))
        self.said.put((place, None))

    def events(self, should_stop: Callable[[], bool]) -> Iterator[Progress]:
        try:
            self._hand_out()
            while self.busy:
                if should_stop():
                    self.waiting.clear()
                    self._tell_to_stop()
                try:
                    place, line = self.said.get(timeout=PATIENCE)
                except queue.Empty:
                    continue
                yield from self._take(place, line)
            if should_stop():
                raise Stopped("stopped; every cell is at its last checkpoint. Run the same command again to go on.")
            if self.waiting:
                raise RunError("every process of the sweep has ended. Run the same command again to go on.")
        finally:
            self._end()

    def _take(self, place: int, line: dict[str, Any] | None) -> Iterator[Progress]:
        if line is None:  # the process is gone
            if place not in self.busy:
                return
            line = {"stage": "failed", "words": f"its process ended with code {self.processes[place].wait()}"}
        cell, stage = self.busy[place], line["stage"]
        if stage in ("done", "failed", "stopped"):
            del self.busy[place]
            key = self.keys[cell]
            self.training.discard(key or "")
            if stage == "done" and key:
                self.trained.setdefault(key, self.cells[cell].directory)
            self._hand_out()
        if stage != "stopped":
            yield Progress(cell, stage, line.get("done", 0), line.get("total", 0), line.get("words", ""))

    def _hand_out(self) -> None:
        for place, process in enumerate(self.processes):
            if place in self.busy or process.poll() is not None:
                continue
            cell = next((index for index in self.waiting if self.keys[index] not in self.training), None)
            if cell is None:
                return
            self.waiting.remove(cell)
            self.busy[place] = cell
            key = self.keys[cell]
            source = self.trained.get(key) if key else None
            if key and source is None:
                self.training.add(key)
            self._tell(process, {
                "config": self.cells[cell].config.model_dump(mode="json"), "directory": str(self.cells[cell].directory),
                "rounds_of": None if source is None else str(source), "command": self.command, "workers": self.inside,
            })  # fmt: skip

    def _tell(self, process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except (OSError, ValueError):
            return  # it is gone: its end is in the queue

    def _tell_to_stop(self) -> None:
        """A process that reads the end of its input finishes the round that is under way, and leaves."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                continue

    def _end(self) -> None:
        self._tell_to_stop()
        for process in self.processes:
            try:
                process.wait(LEAVING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for listener in self.listeners:
            listener.join()


def _start() -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "fedmoe.sweeps.cell_process"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
