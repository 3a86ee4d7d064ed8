"""Local/Global (Liang et al., "Think locally, act globally", 2020): private first layers, shared last ones.

Every client learns features of its own; what reads them is averaged. A baseline of Reisser et al. (2021), who leave
out its pretraining by FedAvg, as we do, and keep the first layer private. What is sent passes through the private
layers, so in the rounds these see opted-in records only.
A client that never trained has no layers of its own. If `schedule.release` is on, it predicts with the ensemble of the
released ones: the mean of their representations, read by the shared layers. Otherwise it predicts with the layers that
everyone starts from, of whose features the shared layers know little: only `personalize`, which fits them to the
client's own data, makes them useful.
"""

from collections.abc import Sequence

import torch
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, NoReport
from fedmoe.algorithms.partial_personalization import (
    Broadcast,
    ClientState,
    PartialPersonalizationConfig,
    PersonalState,
    ReleasedState,
    partial_personalization,
    predict_with,
    release_private,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, Tensors
from fedmoe.errors import ConfigError
from fedmoe.models.layers import all_passes_through, layers_of, output_from, representation
from fedmoe.models.network import Network


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LgFedAvgConfig(PartialPersonalizationConfig):
    private_layers: PositiveInt = 1  # how many of the first layers with weights; a residual block is one


def lg_fedavg(config: LgFedAvgConfig, setup: AlgorithmSetup) -> Algorithm:
    names, first_shared = cut(setup.expert, config.private_layers)
    algorithm = partial_personalization(config, setup, names, side_by_side)
    assert algorithm.release is not None
    return algorithm._replace(
        predict=lambda b, c, personal, x: predict(setup, first_shared, b, c, personal, x),
        release=algorithm.release._replace(
            local_update=lambda _b, client, data, _rng: release_layers(setup.expert, first_shared, client, data)
        ),
    )


def cut(network: Network, private_layers: int) -> tuple[set[str], str]:
    """The private weights, and the first layer that is shared."""
    layers = layers_of(network)
    if private_layers >= len(layers):
        raise ConfigError(
            f"algorithm.private_layers={private_layers}, but the {network.name} has {len(layers)} layers with weights, "
            "and at least one must be shared. Lower it, or take a deeper model."
        )
    names = {name for layer in layers[:private_layers] for name in layer.weights}
    return names, layers[private_layers].name


def side_by_side(private_parts: Sequence[Tensors]) -> Tensors:
    """Every tensor gets a leading axis of clients."""
    return trees.stack(private_parts)


def release_layers(
    network: Network, first_shared: str, client: ClientState, data: ClientData
) -> tuple[ClientState, ReleasedState, NoReport]:
    """Nothing is released in vain: an ensemble of representations needs one place that all of them pass."""
    if not all_passes_through(network, first_shared, network.init(0), data.train.x[0, :2]):
        raise ConfigError(
            f"in this {network.name} something leads around layer {first_shared!r}, so representations cannot be "
            "averaged there. Choose another algorithm.private_layers, or turn schedule.release off."
        )
    return release_private(client)


def predict(
    setup: AlgorithmSetup,
    first_shared: str,
    shared: Broadcast,
    client: ClientState,
    personal: PersonalState | None,
    x: Tensor,
) -> Tensor:
    """A client that has no layers of its own, as it never had data, predicts with those released."""
    own = client if personal is None else personal
    if own.rounds == 0 and shared.released:
        return setup.task.prediction(ensemble(setup.expert, first_shared, shared, x))
    return predict_with(setup, shared, own.private, x)


def ensemble(network: Network, first_shared: str, shared: Broadcast, x: Tensor) -> Tensor:
    """The shared layers' output for the mean representation of x over the released private layers."""
    count = len(next(iter(shared.released.values())))
    models = [{**shared.model, **private} for private in trees.unstack(shared.released, count)]
    total = torch.zeros(())
    for model in models:
        total = total + representation(network, first_shared, model, x)
    return output_from(network, first_shared, models[0], x, total / count)
