"""Everything that a run needs, built once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.assembly.algorithms import make_algorithm
from fedmoe.assembly.settings import task_of
from fedmoe.clients.federation import Federation
from fedmoe.config import ExperimentConfig
from fedmoe.core_types import ClientId, Tree
from fedmoe.evaluation.metrics import Metric
from fedmoe.evaluation.personal_model import ModelFacts, PersonalModel, Predictor
from fedmoe.federations import BuiltFederation
from fedmoe.models.fingerprint import tensors_digest
from fedmoe.models.network import ModuleOrFactory, Network
from fedmoe.models.task import Task
from fedmoe.run_privacy import RunPrivacy
from fedmoe.training.backends import Backend
from fedmoe.training.fallbacks import fallback_note


class Given(NamedTuple):
    """What was passed to `build` as Python objects, beside the config."""

    federation: Federation | None = None
    expert: ModuleOrFactory | None = None
    gate: ModuleOrFactory | None = None
    algorithm: AlgorithmFactory | None = None
    common_expert: nn.Module | None = None


@dataclass(frozen=True)
class Parts:
    """Everything that a run needs, built once. `config` holds the backend and the device that were chosen."""

    config: ExperimentConfig
    federation: Federation
    expert: Network
    gate: Network
    algorithm: Algorithm
    title: str  # what tables call the algorithm
    cohort_size: int | Callable[[int], int]  # how many clients are computed together, of how many that take part
    source: BuiltFederation
    setup: AlgorithmSetup  # what the algorithm was made with
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # beside accuracy and loss
    notes: tuple[str, ...] = ()  # for the user: what could be faster, what a setting does not do
    privacy: RunPrivacy | None = None  # where what clients send is differentially private
    given: Given = field(default_factory=Given)  # from which, with the config, another process builds the same parts

    def __repr__(self) -> str:
        model = f"expert of {self.expert.num_weights:,} weights"
        return f"<Parts of {self.title}: {self.backend} backend; {model}; {self.federation!r}>"

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.engine.device)

    @property
    def backend(self) -> Backend:
        backend = self.config.engine.backend
        assert backend != "auto"
        return backend

    @property
    def task(self) -> Task:
        return task_of(self.config, self.federation)

    @property
    def data_digest(self) -> str:
        """What a run folder records of the data: of opted-in records alone, where not everyone is asked for scores."""
        of_all = self.config.evaluation.clients_asked == "all" or not self.federation.opted_in_digest
        return self.federation.digest if of_all else self.federation.opted_in_digest

    def personal_model(self, states: Mapping[str, Tree | None], client: ClientId) -> PersonalModel:
        """Of what a client ended with: its broadcast, client state and personal state."""
        facts = ModelFacts(
            self.federation.name_of(client), self.title, self.setup.input_shape, self.class_names,
            self.federation.input_dtype, self.setup.task,
        )  # fmt: skip
        return PersonalModel(self.predictor(), states, facts)

    def predictor(self) -> Predictor:
        """The algorithm over networks of its own that PyTorch computes, whichever backend the run trains with."""
        expert, gate = self.expert.plain_copy(), self.gate.plain_copy()
        common = self.setup.common and self.setup.common.plain_copy()
        by_pytorch = self.setup.federated._replace(backend="sequential")
        setup = self.setup._replace(expert=expert, gate=gate, common=common, federated=by_pytorch)
        networks = (expert, gate, *([common.network] if common else []))
        return Predictor(make_algorithm(self.config, setup), networks)

    @property
    def weights_digests(self) -> dict[str, str]:
        """Of the weights that a run is given: it goes on with the same ones only."""
        common = self.setup.common
        start = {"start_weights": tensors_digest(self.expert.init(0))} if self.config.model.start_from else {}
        return start | ({"common_expert": tensors_digest(common.constants)} if common else {})

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.federation.class_names or tuple(map(str, range(self.federation.num_classes)))

    def fallback_notes(self) -> list[str]:
        """What of the local training is not whole epochs in the native kernels, and why; trains one client briefly."""
        if self.backend != "native" or self.federation.is_elsewhere:
            return []
        return [fallback_note(why) for why in native_fallbacks(self.algorithm, self.federation, self.config.seed)]
