"""How much privacy a number of noised steps costs: epsilon at a delta, for adding or removing one record.

The figure is dp-accounting's privacy loss distribution (PLD), the cross-check Opacus's Rényi accountant (RDP), which is
never below it. Gaussian DP, which reports less than the truth, is not offered.
"""

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fedmoe.errors import ConfigError
from fedmoe.private_steps import Charge

HOW_TO_INSTALL = "pip install 'fedmoe[privacy]'"
MOST_NOISE = 1000.0  # beyond it nothing is left to learn from
TOLERANCE = 1e-3  # of a solved noise multiplier
LARGE = 50.0  # an epsilon that promises next to nothing: RDP's bound will do, where PLD would take gigabytes


def epsilon(charges: Sequence[Charge], delta: float) -> float:
    """Of all charges together by PLD; infinite where a step had no noise."""
    bound = rdp_epsilon(charges, delta)
    return bound if bound > LARGE else _pld_epsilon(_merged(charges), delta)


def rdp_epsilon(charges: Sequence[Charge], delta: float) -> float:
    """The same by Opacus's Rényi accountant."""
    merged = _merged(charges)
    if any(not charge.noise_multiplier for charge in merged):
        return math.inf
    if not merged:
        return 0.0
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise ConfigError(f"the Rényi accountant needs Opacus. Install it: {HOW_TO_INSTALL}.") from error
    accountant: Any = RDPAccountant()
    accountant.history = [(charge.noise_multiplier, charge.sampling_rate, charge.steps) for charge in merged]
    with warnings.catch_warnings():  # that other orders might give a smaller bound: it is a cross-check
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def steps_within(budget: float, mechanism_charge: Charge, before: Sequence[Charge], delta: float, most: int) -> int:
    """How many more steps such as this one, at most `most`, keep epsilon within the budget."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if epsilon([*before, mechanism_charge._replace(steps=middle)], delta) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache(maxsize=64)
def solve_noise_multiplier(target: float, delta: float, sampling_rate: float, steps: int, label_counts: bool) -> float:
    """The least noise multiplier, to 0.1%, with which so many steps keep epsilon within the target."""

    def spent(sigma: float) -> float:
        charges = [Charge("gradient", steps, sampling_rate, sigma, 1.0)]
        return epsilon([*charges, *([Charge("label_counts", 1, 1.0, sigma, 1.0)] if label_counts else [])], delta)

    low, high = 0.0, 1.0
    while spent(high) > target:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise ConfigError(
                f"privacy.target_epsilon={target:g} is out of reach: {steps} steps at sampling rate {sampling_rate:g} "
                f"cost more even with a noise multiplier of {MOST_NOISE:g}. Take fewer rounds or steps, a lower "
                "sampling rate, or a larger epsilon."
            )
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _merged(charges: Sequence[Charge]) -> tuple[Charge, ...]:
    """Like with like; the sensitivity is in the noise multiplier already. Label counts are charged once."""
    steps: dict[Charge, int] = {}
    for charge in charges:
        alike = charge._replace(steps=1, sensitivity=1.0)
        steps[alike] = 1 if charge.kind == "label_counts" else steps.get(alike, 0) + charge.steps
    return tuple(sorted(charge._replace(steps=count) for charge, count in steps.items() if count))


@lru_cache(maxsize=512)
def _pld_epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    if not charges:
        return 0.0
    try:
        from dp_accounting import dp_event
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise ConfigError(f"the privacy accountant needs dp-accounting. Install it: {HOW_TO_INSTALL}.") from error
    accountant = PLDAccountant()  # add or remove one record
    for charge in charges:
        step: Any = dp_event.GaussianDpEvent(charge.noise_multiplier)
        if charge.sampling_rate < 1:
            step = dp_event.PoissonSampledDpEvent(charge.sampling_rate, step)
        accountant.compose(step, charge.steps)
    return float(accountant.get_epsilon(delta))
