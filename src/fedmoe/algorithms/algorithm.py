"""The contract: an algorithm is a few functions, written once, run by any engine.

Server functions take trees of one server; client functions take trees of a *cohort* (every leaf starts with the client
axis S), except `init_client`, `init_personal` and `predict`, which take one client. All are pure.

Privacy is in the signatures: `local_update` is handed opted-in records and the client state, nothing else, so nothing
that it returns can depend on an opted-out record. Work on all records (`private_update`, `personalize`) has its own
state, and no function that sends anything is ever handed that.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fedmoe.aggregation.expert_observation import Observation
from fedmoe.core_types import ClientData, ClientId, Examples
from fedmoe.errors import ConfigError
from fedmoe.partition.split import Indices
from fedmoe.streams import Streams
from fedmoe.wire import message


class Nothing(NamedTuple):
    """A state with nothing in it."""


@message
class NoReport(NamedTuple):
    """A client reports no numbers."""


# What an exchange is made of. States and messages are an algorithm's own types, so they are `Any` here.


class Broadcast(Protocol):
    """What this client is sent, or None: it is not asked. Clients that get the same tensors share one encoding."""

    def __call__(self, server: Any, client: ClientId, earlier_updates: Sequence[Any], /) -> Any: ...


class LocalUpdate(Protocol):
    """The clients' part: (new client states, updates, reports).

    Updates may be a list instead of a stacked tree, one for each client, where they differ in shape: clients that send
    different experts.
    """

    def __call__(
        self, broadcast_S: Any, client_S: Any, opted_in: ClientData, rng: Streams, /
    ) -> tuple[Any, Any, Any]: ...


class Aggregate(Protocol):
    """The server's part: a new server state. Everything is by client id, in the order of ids."""

    def __call__(
        self,
        server: Any,
        updates: Mapping[ClientId, Any],
        reports: Mapping[ClientId, Any],
        broadcasts: Mapping[ClientId, Any],
        /,
    ) -> Any: ...


class UpdateLike(Protocol):
    """What an acceptable update looks like (names, shapes, dtypes), given what the client was sent."""

    def __call__(self, broadcast: Any, /) -> Any: ...


class Rejection(Protocol):
    """Why an update is rejected although it looks right (a choice out of range), or None."""

    def __call__(self, update: Any, broadcast: Any, /) -> str | None: ...


class CohortKey(Protocol):
    """Clients whose broadcasts have equal keys may be trained together."""

    def __call__(self, broadcast: Any, /) -> Hashable: ...


class PrivateUpdate(Protocol):
    """Private work beside the exchange, on all records: new personal states."""

    def __call__(
        self, broadcast_S: Any, client_S: Any, personal_S: Any, everything: ClientData, rng: Streams, /
    ) -> Any: ...


class Observe(Protocol):
    """What the server can say of its experts after an aggregation, from what it was sent anyway."""

    def __call__(
        self,
        before: Any,
        after: Any,
        updates: Mapping[ClientId, Any],
        reports: Mapping[ClientId, Any],
        broadcasts: Mapping[ClientId, Any],
        /,
    ) -> Observation: ...


class Figures(Protocol):
    """Numbers that the server can tell from what it was sent anyway, such as norms: on record with the reports."""

    def __call__(self, before: Any, updates: Mapping[ClientId, Any], /) -> dict[str, float]: ...


def one_cohort(_broadcast: Any, /) -> Hashable:
    return 0


def accept(_update: Any, _broadcast: Any, /) -> str | None:
    return None


class Exchange(NamedTuple):
    """One trip server → clients → server."""

    name: str  # unlike that of any other exchange of the same round: manifests and records go by it
    broadcast: Broadcast
    local_update: LocalUpdate
    aggregate: Aggregate
    update_like: UpdateLike
    broadcast_type: type[Any]
    update_type: type[Any]
    report_type: type[Any] = NoReport
    rejection: Rejection = accept
    cohort_key: CohortKey = one_cohort
    private_update: PrivateUpdate | None = None
    observe: Observe | None = None
    figures: Figures | None = None


