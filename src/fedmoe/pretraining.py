"""A common expert out of public data: rows that no client and no test client holds (split.public_size).

It is trained as a client that is alone would be (`training.local`), epoch after epoch, until the held-out public rows
say that it is good enough. Optimizers start afresh in every epoch; `rate_over_steps` goes by epochs here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe import trees
from fedmoe.assembly.networks import make_networks
from fedmoe.assembly.settings import resolve_backend
from fedmoe.clients.federation import PublicData, side_by_side
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientData, Examples, Tensors
from fedmoe.errors import ConfigError
from fedmoe.federations import build_federation
from fedmoe.models.common_expert import PUBLIC_DIGEST, TEMPERATURE
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.local import LocalTrainer


class Epoch(NamedTuple):
    number: int
    loss: float
    accuracy: float  # on the held-out public rows


class Pretrained(NamedTuple):
    """The weights of the epoch with the best accuracy, which is the last one where the target was reached."""

    weights: Tensors
    epoch: Epoch
    reached: bool
    temperature: float  # by which its scores are calibrated on the held-out rows
    num_rows: int
    num_held_out: int
    public_digest: str

    @property
    def notes(self) -> dict[str, str]:
        """What its file says of it."""
        return {
            "accuracy": f"{self.epoch.accuracy:.6f}",
            "epochs": str(self.epoch.number),
            "public_rows": str(self.num_rows),
            "public_validation_rows": str(self.num_held_out),
            TEMPERATURE: repr(self.temperature),
            PUBLIC_DIGEST: self.public_digest,
        }


def pretrain_events(
    config: ExperimentConfig, until_accuracy: float | None, max_epochs: int
) -> Iterator[Epoch | Pretrained]:
    """Every epoch, and the end. Without a target all epochs are trained and the best one is kept."""
    if until_accuracy is not None and not 0 < until_accuracy <= 1:
        raise ConfigError(f"--until-accuracy {until_accuracy} is no share of rows. Write 0.73 for 73 percent.")
    built = build_federation(config)
    federation = built.federation
    public = _public(config, federation.public() if federation.public else None)
    chosen = config.common_expert.model if config.common_expert and config.common_expert.model else config.model
    networks = make_networks(chosen, federation, None, None)
    backend = resolve_backend(config, networks)
    network = networks[0]
    if backend == "native":
        network.go_native()
    settings = config.training.local
    by_epochs = {"rate_over_rounds": settings.rate_over_steps, "rate_over_steps": None}
    trainer = LocalTrainer(settings, backend, max_epochs).with_settings(epochs=1, steps=None, **by_epochs)
    data = ClientData(side_by_side([public.train]), side_by_side([public.validation]))
    weights_S, best = trees.stack([network.init(config.seed, "pretrain")]), None
    for number in range(1, max_epochs + 1):
        rng = Streams(config.seed, "round:pretrain", number, (0,))
        fitted = trainer.train_classifier(network, weights_S, data, rng, stop_early=False)
        weights_S = fitted.params["model"]
        epoch = Epoch(number, float(fitted.loss_S), accuracy_of(trainer, network, weights_S, data.validation))
        if best is None or epoch.accuracy > best[0].accuracy:
            best = (epoch, trees.tree_map(torch.clone, weights_S))
        yield epoch
        if until_accuracy is not None and epoch.accuracy >= until_accuracy:
            break
    assert best is not None
    epoch, weights_S = best
    reached = until_accuracy is None or epoch.accuracy >= until_accuracy
    scores_NC = scores_of(trainer, network, weights_S, data.validation)
    temperature = fit_temperature(scores_NC, public.validation.y)
    weights = {**trees.pick(weights_S, 0), **network.constants}
    digest = built.split.public_digest if built.split else ""
    yield Pretrained(weights, epoch, reached, temperature, len(public.train.y), len(public.validation.y), digest)


def _public(config: ExperimentConfig, public: PublicData | None) -> PublicData:
    if public is None:
        raise ConfigError(
            "there are no public rows to train a common expert on: set split.public_size and "
            "split.public_validation_size, such as 10000 and 2000."
        )
    if not len(public.validation.y):
        raise ConfigError(
            f"split.public_size={len(public.train.y)}, but split.public_validation_size is 0: held-out public rows "
            "decide when the training ends. Set it, such as to a fifth of public_size."
        )
    return public


def scores_of(trainer: LocalTrainer, network: Network, weights_S: Tensors, examples: Examples) -> Tensor:
    """(N, C), of one client."""

    def scores(params: Tensors, batch: Batch) -> Tensor:
        return network(params, batch.x)

    return trainer.per_example(scores, weights_S, examples)[0]


def accuracy_of(trainer: LocalTrainer, network: Network, weights_S: Tensors, examples: Examples) -> float:
    correct = scores_of(trainer, network, weights_S, examples).argmax(-1) == examples.y[0]
    return float(correct.double().mean())


def fit_temperature(scores_NC: Tensor, y_N: Tensor) -> float:
    """The T by which scores / T have the lowest cross-entropy (Guo et al. 2017)."""
    from scipy.optimize import minimize_scalar  # here, because its import takes a second

    def loss(log_temperature: float) -> float:
        return float(F.cross_entropy(scores_NC.double() / torch.tensor(log_temperature).double().exp(), y_N))

    return float(torch.tensor(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x).double().exp())
