"""Prior mixture: what a client's labels are is kept out of the weights, and added to the answer as a prior.

What personalising learns under label skew is mostly which labels a client has. Here no model learns it: *rounds* are
FedAvg's with each client's log-frequencies added to the scores in training and left out otherwise (logit adjustment,
Menon et al. 2021; the generic part of Fed-RoD, Chen & Chao 2022, does the same), and the best round is chosen by that
loss. *Calibration* after the rounds makes the shared scores likelihoods, as far as ten biases and a temperature can
(Alexandari et al. 2020). A *vote* says whether specialists are better than the shared expert for clients in general.
*On the client* a stack of prior-free experts is fitted, and chosen among candidates where clients differ in more than
labels. The prior is added once, at the end: the client's own frequencies, even ones, or those estimated from a batch of
unlabelled questions (Saerens et al. 2002).
Shape suffixes: S clients of a cohort, B questions, C classes.
"""

from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Answer, LabelPriors, NoReport, Nothing, Validation
from fedmoe.algorithms.fedavg import (
    Broadcast,
    FedAvgConfig,
    TrainingReport,
    Update,
    ValidationUpdate,
    fedavg,
    validate_model,
)
from fedmoe.algorithms.label_priors.answers import ESTIMATED, prior_answers, scores_and_prior
from fedmoe.algorithms.label_priors.any_algorithm import own_prior
from fedmoe.algorithms.label_priors.calibration import CalibrationConfig
from fedmoe.algorithms.label_priors.estimate import EstimateConfig, answer, estimate_prior
from fedmoe.algorithms.label_priors.exchanges import with_calibration
from fedmoe.algorithms.label_priors.frequencies import is_near, training_offset
from fedmoe.algorithms.prior_mixture.personal import (
    CANDIDATES,
    SHARED,
    PersonalState,
    candidate_scores,
    personalize,
    shared_scores,
)
from fedmoe.algorithms.prior_mixture.vote import with_vote
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples
from fedmoe.setting_types import NonNegativeFloat, PositiveFloat
from fedmoe.streams import Streams


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PriorMixtureConfig(FedAvgConfig):
    """The defaults were chosen on Fashion-MNIST: docs/prior_mixture.md."""

    adjust: bool = True  # false: the rounds are plain FedAvg's, and all comes from what follows them
    calibration: CalibrationConfig = CalibrationConfig()
    estimate: EstimateConfig = EstimateConfig()
    pull: PositiveFloat = 100.0  # of the stack's weights to the shared expert, in validation rows
    margin: NonNegativeFloat = 2.0  # in standard errors, by which another candidate must beat the default one


def prior_mixture(config: PriorMixtureConfig, setup: AlgorithmSetup) -> Algorithm:
    plain = fedavg(config, setup)
    rounds = adjusted(plain, setup) if config.adjust else plain
    priors = LabelPriors(
        prior_free=lambda b, _client, _personal, x: shared_scores(setup, b, x),
        own=own_prior(setup.num_classes),
        estimate=lambda scores_BC, own_C: estimate_prior(scores_BC, own_C, config.estimate),
        answer=lambda b, _client, personal, x, log_prior: answer_under(setup, b, personal, x, log_prior),
    )
    calibrated = with_calibration(
        rounds, config.calibration, setup, lambda b, _client, part: model_scores(setup, b, part), config.max_weight
    )
    return with_vote(calibrated, setup)._replace(
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, _client, _personal, data, rng: personalize(
            setup, config.pull, config.margin, b, data, rng
        ),
        predict=lambda b, client, personal, x: priors.answer(b, client, personal, x, priors.own(b, client, personal)),
        priors=priors,
        answers={**prior_answers(priors, before=True), **candidate_answers(setup, priors)},
        headline=ESTIMATED,
        no_regression="its priors are frequencies of labels",
        choice=lambda personal: CANDIDATES[int(personal.choice)],
    )


def adjusted(plain: Algorithm, setup: AlgorithmSetup) -> Algorithm:
    """FedAvg with the clients' log-frequencies in its losses, those of training and that of validation."""
    (train,) = plain.round
    assert plain.validation is not None
    validate = plain.validation.exchange._replace(
        local_update=lambda b, c, data, _rng: validate_adjusted(setup, b, c, data)
    )
    return plain._replace(
        counts_labels=True,
        round=(train._replace(local_update=lambda b, c, data, rng: local_update(setup, b, c, data, rng)),),
        validation=Validation(validate, plain.validation.every),
    )


def local_update(
    setup: AlgorithmSetup, shared: Broadcast, client: Nothing, data: ClientData, rng: Streams
) -> tuple[Nothing, Update, TrainingReport]:
    offset_SC = training_offset(data.train, setup.num_classes, rng)
    fitted = setup.federated.train_classifier(
        setup.expert, shared.model, data, rng, stop_early=False, logit_offset_SC=offset_SC
    )
    return client, Update(fitted.params["model"], data.train.counts.float()), TrainingReport(fitted.loss_S)


def validate_adjusted(
    setup: AlgorithmSetup, shared: Broadcast, client: Nothing, data: ClientData
) -> tuple[Nothing, ValidationUpdate, NoReport]:
    offset_SC = training_offset(data.train, setup.num_classes)
    return validate_model(setup.expert, setup.federated, shared, client, data, offset_SC)


def model_scores(setup: AlgorithmSetup, shared: Broadcast, examples: Examples) -> Tensor:
    """(S, N, C): what is calibrated."""
    return setup.federated.per_example(lambda model, batch: setup.expert(model, batch.x), shared.model, examples)


def answer_under(
    setup: AlgorithmSetup, sent: Any, personal: PersonalState | None, x: Tensor, log_prior: Tensor
) -> Tensor:
    """By the candidate that the client chose where the frequencies are about its own, else by the shared expert.

    A client chooses on its own validation data, which says nothing of labels that it lacks; on those the shared expert
    alone has learnt.
    """
    shared_BC = shared_scores(setup, sent, x)
    if personal is None or int(personal.choice) == SHARED:
        return answer(shared_BC, log_prior)
    chosen_BC = candidate_scores(setup, CANDIDATES[int(personal.choice)], sent, personal, x)
    # Both are computed: an exported program takes any prior, and so has no branch that depends on it.
    return answer(torch.where(is_near(log_prior, personal.log_prior), chosen_BC, shared_BC), log_prior)


def candidate_answers(setup: AlgorithmSetup, priors: LabelPriors) -> dict[str, Answer]:
    """Every candidate by the rule of the headline, on the client's own data: what another choice would have given."""

    def answers_of(name: str) -> Answer:
        by_name = scores_and_prior(lambda b, _client, personal, x: candidate_scores(setup, name, b, personal, x))
        estimated = prior_answers(priors._replace(answer=by_name))[ESTIMATED]
        return estimated._replace(data=frozenset(("own",)), is_candidate=True)

    return {name: answers_of(name) for name in CANDIDATES}
