"""The common expert of Dun et al. (2023): a frozen network that every client has, to embed its examples with.

Its weights are public constants: sent to a client once, never trained, never part of an update.
Shape suffixes: B examples, F features, C classes.
"""

import copy
import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmoe.core_types import Tensors
from fedmoe.errors import ConfigError
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.start_weights import starting_from

TEMPERATURE = "temperature"  # what a file may note of its weights: scores divided by it are calibrated

PUBLIC_DIGEST = "public_digest"

Embedding = Literal["features", "output"]


class CommonExpert:
    """`embedding`: the input of the output layer ("features"), or what the network returns ("output").

    A network whose output is the embedding has no output layer, so it cannot predict. `some_x` is a batch of inputs,
    for which one that does not fit is refused.
    """

    def __init__(
        self,
        source: ModuleOrFactory,
        weights: Tensors,
        some_x: Tensor,
        num_classes: int,
        *,
        what: str = "the common expert's file",
        embedding: Embedding = "features",
        temperature: float = 1.0,
        public_digest: str = "",
    ) -> None:
        filled = starting_from(source, weights, what)
        module = filled if isinstance(filled, nn.Module) else filled()
        shape = tuple(some_x.shape[1:])
        self.network = Network(module.requires_grad_(False), "common expert", shape, nothing_to_train=True)
        self.embedding, self.temperature = embedding, temperature
        self.public_digest = public_digest  # of the public rows that it was trained on, where that is known
        self._check(some_x, num_classes)
        self.num_features = int(self.embed(some_x).shape[1])

    @property
    def constants(self) -> Tensors:
        """All that a client must be sent to have it."""
        return self.network.constants

    @property
    def notes(self) -> dict[str, str]:
        """What its file notes beside the weights."""
        return {TEMPERATURE: repr(self.temperature), PUBLIC_DIGEST: self.public_digest}

    def plain_copy(self) -> "CommonExpert":
        """The same over a module of its own, which PyTorch computes on every backend."""
        other = copy.copy(self)
        other.network = self.network.plain_copy()
        return other

    @property
    def can_predict(self) -> bool:
        return self.embedding == "features"

    def embed(self, x: Tensor) -> Tensor:
        """(B, F), without gradients: nothing ever trains it."""
        with torch.no_grad():
            if self.embedding == "output":
                return self.network({}, x)
            return self.network.with_features({}, x)[1]

    def log_probs(self, x: Tensor) -> Tensor:
        """(B, C), calibrated by the temperature that its file notes."""
        if not self.can_predict:
            raise ConfigError(
                "the common expert has no output layer (common_expert.embedding='output'), so it predicts nothing. "
                "Give one with an output layer and embedding='features'."
            )
        with torch.no_grad():
            return F.log_softmax(self.network({}, x) / self.temperature, dim=-1)

    def answers_and_embedding(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """(B,) the likeliest classes, none where it cannot predict, and the embedding: by one pass."""
        if not self.can_predict:
            return None, self.embed(x)
        with torch.no_grad():
            scores_BC, embedding_BF = self.network.with_features({}, x)
        return scores_BC.argmax(-1), embedding_BF

    def _check(self, x: Tensor, num_classes: int) -> None:
        if self.can_predict:
            self.network.check_output(x, num_classes)
            return
        try:
            shape = tuple(self.embed(x).shape)
        except RuntimeError as error:
            raise ConfigError(
                f"the common expert cannot read a batch of shape {tuple(x.shape)}: {error}. Choose one for these data."
            ) from error
        if len(shape) != 2:
            raise ConfigError(
                f"the common expert returns shape {shape} for a batch of shape {tuple(x.shape)}; an embedding is a "
                "vector per example, (B, F). Flatten its output."
            )


def temperature_in(notes: Mapping[str, str]) -> float:
    """As `fedmoe pretrain` notes it; 1 where nothing is noted."""
    try:
        value = float(notes.get(TEMPERATURE, 1.0))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"the common expert's file notes {TEMPERATURE}={notes[TEMPERATURE]!r}, which is no positive number. "
            "Write the file again."
        )
    return value
