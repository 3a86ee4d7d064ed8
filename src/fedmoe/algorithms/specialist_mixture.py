"""Specialist mixture (Listo Zec et al. 2021): a gate over a fine-tuned specialist and the frozen global model.

Follows Algorithm 1 there: FedAvg over opted-in data (lines 2-4), fine-tune a copy (lines 6-7), then train gate and
specialist on the mixture with the global model frozen (lines 8-9). Stages 2 and 3 use all local data, opted in or out:
the paper's equations 5 and 7 do, and its earlier version says so.
Shape suffixes: S clients of a cohort, N examples, B a batch, C classes.
"""

from typing import NamedTuple

from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.fine_tuned import fine_tune
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Examples, Tensors, Tree
from fedmoe.models.mixture import gate_shares
from fedmoe.streams import Streams
from fedmoe.training.batch import Loss
from fedmoe.training.classifier import predictions


class PersonalState(NamedTuple):
    specialist: Tensors  # w_s^k
    gate: Tensors  # w_h^k


def specialist_mixture(config: FedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    return fedavg(config, setup)._replace(
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, _client, _personal, data, rng: personalize(setup, b, data, rng),
        predict=lambda b, c, personal, x: predict(setup, b, c, personal, x),
        expert_weights=lambda _b, _c, personal, x: gate_shares(setup.gate(personal.gate, x), "specialist", "general"),
    )


def personalize(setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    specialist_S = fine_tune(setup, shared, data, rng).specialist  # Algorithm 1, lines 6-7
    gate_S = trees.stack([setup.gate.init(seed) for seed in rng.seeds("gate")])  # line 3
    frozen: Tree = shared.model
    if not setup.personal.settings.augment:  # else every batch has images that f_g has not seen yet
        data, frozen = data.map(lambda part: with_general_outputs(setup, shared, part)), None
    losses = mixture_losses(setup)
    start = {"specialist": specialist_S, "gate": gate_S}
    trained = setup.personal.train_mixture(start, losses, data, rng, frozen)  # line 9
    return PersonalState(trained["specialist"], trained["gate"])


def with_general_outputs(setup: AlgorithmSetup, shared: Broadcast, examples: Examples) -> Examples:
    """f_g is frozen (line 8), so its predictions on a client's data never change: compute them once."""
    outputs_SNC = setup.personal.per_example(
        lambda model, batch: predictions(setup.task, setup.expert, model, batch), shared.model, examples
    )
    return examples._replace(extra={**examples.extra, "general": outputs_SNC})


def mixture_losses(setup: AlgorithmSetup) -> Loss:
    """Eq. 7: for classes the negative log of h(x) f_s(x) + (1 - h(x)) f_g(x) at the label."""
    return setup.personal.mixture_loss(setup.expert, setup.gate, first="specialist", second="general")


def predict(
    setup: AlgorithmSetup, shared: Broadcast, _client: Nothing, personal: PersonalState | None, x: Tensor
) -> Tensor:
    """Eq. 6; before personalisation the global model alone."""
    general_BC = setup.predict(shared.model, x)
    if personal is None:
        return general_BC
    specialist_BC = setup.predict(personal.specialist, x)
    return setup.task.mix(setup.gate(personal.gate, x), specialist_BC, general_BC)
