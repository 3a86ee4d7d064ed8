"""Local-global mixture (Listo Zec et al. 2020): a gate over a local model and a personal copy of the global one.

Follows Algorithm 1 there: FedAvg over opted-in data (line 4), a local model from its own random start on all local data
(line 6), then gate, local model and a *personal copy* of the global model trained together (line 7, eq. 6).
Shape suffixes: S clients of a cohort, B a batch, C classes.
"""

from typing import NamedTuple

from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.local_only import train_alone
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors
from fedmoe.models.mixture import gate_shares
from fedmoe.streams import Streams
from fedmoe.training.batch import Loss


class PersonalState(NamedTuple):
    general: Tensors  # this client's copy of w_g
    local: Tensors  # w_l^k
    gate: Tensors  # w_h^k


def local_global_mixture(config: FedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    return fedavg(config, setup)._replace(
        personal_type=PersonalState,
        frequencies="own",
        personalize=lambda b, _client, _personal, data, rng: personalize(setup, b, data, rng),
        predict=lambda b, c, personal, x: predict(setup, b, c, personal, x),
        expert_weights=lambda _b, _c, personal, x: gate_shares(setup.gate(personal.gate, x), "local", "general"),
    )


def personalize(setup: AlgorithmSetup, shared: Broadcast, data: ClientData, rng: Streams) -> PersonalState:
    local_S = train_alone(setup, data, rng)  # Algorithm 1, line 6
    gate_S = trees.stack([setup.gate.init(seed) for seed in rng.seeds("gate")])  # line 3
    start = {"general": shared.model, "local": local_S, "gate": gate_S}
    trained = setup.personal.train_mixture(start, mixture_losses(setup), data, rng)  # line 7
    return PersonalState(trained["general"], trained["local"], trained["gate"])


def mixture_losses(setup: AlgorithmSetup) -> Loss:
    """Eq. 6: for classes the negative log of h(x) f_l(x) + (1 - h(x)) f_g(x) at the label."""
    return setup.personal.mixture_loss(setup.expert, setup.gate, first="local", second="general")


def predict(
    setup: AlgorithmSetup, shared: Broadcast, _client: Nothing, personal: PersonalState | None, x: Tensor
) -> Tensor:
    """Eq. 5; before personalisation the global model alone."""
    if personal is None:
        return setup.predict(shared.model, x)
    local_BC, general_BC = (setup.predict(params, x) for params in (personal.local, personal.general))
    return setup.task.mix(setup.gate(personal.gate, x), local_BC, general_BC)
