"""What [privacy] comes to in a run: the noise solved for, how long a client may take part, what is guaranteed."""

import math
from typing import Any, NamedTuple

from fedmoe import accounting
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.config import ExperimentConfig
from fedmoe.errors import ConfigError
from fedmoe.noise import NoiseSource
from fedmoe.privacy_choice import PrivacyConfig
from fedmoe.private_steps import Charge, Mechanism

RELATION = "add or remove one record"


class RunPrivacy(NamedTuple):
    mechanism: Mechanism
    source: NoiseSource
    delta: float
    steps_per_round: int
    max_rounds: int | None  # in which a client may take part; None: all
    no_guarantee: str | None  # why there is none

    @property
    def max_steps(self) -> int | None:
        return None if self.max_rounds is None else self.max_rounds * self.steps_per_round

    def facts(self) -> dict[str, Any]:
        """What the ledger and the manifest say besides."""
        return {
            "delta": self.delta,
            "noise_source": self.source,
            "relation": RELATION,
            "no_guarantee": self.no_guarantee,
            **self.mechanism._asdict(),
        }


def resolve_privacy(config: ExperimentConfig, algorithm: Algorithm) -> RunPrivacy | None:
    """Solve for what is asked; refuse what would leak or cannot be reached."""
    chosen = config.privacy
    if chosen is None:
        return None
    _require_sound(config, algorithm)
    federated = config.training.federated
    batch_size = chosen.expected_batch_size or float(federated.batch_size)
    chosen.require_small_delta(batch_size)
    blank = Mechanism(0.0, chosen.sampling_rate, batch_size, chosen.clip_norm, chosen.clipping, chosen.microbatch_size)
    per_round = federated.steps if federated.steps is not None else federated.epochs * blank.steps_per_epoch
    counts_labels = algorithm.counts_labels
    planned = per_round * config.schedule.rounds
    sigma = chosen.noise_multiplier
    if sigma is None:
        assert chosen.target_epsilon is not None
        sigma = accounting.solve_noise_multiplier(
            chosen.target_epsilon, chosen.delta, chosen.sampling_rate, planned, counts_labels
        )
    mechanism = blank._replace(noise_multiplier=sigma)
    reason = algorithm.no_guarantee or (None if sigma else "privacy.noise_multiplier is 0: there is no noise")
    max_rounds = _max_rounds(chosen, mechanism, per_round, planned, counts_labels) if reason is None else None
    return RunPrivacy(mechanism, chosen.noise_source, chosen.delta, per_round, max_rounds, reason)


def _max_rounds(
    chosen: PrivacyConfig, mechanism: Mechanism, per_round: int, planned: int, counts_labels: bool
) -> int | None:
    if chosen.stop_at_epsilon is None:
        return None
    sigma = mechanism.noise_multiplier
    before = [Charge("label_counts", 1, 1.0, sigma, 1.0)] if counts_labels else []
    step = Charge("gradient", 1, mechanism.sampling_rate, sigma, 1.0)
    steps = accounting.steps_within(chosen.stop_at_epsilon, step, before, chosen.delta, planned)
    if steps < per_round:
        raise ConfigError(
            f"privacy.stop_at_epsilon={chosen.stop_at_epsilon:g} ends before the first round of {per_round} steps. "
            "Take more noise, fewer steps in a round, or a larger budget."
        )
    return math.floor(steps / per_round)


def _require_sound(config: ExperimentConfig, algorithm: Algorithm) -> None:
    name = config.algorithm.name
    if algorithm.no_guarantee and not algorithm.adds_noise_anyway:
        raise ConfigError(
            f"{name} cannot be trained with differential privacy: {algorithm.no_guarantee}. Leave [privacy] away, or "
            "choose another algorithm, such as fedavg or specialist_mixture."
        )
    refused = {
        "schedule.release": (config.schedule.release, "clients would release private parts, which have no noise"),
        "schedule.stop_at": (config.schedule.stop_at, "rounds would end by validation scores, which have no noise"),
        "schedule.patience": (config.schedule.patience, "rounds would end by validation losses, which have no noise"),
        "training.class_weights": (
            config.training.class_weights == "balanced",
            "one record would change the weights of all others",
        ),
    }
    for key, (is_set, why) in refused.items():
        if is_set:
            raise ConfigError(f"[privacy] does not go with {key}: {why}. Leave one of them away.")
