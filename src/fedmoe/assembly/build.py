"""Config -> parts: the federation, the models, the algorithm. A node of a real deployment calls it too."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.label_priors.label_groups import prior_notes
from fedmoe.algorithms.private import privately
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.assembly.algorithms import build_algorithm, build_setup
from fedmoe.assembly.networks import build_common_expert, build_networks, gate_of, make_networks, starting
from fedmoe.assembly.parts import Given, Parts
from fedmoe.assembly.settings import (
    class_weights,
    clients_per_round,
    require_same_groups,
    require_targets_of_the_task,
    resolve_backend,
    resolve_device,
)
from fedmoe.clients.facts import FederationFacts, federation_without_data, unlabelled_new_clients
from fedmoe.clients.federation import Federation
from fedmoe.clients.per_example_cache import with_cached
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.clients.sampling import Drawing
from fedmoe.config import ExperimentConfig, parse_config, with_algorithm
from fedmoe.evaluation.metrics import load_metrics
from fedmoe.federations import BuiltFederation, build_federation
from fedmoe.models.network import ModuleOrFactory
from fedmoe.partition.split import Split
from fedmoe.run_privacy import resolve_privacy
from fedmoe.training.backends import cohort_size, kernel_notes
from fedmoe.training.devices import DeviceName


def build(
    config: ExperimentConfig,
    *,
    federation: Federation | None = None,
    expert: ModuleOrFactory | None = None,
    gate: ModuleOrFactory | None = None,
    algorithm: AlgorithmFactory | None = None,
    common_expert: nn.Module | None = None,
) -> Parts:
    """The parts of a run: run, compare, explain, audit, benchmarks and engines start from here.

    Args:
        federation: the user's own clients; the config's data and split are then not read.
        expert, gate: the user's own modules or factories of modules.
        algorithm: a factory of the user's own; see `config.with_algorithm`.
        common_expert: a trained module of the user's own, instead of the section [common_expert].
    """
    given = Given(federation, expert, gate, algorithm, common_expert)
    if algorithm is not None:
        config = with_algorithm(config, algorithm)
    source = BuiltFederation(federation) if federation is not None else build_federation(config)
    whole = source.federation
    if config.evaluation.pooled:
        whole = with_pooled_client(whole, config.evaluation.pooled, config.seed)
    gate = gate_of(config, gate, whole)
    networks = build_networks(config.model, whole, starting(config.model, expert, whole), gate)
    require_targets_of_the_task(config, whole)
    device = resolve_device(config.engine, private=config.privacy is not None)
    backend = resolve_backend(config, networks) if device == "cpu" else "batched"
    weights = class_weights(config, whole)
    common = build_common_expert(config, whole, whole.load(0).train.x[:2], expert, common_expert)
    Drawing(whole.participants, config.schedule.pool, config.schedule.anchors).check(
        clients_per_round(config), whole.num_clients
    )
    require_same_groups(config)
    setup = build_setup(
        config, whole, unlabelled_new_clients(whole), networks, backend, weights, common, torch.device(device)
    )
    made = build_algorithm(config, setup)
    privacy = resolve_privacy(config, made)
    if privacy:
        made = privately(made, setup.clients_per_round)
    whole = with_cached(whole, made.once_of_examples)
    notes = _notes(config, whole, source.split, setup, made, device)
    chosen = {"backend": backend, "device": device}
    resolved = config.model_copy(update={"engine": config.engine.model_copy(update=chosen)})
    size = config.engine.cohort_size or cohort_size(networks, backend)
    if config.engine.one_client_per_message:
        size = 1
    title = config.algorithm.label or config.algorithm.entry.title
    metrics = load_metrics(config.evaluation.metrics, whole.num_classes, whole.task)
    return Parts(resolved, whole, *networks, made, title, size, source, setup, metrics, notes, privacy, given)


def _notes(
    config: ExperimentConfig,
    federation: Federation,
    split: Split | None,
    setup: AlgorithmSetup,
    made: Algorithm,
    device: DeviceName,
) -> tuple[str, ...]:
    """For the user: what could be faster, what a setting does not do, what to know of the scores."""
    asked = config.engine.backend in ("auto", "native") and device == "cpu"
    notes = kernel_notes((setup.expert, setup.gate), setup.federated.backend) if asked else []
    common = setup.common
    if common is not None and split is not None and common.public_digest not in ("", split.public_digest):
        notes.append(
            "the common expert was trained on other public rows than those of this split, so clients and their scores "
            "may have rows that it has seen. Train it with this config: fedmoe pretrain CONFIG."
        )
    if config.schedule.release and made.release is None:
        notes.append(f"{config.algorithm.name} has nothing to release: schedule.release does nothing.")
    if made.priors is not None:
        fits_together = bool(made.after_rounds)
        notes += prior_notes(federation, setup.unlabelled_new_clients, fits_together=fits_together)
    return tuple(notes)


def rebuild(table: Mapping[str, Any], given: Given) -> Parts:
    """The same parts in another process: from a config as JSON and the objects that were given with it."""
    config = parse_config(table, given.algorithm)
    own = {"federation": given.federation, "expert": given.expert, "gate": given.gate}
    return build(config, **own, common_expert=given.common_expert)  # type: ignore[arg-type]


def build_without_data(
    config: ExperimentConfig,
    facts: FederationFacts,
    expert: ModuleOrFactory | None,
    gate: ModuleOrFactory | None,
    common_expert: nn.Module | None = None,
) -> Parts:
    """The parts of a run that is over: what its models need, and nothing to train with. PyTorch computes them."""
    federation = federation_without_data(facts)
    networks = make_networks(config.model, federation, expert, gate_of(config, gate, federation))
    some_x = torch.zeros(2, *federation.input_shape, dtype=federation.input_dtype)
    common = build_common_expert(config, federation, some_x, expert, common_expert)
    unlabelled = facts.unlabelled_new_clients
    setup = build_setup(config, federation, unlabelled, networks, "sequential", common=common)
    title = config.algorithm.label or config.algorithm.entry.title
    return Parts(
        config, federation, *networks, build_algorithm(config, setup), title, 1, BuiltFederation(federation), setup
    )
