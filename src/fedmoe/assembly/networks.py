"""The networks of a run: the user's modules, or those that the config names."""

from torch import Tensor, nn

from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig
from fedmoe.models.catalog import build_model
from fedmoe.models.common_expert import PUBLIC_DIGEST, CommonExpert, temperature_in
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.settings import ModelConfig
from fedmoe.models.start_weights import read_weights, starting_from


def build_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """`make_networks`, and each has read a few rows of the first client."""
    networks = make_networks(config, federation, expert, gate)
    probe = federation.load(0).train.x[:2]
    for network, outputs in zip(networks, (federation.num_outputs, 1), strict=True):
        network.check_output(probe, outputs)
    return networks


def make_networks(
    config: ModelConfig, federation: Federation, expert: ModuleOrFactory | None, gate: ModuleOrFactory | None
) -> tuple[Network, Network]:
    """The user's modules, or those of the config. The gate is the same network with one output (Listo Zec et al.)."""
    shape = federation.input_shape
    return (
        Network(expert or (lambda: _model(config, federation, federation.num_outputs)), "expert", shape),
        Network(gate or (lambda: _model(config, federation, 1)), "gate", shape),
    )


def starting(config: ModelConfig, expert: ModuleOrFactory | None, federation: Federation) -> ModuleOrFactory | None:
    """The expert, whose every copy starts from `model.start_from`, where the config names such a file."""
    if config.start_from is None:
        return expert
    weights, _ = read_weights(config.start_from, "model.start_from")
    source = expert or (lambda: _model(config, federation, federation.num_classes))
    return starting_from(source, weights, f"model.start_from={str(config.start_from)!r}", config.start_noise)


def build_common_expert(
    config: ExperimentConfig,
    federation: Federation,
    some_x: Tensor,
    expert: ModuleOrFactory | None,
    given: nn.Module | None,
) -> CommonExpert | None:
    """Of the section [common_expert]; its network is that of [model], or the user's own, unless it says otherwise."""
    chosen, classes = config.common_expert, federation.num_classes
    if given is not None:
        return CommonExpert(given, given.state_dict(), some_x, classes)
    if chosen is None:
        return None
    weights, notes = read_weights(chosen.weights, "common_expert.weights")
    source = expert if chosen.model is None else None
    return CommonExpert(
        source or (lambda: _model(chosen.model or config.model, federation, classes)),
        weights,
        some_x,
        classes,
        what=f"common_expert.weights={str(chosen.weights)!r}",
        embedding=chosen.embedding,
        temperature=temperature_in(notes),
        public_digest=notes.get(PUBLIC_DIGEST, ""),
    )


def gate_of(config: ExperimentConfig, gate: ModuleOrFactory | None, federation: Federation) -> ModuleOrFactory | None:
    """The user's, or that of the section [gate]; None: a gate of the expert's kind."""
    chosen = config.gate
    return gate if gate is not None or chosen is None else lambda: _model(chosen, federation, 1)


def _model(config: ModelConfig, federation: Federation, outputs: int) -> nn.Module:
    return build_model(config, federation.input_shape, outputs, federation.vocabulary_size)
