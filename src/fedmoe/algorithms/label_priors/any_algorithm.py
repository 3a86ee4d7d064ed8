"""The same calibration and the same priors for any algorithm that says which label frequencies its answers hold.

What holds those of everybody's data, FedAvg's model, is calibrated by all clients together, after the rounds: the
shared biases take them out. What holds a client's own, a personal model, has them subtracted, and is calibrated by its
client alone on its validation data: nobody else has that model, and nothing of it may be sent. Neither changes what the
algorithm itself learns and answers.
Shape suffixes: S clients of a cohort, N examples, B questions, C classes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Answer, Exchange, LabelPriors, OwnPrior
from fedmoe.algorithms.label_priors.answers import prior_answers, scores_and_prior
from fedmoe.algorithms.label_priors.calibration import Calibration, CalibrationConfig, calibrated, fit_alone, identity
from fedmoe.algorithms.label_priors.estimate import EstimateConfig, estimate_prior, neutral_scores
from fedmoe.algorithms.label_priors.exchanges import with_calibration
from fedmoe.algorithms.label_priors.frequencies import label_counts, log_frequencies, shrunk_frequencies, uniform
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples, Tensors, Tree
from fedmoe.errors import ConfigError
from fedmoe.streams import Streams
from fedmoe.training.inference import clients_of
from fedmoe.trees import record_type


class OwnFrequencies(NamedTuple):
    """What a client adds to a shared model."""

    log_prior: Tensor  # (C,) of all its records


def with_priors(algorithm: Algorithm, setup: AlgorithmSetup, name: str) -> Algorithm:
    """The algorithm with answers under own, balanced and estimated frequencies beside its own one."""
    if not setup.num_classes:
        raise ConfigError(
            "evaluation.priors is about frequencies of labels, and these data are a regression. Leave it away."
        )
    if algorithm.priors is not None:
        return algorithm
    if algorithm.frequencies == "pool" and algorithm.personalize is None:
        return of_shared_model(algorithm, setup)
    if algorithm.frequencies == "own" and algorithm.personalize is not None:
        return of_personal_model(algorithm, setup)
    raise ConfigError(
        f"evaluation.priors is on, but {name} does not say which label frequencies its answers hold. Set `frequencies` "
        "of its Algorithm to 'pool' or 'own', or leave evaluation.priors away."
    )


def _estimate(scores_BC: Tensor, own_C: Tensor) -> Tensor:
    return estimate_prior(scores_BC, own_C, EstimateConfig())


def of_shared_model(algorithm: Algorithm, setup: AlgorithmSetup) -> Algorithm:
    def answer(sent: Any, client: Tree, x: Tensor) -> Tensor:
        return algorithm.predict(sent.shared, client, None, x)

    def scores(shared_S: Tree, client_S: Tree, examples: Examples) -> Tensor:
        return setup.federated.per_example(
            lambda tree, batch: algorithm.predict(tree[0], tree[1], None, batch.x), (shared_S, client_S), examples
        )

    def prior_free(sent: Any, client: Tree, _personal: Tree, x: Tensor) -> Tensor:
        return calibrated(answer(sent, client, x), sent.calibration)

    priors = LabelPriors(prior_free, own_prior(setup.num_classes), _estimate, scores_and_prior(prior_free))
    weights, measure = algorithm.expert_weights, algorithm.measure
    return with_calibration(algorithm, CalibrationConfig(), setup, scores, None)._replace(
        expert_weights=weights and (lambda sent, client, _personal, x: weights(sent.shared, client, None, x)),
        measure=measure and (lambda sent, client, _personal, rows: measure(sent.shared, client, None, rows)),
        personal_type=OwnFrequencies,
        personalize=lambda _sent, _client, _personal, data, _rng: OwnFrequencies(
            all_frequencies(data, setup.num_classes)
        ),
        predict=lambda sent, client, _personal, x: answer(sent, client, x),
        priors=priors,
        # As published it has no second model, whose scores would be the same.
        answers={
            "": Answer(lambda sent, client, _personal, x: answer(sent, client, x), models=frozenset(("before",))),
            **prior_answers(priors),
        },
    )


class PersonalAnswers:
    """The functions of an algorithm whose personal state is held beside what its client adds to it."""

    def __init__(self, algorithm: Algorithm, setup: AlgorithmSetup) -> None:
        self.algorithm, self.num_classes = algorithm, setup.num_classes
        fields = {"own": algorithm.personal_type, "held": Tensor, "log_prior": Tensor, "calibration": Calibration}
        self.state_type = record_type("WithFrequencies", fields)

    def init_personal(self, *start: Any) -> Any:
        assert self.algorithm.init_personal is not None
        even = uniform(self.num_classes)
        return self.state_type(self.algorithm.init_personal(*start), even, even, identity(self.num_classes))

    def in_private(self, exchange: Exchange) -> Exchange:
        """The same exchange, whose private work sees the algorithm's own part of the state."""
        work = exchange.private_update
        if work is None:
            return exchange
        return exchange._replace(
            private_update=lambda sent, client, personal, data, rng: personal._replace(
                own=work(sent, client, personal.own, data, rng)
            )
        )

    def personalize(self, sent_S: Tree, client_S: Tree, personal_S: Any, data: ClientData, rng: Streams) -> list[Any]:
        """What the algorithm does, then each client's frequencies and calibration."""
        assert self.algorithm.personalize is not None
        before_S = None if personal_S is None else personal_S.own
        own_S = self.algorithm.personalize(sent_S, client_S, before_S, data, rng)
        owns = own_S if isinstance(own_S, list) else trees.unstack(own_S, len(data.train.counts))
        held_SC = log_frequencies(label_counts(data.train, self.num_classes))
        prior_SC, plain = all_frequencies(data, self.num_classes), identity(self.num_classes)
        states = [self.state_type(own, held_SC[s], prior_SC[s], plain) for s, own in enumerate(owns)]
        return [
            self.fitted(trees.pick(sent_S, s), trees.pick(client_S, s), states[s], validation)
            for s, validation in enumerate(clients_of(data.validation))
        ]

    def fitted(self, sent: Tree, client: Tree, state: Any, validation: Examples) -> Any:
        """The state with a calibration of its own; as it is without validation rows."""
        if not len(validation.y):
            return state
        with torch.no_grad():
            scores_NC = neutral_scores(self.predict(sent, client, state, validation.x), state.held)
        return state._replace(calibration=fit_alone(scores_NC, state.held, validation.y, CalibrationConfig()))

    def predict(self, sent: Tree, client: Tree, personal: Any, x: Tensor) -> Tensor:
        return self.algorithm.predict(sent, client, None if personal is None else personal.own, x)

    def prior_free(self, sent: Tree, client: Tree, personal: Any, x: Tensor) -> Tensor:
        """Before personalisation there is nothing to subtract."""
        log_probs_BC = self.predict(sent, client, personal, x)
        if personal is None:
            return log_probs_BC
        return calibrated(neutral_scores(log_probs_BC, personal.held), personal.calibration)

    def measure(self, sent: Tree, client: Tree, personal: Any, rows: Examples) -> Mapping[str, float | Tensor]:
        assert self.algorithm.measure is not None
        return self.algorithm.measure(sent, client, None if personal is None else personal.own, rows)

    def expert_weights(self, sent: Tree, client: Tree, personal: Any, x: Tensor) -> Tensors:
        assert self.algorithm.expert_weights is not None
        return self.algorithm.expert_weights(sent, client, personal.own, x)


