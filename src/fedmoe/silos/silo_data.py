"""The federation as its two sides know it: the server, which has nobody's records, and a node, which has its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedmoe.clients.federation import Federation, Records, examples
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.config import ExperimentConfig
from fedmoe.config_sections import OptOutConfig
from fedmoe.core_types import ClientId, Examples
from fedmoe.errors import ConfigError, DataError
from fedmoe.partition.split import Indices

REQUIRED = ("num_clients", "num_classes", "input_shape")


def server_federation(config: ExperimentConfig) -> Federation:
    """What the config declares. `load` shows the form of a record: two rows of zeros that nobody may use."""
    for name in REQUIRED:
        if getattr(config.engine.flower, name) in (None, ()):
            raise ConfigError(
                f"engine.flower.{name} is missing. A server holds no data, so it is told how many clients there are "
                f"and what their examples look like: [engine.flower] {', '.join(REQUIRED)}."
            )
    if config.opt_out != OptOutConfig(clients=config.opt_out.clients):
        raise ConfigError("on silos only opt_out.clients is read here: records are opted out by a node's client_data.")
    settings = config.engine.flower
    assert settings.num_clients is not None and settings.num_classes is not None
    form = _form_of_a_record(config)
    return Federation(
        num_clients=settings.num_clients,
        num_unseen=0,
        num_classes=settings.num_classes,
        input_shape=settings.input_shape,
        participants=_participants(config),
        global_test=form.test,
        load=lambda client: form,
        digest=f"silos-{settings.num_clients}-{settings.num_classes}-{settings.input_shape}-{settings.input_type}",
        vocabulary_size=settings.vocabulary_size,
        is_elsewhere=True,
    )


def node_federation(config: ExperimentConfig, client: ClientId, given: Any) -> Federation:
    """The same with the records of this node's client, which `client_data` gave: (x, y), or parts by name, among them
    "opted_out" where some records, or all, are for this client's own model alone."""
    whole = server_federation(config)
    if not 0 <= client < whole.num_clients:
        raise DataError(f"this node's partition-id is {client}, but engine.flower.num_clients={whole.num_clients}.")
    opted_out: Any = False
    if isinstance(given, Mapping):
        given = dict(given)
        opted_out = given.pop("opted_out", False)
    records = _own_records(config, client, given, opted_out)
    _require_form(records.train, whole)
    takes_part = bool(records.train_opted_in.any()) and client in whole.participants.tolist()
    others = whole.participants[whole.participants != client]
    participants = np.sort(np.append(others, client)) if takes_part else others
    return replace(
        whole,
        participants=participants,
        load=lambda asked: records if asked == client else whole.load(asked),
        is_elsewhere=False,
    )


def _own_records(config: ExperimentConfig, client: ClientId, given: Any, opted_out: Any) -> Records:
    settings, name = config.engine.flower, f"client {client}"
    if not isinstance(opted_out, bool):
        opted_out = torch.as_tensor(opted_out)
    everything_out = opted_out if isinstance(opted_out, bool) else bool(opted_out.all())
    masks = {} if everything_out else {name: opted_out}
    own = federation_from_clients(
        {name: given},
        num_classes=settings.num_classes,
        vocabulary_size=settings.vocabulary_size,
        opted_out=masks,
        seed=config.seed,
    ).load(0)
    nobody_in = (torch.zeros_like(own.train_opted_in), torch.zeros_like(own.validation_opted_in))
    masked = nobody_in if everything_out else (own.train_opted_in, own.validation_opted_in)
    return Records(own.train, own.validation, own.test, *masked)


def _participants(config: ExperimentConfig) -> Indices:
    everyone = range(config.engine.flower.num_clients or 0)
    for client in config.opt_out.clients:
        if client not in everyone:
            raise ConfigError(f"opt_out.clients={client}, but the clients are numbered 0 to {len(everyone) - 1}.")
    return np.array([client for client in everyone if client not in config.opt_out.clients], dtype=np.int64)


def _form_of_a_record(config: ExperimentConfig) -> Records:
    settings = config.engine.flower
    x = torch.zeros(2, *settings.input_shape, dtype=getattr(torch, settings.input_type))
    y = torch.zeros(2, dtype=torch.int64 if settings.num_classes else torch.float32)
    nothing = examples(x[:0], y[:0])
    nobody = torch.zeros(0, dtype=torch.bool)
    return Records(examples(x, y), nothing, nothing, torch.zeros(2, dtype=torch.bool), nobody)


def _require_form(train: Examples, whole: Federation) -> None:
    declared = whole.load(0).train.x
    if train.x.shape[1:] != declared.shape[1:] or train.x.dtype != declared.dtype:
        raise DataError(
            f"client_data gave examples of {train.x.dtype} {tuple(train.x.shape[1:])}, but the config declares "
            f"{declared.dtype} {tuple(declared.shape[1:])} (engine.flower.input_shape, input_type). Bring them to that."
        )
