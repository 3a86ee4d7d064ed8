"""What a calibration reads of its clients is the same in all its exchanges: computed in the first, kept for the others.

Shape suffixes: S clients of a cohort, N examples, C classes.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import ClientId, Examples, Tree
from fedmoe.models.fingerprint import tensors_digest

MOST_BYTES = 64 * 1024**2  # per process


class CalibrationRows(NamedTuple):
    scores_SNC: Tensor
    offset_SC: Tensor
    labels: Examples  # without inputs


class RememberedRows:
    """By cohort, in the memory of the process that holds the records; a new process computes them again.

    They are a function of the records, which do not change while a calibration lasts, and of what was sent: they are
    used again only where that is the same, bit for bit.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[tuple[ClientId, ...], tuple[str, CalibrationRows]] = OrderedDict()

    def __call__(
        self, clients: tuple[ClientId, ...], sent: Tree, compute: Callable[[], CalibrationRows], *, anew: bool
    ) -> CalibrationRows:
        """`anew`: a calibration begins, perhaps of other records than the one before."""
        digest = tensors_digest({str(n): leaf for n, leaf in enumerate(trees.leaves(sent))})
        known, rows = self._kept.pop(clients, (None, None))
        if rows is None or known != digest or anew:
            rows = compute()
        self._kept[clients] = digest, rows
        while len(self._kept) > 1 and sum(_size(kept) for _, kept in self._kept.values()) > self.most_bytes:
            self._kept.popitem(last=False)
        return rows


def _size(rows: CalibrationRows) -> int:
    return sum(tensor.nbytes for tensor in trees.leaves(rows))
