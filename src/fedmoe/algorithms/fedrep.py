"""FedRep (Collins et al. 2021) and FedPer (Arivazhagan et al. 2019): a shared representation, and a head of one's own.

The last layers, the head, never leave their client; the rest, the body, is averaged. FedRep trains them in turn (its
Algorithm 1): many epochs of the head with the body as received, then the body with the new head. FedPer trains both
together. In the rounds both see opted-in records only, since what is sent depends on the head. After the rounds a
client goes on with its head alone, on all of its records, as `training.personal` says: so does the paper for a new
client.
A client that never trained starts from the head of the initial model.
"""

from collections.abc import Collection

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.biased_fedavg import mean_of_clients
from fedmoe.algorithms.fedavg import TrainingReport, Update
from fedmoe.algorithms.partial_personalization import (
    Broadcast,
    ClientState,
    PartialPersonalizationConfig,
    part,
    partial_personalization,
    rest,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError
from fedmoe.models.layers import layers_of
from fedmoe.models.network import Network
from fedmoe.setting_types import PositiveInt
from fedmoe.streams import Streams


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FedRepConfig(PartialPersonalizationConfig):
    """FedRep's experiments take ten epochs of the head in every round, then one or five of the body (Section 5).

    The head is the last layer there and in FedPer. The body, and FedPer, train as `training.federated` says.
    """

    private_layers: PositiveInt = 1  # how many of the last layers with weights; a residual block is one
    joint: bool = False  # train head and body together: FedPer
    head_epochs: PositiveInt = 10  # before the body's, unless `joint`


def fedrep(config: FedRepConfig, setup: AlgorithmSetup) -> Algorithm:
    names = head_names(setup.expert, config.private_layers)
    algorithm = partial_personalization(config, setup, names, mean_of_clients)._replace(release=None)
    if config.joint:
        return algorithm
    (train,) = algorithm.round
    in_turn = train._replace(
        local_update=lambda b, c, data, rng: head_then_body(setup, names, config.head_epochs, b, c, data, rng)
    )
    return algorithm._replace(
        round=(in_turn,),
        no_guarantee="head and body are trained in turn, so a round costs twice; set algorithm.joint",
    )


def head_names(network: Network, private_layers: int) -> set[str]:
    layers = layers_of(network)
    if private_layers >= len(layers):
        raise ConfigError(
            f"algorithm.private_layers={private_layers}, but the {network.name} has {len(layers)} layers with weights, "
            "and at least one must be shared. Lower it, or take a deeper model."
        )
    return {name for layer in layers[-private_layers:] for name in layer.weights}


def head_then_body(
    setup: AlgorithmSetup,
    names: Collection[str],
    head_epochs: int,
    shared: Broadcast,
    client: ClientState,
    data: ClientData,
    rng: Streams,
) -> tuple[ClientState, Update, TrainingReport]:
    """Algorithm 1 of FedRep, the client's part."""
    whole_S = {**shared.model, **client.private}
    trainer = setup.federated.with_settings(epochs=head_epochs, steps=None)
    of_head = rng._replace(scope=f"{rng.scope}:head")
    head = trainer.train_classifier(setup.expert, whole_S, data, of_head, stop_early=False, trained_names=names)
    body = setup.federated.train_classifier(
        setup.expert, head.params["model"], data, rng, stop_early=False, trained_names=shared.model.keys()
    )
    model_S = body.params["model"]
    own = ClientState(part(model_S, names), client.rounds + (data.train.counts > 0))
    return own, Update(rest(model_S, names), data.train.counts.float()), TrainingReport(body.loss_S)
