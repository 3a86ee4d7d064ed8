"""Memory of a process and all its descendants, from /proc. Linux only; zeros elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SECONDS_BETWEEN_LOOKS = 0.2


class Memory(NamedTuple):
    """In MB: `rss` sums each process's own peak and counts shared pages once per process; `pss` shares them out."""

    rss: float
    pss: float


class Peak:
    """The most that was seen of a tree of processes."""

    def __init__(self, pid: int) -> None:
        self.pid, self.memory = pid, Memory(0, 0)

    def look(self) -> None:
        now = memory_of_tree(self.pid)
        self.memory = Memory(max(self.memory.rss, now.rss), max(self.memory.pss, now.pss))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look often: for turns that are not timed, since looking takes time itself."""
        over = threading.Event()

        def look_until_over() -> None:
            while not over.wait(SECONDS_BETWEEN_LOOKS):
                self.look()

        looking = threading.Thread(target=look_until_over)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
            self.look()


def memory_of_tree(root: int) -> Memory:
    rss = pss = 0
    for pid in tree_of(root):
        rss += kilobytes(PROC / str(pid) / "status", "VmHWM:")
        pss += kilobytes(PROC / str(pid) / "smaps_rollup", "Pss:")
    return Memory(rss / 1024, pss / 1024)


def tree_of(root: int) -> set[int]:
    parents = {int(entry.name): parent_of(entry) for entry in PROC.glob("[0-9]*")}
    tree = {root}
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return tree


def parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def kilobytes(path: Path, field: str) -> int:
    try:
        return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(field))
    except OSError:
        return 0