def of_personal_model(algorithm: Algorithm, setup: AlgorithmSetup) -> Algorithm:
    answers = PersonalAnswers(algorithm, setup)
    own, scored = own_prior(setup.num_classes), scores_and_prior(answers.prior_free)
    priors = LabelPriors(answers.prior_free, own, _estimate, scored)
    return algorithm._replace(
        round=tuple(map(answers.in_private, algorithm.round)),
        after_rounds=tuple(map(answers.in_private, algorithm.after_rounds)),
        delivery=tuple(map(answers.in_private, algorithm.delivery)),
        personal_type=answers.state_type,
        init_personal=algorithm.init_personal and answers.init_personal,
        personalize=answers.personalize,
        predict=answers.predict,
        expert_weights=algorithm.expert_weights and answers.expert_weights,
        measure=algorithm.measure and answers.measure,
        priors=priors,
        answers={"": Answer(answers.predict), **prior_answers(priors)},
    )


def own_prior(num_classes: int) -> OwnPrior:
    """The stored one; uniform before personalisation."""
    return lambda _sent, _client, personal: uniform(num_classes) if personal is None else personal.log_prior


def all_frequencies(data: ClientData, num_classes: int) -> Tensor:
    """(S, C): of training and validation records, opted in or out, shrunk."""
    return shrunk_frequencies(label_counts(data.train, num_classes) + label_counts(data.validation, num_classes))
