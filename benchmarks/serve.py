"""The side of a measured system: sets itself up, then runs rounds when it is asked over standard input.

Every system is a process of its own with this loop, so the driver can let them take turns, whatever environment each
needs, and can see the memory of each. Standard library only. Lines with the mark are ours; what else a system prints
is passed over.
"""

import json
import sys
import time
from collections.abc import Callable

MARK = "@bench "


def serve(run: Callable[[int], None], **about: object) -> None:
    """Tell what this system is, then answer each number of rounds with the seconds they took."""
    tell(about)
    for line in sys.stdin:
        start = time.perf_counter()
        run(int(line))
        tell({"seconds": time.perf_counter() - start})


def tell(words: dict[str, object]) -> None:
    print(f"\n{MARK}{json.dumps(words)}", flush=True)
