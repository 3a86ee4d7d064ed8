"""What a client does after the rounds, on all of its records: experts of its own, all prior-free, and a choice.

Every expert is trained with the client's log-frequencies added to its scores, and answers without them; the prior is
added once, at the end. While candidates compete, what is trained or fitted sees the first half of the validation data
alone, and the second half chooses. The expert that won is then trained once more, and all of them say when to stop.
Shape suffixes: S clients of a cohort, N examples, B a batch, K candidates, C classes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.label_priors.calibration import calibrated
from fedmoe.algorithms.label_priors.estimate import answer, neutral_scores
from fedmoe.algorithms.label_priors.frequencies import (
    label_counts,
    log_frequencies,
    shrunk_frequencies,
    training_offset,
)
from fedmoe.algorithms.prior_mixture.stack import choose, fit_weights, halves, stacked
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples, Tensors
from fedmoe.models.mixture import log_mix, negative_log_likelihood
from fedmoe.streams import Streams
from fedmoe.training.classifier import LOGIT_OFFSET, MixtureLoss
from fedmoe.training.inference import clients_of

CANDIDATES = ("shared", "specialist", "mixture", "stack", "local")
SHARED, SPECIALIST = CANDIDATES.index("shared"), CANDIDATES.index("specialist")
GENERAL = "general"  # the frozen shared expert's log-probabilities beside the examples


class Mixture(NamedTuple):
    specialist: Tensors
    gate: Tensors


class PersonalState(NamedTuple):
    specialist: Tensors
    local: Tensors
    mixture: Mixture
    weights: Tensor  # (3,) of the stack: shared, specialist, local
    choice: Tensor  # which of CANDIDATES
    held: Tensor  # (C,) log-frequencies of the training records, under which the mixture was trained
    log_prior: Tensor  # (C,) log-frequencies of all records, shrunk


def personalize(
    setup: AlgorithmSetup, pull: float, margin: float, sent: Any, data: ClientData, rng: Streams
) -> PersonalState:
    fitting, choosing = halves(data.validation, rng)
    to_fit = ClientData(data.train, fitting)
    offset_SC = training_offset(data.train, setup.num_classes)
    specialist_S = fine_tune(setup, sent, to_fit, offset_SC, rng)
    counts_SC = label_counts(data.train, setup.num_classes)
    final_S = PersonalState(
        specialist=specialist_S,
        local=train_alone(setup, sent, to_fit, offset_SC, rng),
        mixture=train_mixture(setup, sent, specialist_S, to_fit, offset_SC, rng),
        weights=torch.zeros(len(counts_SC), 3),
        choice=torch.zeros(len(counts_SC), dtype=torch.int64),
        held=log_frequencies(counts_SC),
        log_prior=shrunk_frequencies(counts_SC + label_counts(data.validation, setup.num_classes)),
    )
    rows = zip(clients_of(fitting), clients_of(choosing), default_choices(sent, to_fit), strict=True)
    decided = [
        decide(setup, trees.pick(sent, s), trees.pick(final_S, s), *parts, pull, margin) for s, parts in enumerate(rows)
    ]
    decided_S = final_S._replace(
        weights=torch.stack([weights for weights, _ in decided]), choice=torch.stack([chosen for _, chosen in decided])
    )
    return train_chosen(setup, sent, decided_S, data, offset_SC, rng)


def train_chosen(
    setup: AlgorithmSetup, sent: Any, decided_S: PersonalState, data: ClientData, offset_SC: Tensor, rng: Streams
) -> PersonalState:
    """The experts that clients chose, trained as before but for the rows that say when to stop: all validation rows.

    Few rows stop a training too early or too late. The stack stays: its weights were fitted to the experts as they are.
    """
    for name, train in TRAINED.items():
        places = (decided_S.choice == CANDIDATES.index(name)).nonzero()[:, 0]
        if len(places):
            theirs = data.map(partial(trees.take, places=places))
            streams = rng._replace(clients=tuple(rng.clients[place] for place in places.tolist()))
            trained_P = train(setup, trees.take(sent, places), theirs, offset_SC[places], streams)
            decided_S = decided_S._replace(**{name: trees.put(getattr(decided_S, name), places, trained_P)})
    return decided_S


def default_choices(sent: Any, to_fit: ClientData) -> list[int]:
    """What all clients voted for; the shared expert where nothing trained a specialist, or told it when to stop."""
    has_specialist_S = (to_fit.train.counts > 0) & (to_fit.validation.counts > 0)
    choices: list[int] = torch.where(has_specialist_S, sent.default, SHARED).tolist()
    return choices


def fine_tune(setup: AlgorithmSetup, sent: Any, data: ClientData, offset_SC: Tensor, rng: Streams) -> Tensors:
    here = rng._replace(scope="specialist")
    fitted = setup.personal.train_classifier(
        setup.expert, sent.shared.model, data, here, stop_early=True, logit_offset_SC=offset_SC
    )
    specialist_S: Tensors = fitted.params["model"]
    return specialist_S


def train_alone(setup: AlgorithmSetup, _sent: Any, data: ClientData, offset_SC: Tensor, rng: Streams) -> Tensors:
    here = rng._replace(scope="local")
    start_S = trees.stack([setup.expert.init(seed) for seed in here.seeds("init")])
    fitted = setup.local.train_classifier(setup.expert, start_S, data, here, stop_early=True, logit_offset_SC=offset_SC)
    local_S: Tensors = fitted.params["model"]
    return local_S


def train_mixture(
    setup: AlgorithmSetup, sent: Any, specialist_S: Tensors, data: ClientData, offset_SC: Tensor, rng: Streams
) -> Mixture:
    """The specialist mixture (Listo Zec et al. 2021) of experts that answer under the client's frequencies.

    The shared expert is frozen, so its answers are computed once, of examples that are not augmented.
    """
    trainer = setup.personal.with_settings(augment=None)
    gate_S = trees.stack([setup.gate.init(seed) for seed in rng.seeds("gate")])

    def with_general(examples: Examples) -> Examples:
        scores_SNC = trainer.per_example(lambda tree, batch: shared_scores(setup, tree, batch.x), sent, examples)
        general_SNC = answer(scores_SNC, offset_SC[:, None])
        return examples._replace(extra={**examples.extra, GENERAL: general_SNC})

    loss = MixtureLoss(setup.expert, setup.gate, first="specialist", second=GENERAL)
    start = {"specialist": specialist_S, "gate": gate_S}
    return Mixture(**trainer.train_mixture(start, loss, data.map(with_general), rng, {LOGIT_OFFSET: offset_SC}))


# What a client can be left with that was trained, by the name of the candidate and of the field that holds it.
TRAINED: Mapping[str, Callable[[AlgorithmSetup, Any, ClientData, Tensor, Streams], Any]] = {
    "specialist": fine_tune,
    "local": train_alone,
    "mixture": lambda setup, sent, data, offset_SC, rng: train_mixture(
        setup, sent, fine_tune(setup, sent, data, offset_SC, rng), data, offset_SC, rng
    ),
}


def shared_scores(setup: AlgorithmSetup, sent: Any, x: Tensor) -> Tensor:
    return calibrated(setup.expert(sent.shared.model, x), sent.calibration)


def mixture_scores(setup: AlgorithmSetup, sent: Any, personal: PersonalState, x: Tensor) -> Tensor:
    """The mixture's answer under the frequencies that it was trained with, less these."""
    general_BC = answer(shared_scores(setup, sent, x), personal.held)
    specialist_BC = answer(setup.expert(personal.mixture.specialist, x), personal.held)
    return neutral_scores(log_mix(setup.gate(personal.mixture.gate, x), specialist_BC, general_BC), personal.held)


