"""A lower bound on epsilon from one run with many canaries (Steinke, Nasr and Jagielski 2023).

Each of m records was put in or left out by a coin; an auditor guesses r of the coins and is right v times. Under
(epsilon, delta) privacy few guesses can be right: where that is too unlikely, epsilon must be larger. Needs no tensors.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STEPS = 40  # of a bisection


def p_value(num_canaries: int, num_guesses: int, num_right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, were the run (epsilon, delta) private: their Theorem 5.2."""
    from scipy.stats import binom  # here, because its import takes a second

    share = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(num_right - 1, num_guesses, share))
    below = np.cumsum(binom.pmf(num_right - np.arange(1, num_right + 1), num_guesses, share))
    worst = float(np.max(below / np.arange(1, num_right + 1), initial=0.0))
    return min(1.0, tail + worst * 2 * num_canaries * delta)


def lower_bound(num_canaries: int, num_guesses: int, num_right: int, delta: float, confidence: float) -> float:
    """The largest epsilon that is refuted with this confidence; 0 where none is."""

    def refuted(epsilon: float) -> bool:
        return p_value(num_canaries, num_guesses, num_right, epsilon, delta) < 1 - confidence

    if not num_guesses or not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def numbers_of_guesses(num_canaries: int) -> list[int]:
    """Few sure guesses or many doubtful ones: each is tried, and pays for it in confidence."""
    return sorted({max(2, num_canaries // share // 2 * 2) for share in (1, 2, 4, 8, 16, 32)})


def best_bound(
    scores_M: NDArray[np.float64], included_M: NDArray[np.bool_], delta: float, confidence: float
) -> tuple[float, int, int]:
    """(epsilon, guesses, right ones): canaries with the highest scores are guessed in, those with the lowest out."""
    sizes = numbers_of_guesses(len(scores_M))
    each = 1 - (1 - confidence) / len(sizes)
    order = np.argsort(scores_M, kind="stable")
    found = []
    for size in sizes:
        out, inside = order[: size // 2], order[len(order) - size // 2 :]
        right = int((~included_M[out]).sum() + included_M[inside].sum())
        found.append((lower_bound(len(scores_M), size, right, delta, each), size, right))
    return max(found)


def largest_bound(num_canaries: int, delta: float, confidence: float) -> float:
    """What this many canaries could prove at most: were every guess right."""
    sizes = numbers_of_guesses(num_canaries)
    each = 1 - (1 - confidence) / len(sizes)
    return max(_bounds_if_all_right(num_canaries, sizes, delta, each))


def _bounds_if_all_right(num_canaries: int, sizes: Sequence[int], delta: float, confidence: float) -> list[float]:
    return [lower_bound(num_canaries, size, size, delta, confidence) for size in sizes]
