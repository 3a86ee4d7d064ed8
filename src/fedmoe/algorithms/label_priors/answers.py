"""One model's answers under three priors: the client's own label frequencies, even ones, and those of the questions."""

from typing import Any

from torch import Tensor

from fedmoe.algorithms.algorithm import Answer, AnswerUnder, LabelPriors, PriorFree
from fedmoe.algorithms.label_priors.estimate import answer
from fedmoe.algorithms.label_priors.frequencies import uniform

OWN, BALANCED, ESTIMATED = "own prior", "balanced prior", "estimated prior"
BATCH_SIZE = 100  # of unlabelled questions, in scoring


def scores_and_prior(prior_free: PriorFree) -> AnswerUnder:
    """The answer of one model: its prior-free scores with the prior added."""
    return lambda sent, client, personal, x, log_prior: answer(prior_free(sent, client, personal, x), log_prior)


def prior_answers(priors: LabelPriors, *, before: bool = False) -> dict[str, Answer]:
    """By name. The first two are told the prior; `before`: the estimate is scored before personalisation, too."""

    def own(sent: Any, client: Any, personal: Any, x: Tensor) -> Tensor:
        return priors.answer(sent, client, personal, x, priors.own(sent, client, personal))

    def balanced(sent: Any, client: Any, personal: Any, x: Tensor) -> Tensor:
        return priors.answer(sent, client, personal, x, uniform(len(priors.own(sent, client, personal))))

    def estimated(sent: Any, client: Any, personal: Any, x: Tensor) -> Tensor:
        scores_BC = priors.prior_free(sent, client, personal, x)
        log_prior_C = priors.estimate(scores_BC, priors.own(sent, client, personal))
        return priors.answer(sent, client, personal, x, log_prior_C)

    after = frozenset(("after",))
    return {
        OWN: Answer(own, models=after),
        BALANCED: Answer(balanced, models=after),
        ESTIMATED: Answer(estimated, BATCH_SIZE, after | ({"before"} if before else frozenset())),
    }
