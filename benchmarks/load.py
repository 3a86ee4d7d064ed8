"""How busy the machine was with other work: what makes a measurement worth less. Linux only; zero elsewhere."""

import os
import resource
import time
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # places of idle and waiting for disks among the counts; stolen by the host counts as busy
GUEST = slice(8, None)  # already in the first two


class OtherWork:
    """Starts to count when it is made."""

    def __init__(self) -> None:
        self.start, self.busy, self.own = time.monotonic(), busy_seconds(), own_seconds()

    def cores(self) -> float:
        """Cores that were busy on average with what is neither this process nor a child that has ended."""
        others = (busy_seconds() - self.busy) - (own_seconds() - self.own)
        return max(0.0, others / (time.monotonic() - self.start))


def busy_seconds() -> float:
    """Of all cores, since the machine was started."""
    if not STAT.exists():
        return 0.0
    counts = [int(count) for count in STAT.read_text().splitlines()[0].split()[1:]]
    del counts[GUEST]
    return (sum(counts) - sum(counts[place] for place in IDLE)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