class Validation(NamedTuple):
    """An exchange by which the server chooses a model: after every `every` rounds and after the last.

    Clients keep no state of it.
    """

    exchange: Exchange
    every: int


# What an algorithm is made of besides.


class InitServer(Protocol):
    def __call__(self, seed: int, /) -> Any: ...


class Sample(Protocol):
    """Who takes part in a round, out of the pool of opted-in clients."""

    def __call__(self, server: Any, round_number: int, pool: Indices, rng: np.random.Generator, /) -> Indices: ...


class InitClient(Protocol):
    """A client's state before its first exchange, whose broadcast is given."""

    def __call__(self, broadcast: Any, client: ClientId, seed: int, /) -> Any: ...


class InitPersonal(Protocol):
    """Before the first private_update. A client that was never sampled reaches `personalize` with this state."""

    def __call__(self, broadcast: Any, client_state: Any, client: ClientId, seed: int, /) -> Any: ...


class Personalize(Protocol):
    """After the last round, on all records: what a client ends with. `personal_S` is None without `init_personal`.

    A list instead of a stacked tree, one state for each client, where states differ in shape: as many rows as a client
    has examples.
    """

    def __call__(
        self, broadcast_S: Any, client_S: Any, personal_S: Any, everything: ClientData, rng: Streams, /
    ) -> Any: ...


class Predict(Protocol):
    """Log-probabilities (B, classes) of one client, or numbers (B, targets); no `personal` before personalisation."""

    def __call__(self, broadcast: Any, client_state: Any, personal: Any, x: Tensor, /) -> Tensor: ...


class Measure(Protocol):
    """Metrics of the algorithm's own on scored examples of one client, by name; NaN where one is not defined."""

    def __call__(
        self, broadcast: Any, client_state: Any, personal: Any, examples: Examples, /
    ) -> Mapping[str, float | Tensor]: ...


class ExpertWeights(Protocol):
    """How much each expert has to say of each row, once a client has its model: name -> (B,); a row sums to 1."""

    def __call__(self, broadcast: Any, client_state: Any, personal: Any, x: Tensor, /) -> dict[str, Tensor]: ...


class PriorFree(Protocol):
    """Scores (B, classes) of one client that hold no label frequencies: with a log-prior added, and normalised, they
    are its answer under that prior."""

    def __call__(self, broadcast: Any, client_state: Any, personal: Any, x: Tensor, /) -> Tensor: ...


class OwnPrior(Protocol):
    """The stored log-prior (classes,) of one client: its own label frequencies; uniform before personalisation."""

    def __call__(self, broadcast: Any, client_state: Any, personal: Any, /) -> Tensor: ...


class EstimatePrior(Protocol):
    """The log-prior (classes,) of a batch of unlabelled questions, from their prior-free scores and the own one."""

    def __call__(self, scores_BC: Tensor, own_C: Tensor, /) -> Tensor: ...


class AnswerUnder(Protocol):
    """Log-probabilities (B, classes) of one client under a log-prior (classes,), row by row."""

    def __call__(self, broadcast: Any, client_state: Any, personal: Any, x: Tensor, log_prior: Tensor, /) -> Tensor: ...


class LabelPriors(NamedTuple):
    """How an algorithm answers under label frequencies of the user's choice."""

    prior_free: PriorFree  # what frequencies are estimated from
    own: OwnPrior
    estimate: EstimatePrior
    answer: AnswerUnder


class Answer(NamedTuple):
    """One of several ways in which a client answers, each scored under a name of its own."""

    predict: Predict
    batch_size: int | None = None  # of questions that are answered together, where an answer depends on the others
    models: frozenset[str] = frozenset(("before", "after"))  # scored before personalisation, after it
    data: frozenset[str] = frozenset(("own", "tuning", "global", "global_validation", "pooled"))  # what it is scored on
    is_candidate: bool = False  # one of those among which the client chose the way in which it answers


class Choice(Protocol):
    """The name of the candidate that a client chose."""

    def __call__(self, personal: Any, /) -> str: ...


