"""The contract: an algorithm is a few functions, written once, run by any engine.

Server functions take trees of one server; client functions take trees of a *cohort* (every leaf starts with the client
axis S), except `init_client`, `init_personal` and `predict`, which take one client. All are pure.

Privacy is in the signatures: `local_update` is handed opted-in records and the client state, nothing else, so nothing
that it returns can depend on an opted-out record. Work on all records (`private_update`, `personalize`) has its own
state, and no function that sends anything is ever handed that.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedmoe.aggregation.expert_observation import Observation
from fedmoe.core_types import ClientData, ClientId, Tree
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.partition.split import Indices
from fedmoe.streams import Streams
from fedmoe.training.inference import Backend
from fedmoe.training.settings import LocalTraining
from fedmoe.wire import message


class Nothing(NamedTuple):
    """A state or report with nothing in it."""


@message
class NoReport(NamedTuple):
    """A client tells no numbers."""


def one_cohort(_broadcast: Tree) -> Hashable:
    return 0


def no_fault(_update: Tree, _sent: Tree) -> str | None:
    return None


class Exchange(NamedTuple):
    """One trip server → clients → server. A broadcast of None asks this client nothing."""

    name: str
    # server, client, this client's earlier updates of the round -> Broadcast. Clients that get the same tensors share
    # one encoding.
    broadcast: Callable[[Any, ClientId, Sequence[Any]], Any]
    # broadcast_S, client_S, opted-in data, rng -> (client_S, update_S, report_S); updates may be a list instead, one
    # for each client, where they differ in shape: clients that send different experts
    local_update: Callable[[Any, Any, ClientData, Streams], tuple[Any, Any, Any]]
    # server, updates, reports and what was sent, each by client id in the order of ids -> server
    aggregate: Callable[[Any, Mapping[ClientId, Any], Mapping[ClientId, Any], Mapping[ClientId, Any]], Any]
    # what an acceptable update looks like (names, shapes, dtypes), given what the client was sent
    update_like: Callable[[Any], Any]
    broadcast_type: type[Any]
    update_type: type[Any]
    report_type: type[Any] = NoReport
    # update, what was sent -> why the update is refused although it looks right (a choice out of range), or None
    fault: Callable[[Any, Any], str | None] = no_fault
    # clients whose broadcasts have equal keys are trained together
    cohort_key: Callable[[Any], Hashable] = one_cohort
    # broadcast_S, client_S, personal_S, all data, rng -> personal_S: private work beside the exchange
    private_update: Callable[[Any, Any, Any, ClientData, Streams], Any] | None = None
    # server before and after the aggregation, then updates, reports and sent as there -> what is told of the experts
    observe: Callable[[Any, Any, Any, Any, Any], Observation] | None = None


class Validation(NamedTuple):
    """An exchange by which the server chooses a model: after every `every` rounds and after the last."""

    exchange: Exchange
    every: int


class Algorithm(NamedTuple):
    """`predict(broadcast, client, personal or None, x)` gives log-probabilities; None: before personalisation."""

    server_type: type[Any]
    init_server: Callable[[int], Any]
    round: tuple[Exchange, ...]  # empty: clients never talk
    # ends every run: the last broadcast is what clients keep. Clients that opted out receive it but are asked nothing.
    delivery: tuple[Exchange, ...]
    predict: Callable[[Any, Any, Any, Tensor], Tensor]
    sample: Callable[[Any, int, Indices, np.random.Generator], Indices]  # server, round, pool, rng -> client ids
    client_type: type[Any] = Nothing
    # broadcast of the first exchange that the client takes part in, client, seed
    init_client: Callable[[Any, ClientId, int], Any] = lambda _broadcast, _client, _seed: Nothing()
    personal_type: type[Any] = Nothing
    # broadcast, client state, client, seed; before the first private_update. A client that was never sampled reaches
    # `personalize` with this state.
    init_personal: Callable[[Any, Any, ClientId, int], Any] | None = None
    # broadcast_S, client_S, personal_S or None, all data, rng -> personal_S
    personalize: Callable[[Any, Any, Any, ClientData, Streams], Any] | None = None
    validation: Validation | None = None
    release: Exchange | None = None  # a declared gift of private parts; runs only where the config allows it


class AlgorithmSetup(NamedTuple):
    """What a factory binds: the models, how long clients train, and how many take part."""

    expert: Network
    gate: Network
    federated: LocalTraining  # in the rounds
    local: LocalTraining  # from a fresh start, on the client alone
    personal: LocalTraining  # after the rounds
    clients_per_round: int | None  # None: everyone who opted in
    backend: Backend
    num_clients: int = 0
    num_classes: int = 0
    input_shape: tuple[int, ...] = ()  # of one example
    unlabelled_new_clients: tuple[ClientId, ...] = ()  # unseen clients without any training example
    release: bool = False  # whether clients will be asked for the private parts that an algorithm declares as a gift
    make_network: Callable[[int], Network] | None = None  # the expert's architecture with other outputs: routers
    # Side information that every training and validation example has in `extra`, and how many values: 0 … that - 1.
    side_values: Mapping[str, int] = {}


def uniform_sample(clients_per_round: int | None) -> Callable[[Any, int, Indices, np.random.Generator], Indices]:
    """Draw without replacement from the pool of opted-in clients; cost follows the sample, not the pool."""

    def sample(_server: Any, _round: int, pool: Indices, rng: np.random.Generator) -> Indices:
        if clients_per_round is None:
            return pool
        if clients_per_round > len(pool):
            raise ConfigError(
                f"schedule.clients_per_round={clients_per_round}, but only {len(pool)} clients opted in. "
                "Lower it, set it to 'all', or let fewer clients opt out."
            )
        return pool[rng.choice(len(pool), clients_per_round, replace=False, shuffle=False)]

    return sample
