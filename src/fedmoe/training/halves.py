"""Two halves of a client's records, fixed by record: who else is there moves nobody from one to the other.

A record's half follows from its content alone. So an opt-out, or removing a record, leaves all others where they are,
as non-interference and the sensitivity of a privacy mechanism need; the halves are equal in the mean only.
Shape suffixes: S clients of a cohort, N records, D numbers of a record.
"""

import math

import torch
from torch import Tensor

from fedmoe.core_types import Examples
from fedmoe.streams import torch_stream

MIX = -7046029254386353131  # an odd 64-bit number: multiplying by it lets every bit reach the highest


def halves(examples: Examples) -> tuple[Examples, Examples]:
    """Of each client of a cohort: the records for models, and those for the gate."""
    clients, most = examples.y.shape[:2]
    real_SN = torch.arange(most) < examples.counts[:, None]
    records = Examples(examples.x.flatten(0, 1), examples.y.flatten(0, 1), examples.counts.sum(), {})
    first_SN = in_first_half(records).view(clients, most)
    return _chosen(examples, first_SN & real_SN), _chosen(examples, ~first_SN & real_SN)


def _chosen(examples: Examples, wanted_SN: Tensor) -> Examples:
    """These rows of each client in their order, padded at the end with zeros."""
    counts_S = wanted_SN.sum(1)
    order_SN = torch.argsort((~wanted_SN).to(torch.uint8), dim=1, stable=True)[:, : int(counts_S.max())]
    real_SN = torch.arange(order_SN.shape[1]) < counts_S[:, None]
    rows = (order_SN + wanted_SN.shape[1] * torch.arange(len(wanted_SN))[:, None]).flatten()

    def of(leaf: Tensor) -> Tensor:
        kept = leaf.flatten(0, 1).index_select(0, rows)
        kept[~real_SN.flatten()] = 0
        return kept.view(*order_SN.shape, *leaf.shape[2:])

    extra = {name: of(leaf) for name, leaf in examples.extra.items()}
    return Examples(of(examples.x), of(examples.y), counts_S, extra)


def in_first_half(records: Examples) -> Tensor:
    """(N,) bool: the highest bit of a hash of x and y."""
    x_ND, y_ND = (_whole_numbers(part) for part in (records.x, records.y))
    values_ND = torch.cat([x_ND, y_ND], dim=1)
    weights_D = torch.randint(1, 2**62, (values_ND.shape[1],), generator=torch_stream("halves")) * 2 + 1
    hashed_N = (values_ND * weights_D).sum(1)  # modulo 2^64
    hashed_N = (hashed_N ^ (hashed_N >> 32)) * MIX
    return (hashed_N ^ (hashed_N >> 29)) * MIX >= 0


def _whole_numbers(part_N: Tensor) -> Tensor:
    """(N, D) int64: the bits of floats, where 0.0 and -0.0 are one, and whole numbers as they are."""
    flat = part_N.reshape(len(part_N), math.prod(part_N.shape[1:])).contiguous()
    return (flat + 0.0).view(torch.int32).to(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