def expert_scores(setup: AlgorithmSetup, sent: Any, personal: PersonalState, x: Tensor) -> Tensor:
    """(3, B, C): shared, specialist, local."""
    own = [setup.expert(model, x) for model in (personal.specialist, personal.local)]
    return torch.stack([shared_scores(setup, sent, x), *own])


def candidate_scores(setup: AlgorithmSetup, name: str, sent: Any, personal: PersonalState, x: Tensor) -> Tensor:
    """(B, C) prior-free; only what the candidate is made of is computed."""
    if name == "shared":
        return shared_scores(setup, sent, x)
    if name == "mixture":
        return mixture_scores(setup, sent, personal, x)
    if name == "stack":
        return stacked(expert_scores(setup, sent, personal, x), personal.weights)
    return setup.expert(personal.specialist if name == "specialist" else personal.local, x)


def decide(
    setup: AlgorithmSetup,
    sent: Any,
    personal: PersonalState,
    fitting: Examples,
    choosing: Examples,
    default: int,
    pull: float,
    margin: float,
) -> tuple[Tensor, Tensor]:
    """One client's weights of the stack, from the first half, and its choice, on the second.

    Both under the frequencies of the training records: the validation labels are counted in the stored prior. It leaves
    the default only by the margin.
    """
    with torch.no_grad():
        weights_K = fit_weights(expert_scores(setup, sent, personal, fitting.x), personal.held, fitting.y, pull)
        personal = personal._replace(weights=weights_K)
        losses_KN = torch.stack(
            [
                negative_log_likelihood(
                    answer(candidate_scores(setup, name, sent, personal, choosing.x), personal.held), choosing.y
                )
                for name in CANDIDATES
            ]
        )
    return weights_K, torch.tensor(choose(losses_KN, margin, default))
