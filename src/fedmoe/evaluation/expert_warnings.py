"""Experts that no longer take part: said once, in the round in which it becomes true.

A warning follows from the loads of past rounds alone, so a resumed run says the same.
"""

from collections.abc import Sequence

WINDOW = 5  # rounds: one round's sample of clients may well not need an expert
DEAD = 0.05  # of its even share 1/K
COLLAPSED = 0.95  # of all work


def expert_warnings(loads: Sequence[Sequence[float]]) -> list[str]:
    """`loads`: each expert's share of the work in every round so far.

    >>> expert_warnings([[1.0, 0.0]] * 5)
    ['expert 0 did 100% of the work of the last 5 rounds: the mixture has collapsed into one model']
    >>> expert_warnings([[1.0, 0.0]] * 6)
    []
    """
    now, before = (_faults(part) for part in (loads[-WINDOW:], loads[-WINDOW - 1 : -1]))
    return [words for what, words in now.items() if what not in before]


def choice_warnings(choices: Sequence[Sequence[float]]) -> list[str]:
    """`choices`: of the clients that chose experts in every round so far, the share that likes each expert best.

    >>> choice_warnings([[0.0, 1.0]] * 5)
    ['all clients of the last 5 rounds like expert 1 best: the router has collapsed']
    >>> choice_warnings([[0.0, 1.0]] * 6)
    []
    """
    now, before = (_only_choice(part) for part in (choices[-WINDOW:], choices[-WINDOW - 1 : -1]))
    if now is None or now == before:
        return []
    return [f"all clients of the last {WINDOW} rounds like expert {now} best: the router has collapsed"]


def _only_choice(choices: Sequence[Sequence[float]]) -> int | None:
    """The expert that everybody likes best; None while there is too little to judge by, or only one expert."""
    if len(choices) < WINDOW or len(choices[0]) < 2:
        return None
    return next((expert for expert, shares in enumerate(zip(*choices, strict=True)) if min(shares) == 1), None)


def _faults(loads: Sequence[Sequence[float]]) -> dict[str, str]:
    """By what is wrong; none while there is too little to judge by, or only one expert."""
    if len(loads) < WINDOW or len(loads[0]) < 2:
        return {}
    by_expert = list(zip(*loads, strict=True))
    for expert, shares in enumerate(by_expert):
        if min(shares) >= COLLAPSED:
            mean = sum(shares) / len(shares)
            done = f"expert {expert} did {mean:.0%} of the work of the last {WINDOW} rounds"
            return {"collapse": f"{done}: the mixture has collapsed into one model"}
    floor = DEAD / len(by_expert)
    dead = [expert for expert, shares in enumerate(by_expert) if max(shares) < floor]
    return {
        f"dead {expert}": f"expert {expert} did less than {floor:.1%} of the work in each of the last {WINDOW} rounds: "
        "it is dead, or nearly so"
        for expert in dead
    }