class Algorithm(NamedTuple):
    server_type: type[Any]
    init_server: InitServer
    round: tuple[Exchange, ...]  # empty: clients never talk
    # Ends every run: the last broadcast is what clients are left with. Nothing is aggregated on the way. Clients that
    # opted out receive the last broadcast and are asked nothing.
    delivery: tuple[Exchange, ...]
    predict: Predict
    sample: Sample
    client_type: type[Any] = Nothing
    # Fields of the client state that clients send as well, so that the server knows them: SCAFFOLD's control variates.
    # Nothing else of a client's state may ever be sent.
    known_to_server: frozenset[str] = frozenset()
    init_client: InitClient = lambda _broadcast, _client, _seed: Nothing()
    personal_type: type[Any] = Nothing
    init_personal: InitPersonal | None = None
    personalize: Personalize | None = None
    validation: Validation | None = None
    # After the last round, one after another, each of every client that opted in, each aggregated: calibration.
    after_rounds: tuple[Exchange, ...] = ()
    # Where what follows the rounds has a part of the server's state to itself: the field that holds the rest of it.
    rounds_field: str | None = None
    # Private parts that clients release to the others; runs after all that, and only where the config allows it.
    release: Exchange | None = None
    # What every client is sent once beside the networks' own frozen weights, and nobody trains: a common expert.
    constants: Mapping[str, Tensor] = {}
    # What a client computes once of each of its examples, by public constants alone, and keeps: it is in `extra` of all
    # examples that client functions see, under this name.
    once_of_examples: Mapping[str, Callable[[Tensor], Tensor]] = {}
    # Of what a client was delivered and a batch: the router's log-scores of all experts, (B, M). For new clients.
    router_scores: Callable[[Any, Tensor], Tensor] | None = None
    # Numbers of its own that are scored beside accuracy and loss, all of these names.
    measure: Measure | None = None
    measured: tuple[str, ...] = ()
    expert_weights: ExpertWeights | None = None  # of a mixture: whom a prediction is due to
    # Why noised steps in `local_update` do not make what it sends private, or None where whatever it sends depends on
    # broadcasts, noised steps and what those came to alone.
    no_guarantee: str | None = "it does not say that what it sends comes from noised steps alone"
    adds_noise_anyway: bool = False  # may be run with noise that guarantees nothing, to be compared with
    counts_labels: bool = False  # reads label frequencies in `local_update`: they are noised once, and charged
    # Why it cannot predict numbers, or None where it takes predictions, losses and mixtures from `setup.task`.
    no_regression: str | None = "it was written for classes"
    # Which label frequencies the final answer holds: those of all clients' data, or the client's own. None: not known,
    # and no answer under other frequencies can be had.
    frequencies: Literal["pool", "own"] | None = None
    priors: LabelPriors | None = None
    # Ways to answer by the names under which they are scored; "" is `predict`. The headline is what tables show first.
    answers: Mapping[str, Answer] | None = None  # None: `predict` alone
    headline: str = ""
    choice: Choice | None = None

    @property
    def scored_answers(self) -> Mapping[str, Answer]:
        return {"": Answer(self.predict)} if self.answers is None else self.answers

    @property
    def keeps_client_state(self) -> bool:
        """Whether clients carry anything private from one exchange to the next."""
        return self.client_type is not Nothing or self.init_personal is not None


def uniform_sample(clients_per_round: int | None) -> Sample:
    """Draw without replacement from the pool of opted-in clients; cost follows the sample, not the pool."""

    def sample(_server: Any, _round: int, pool: Indices, rng: np.random.Generator, /) -> Indices:
        if clients_per_round is None:
            return pool
        if clients_per_round > len(pool):
            raise ConfigError(
                f"schedule.clients_per_round={clients_per_round}, but only {len(pool)} clients opted in. "
                "Lower it, set it to 'all', or let fewer clients opt out."
            )
        return pool[rng.choice(len(pool), clients_per_round, replace=False, shuffle=False)]

    return sample
