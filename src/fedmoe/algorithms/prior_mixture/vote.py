"""A vote after the calibration: are specialists better than the shared expert, for clients in general?

Few validation rows of one client do not decide which of its candidates is best; those of all clients together do. Each
client fine-tunes a specialist on opted-in records and sends by how much it is ahead of the shared expert on opted-in
validation rows that nothing was fitted on: one number, in which no row counts for more than a bound. Where the mean
over clients is above zero by a standard error, the specialist is the default, else the shared expert. A client leaves
the default for a candidate that is clearly better on its own rows.
Shape suffixes: S clients of a cohort, N examples, C classes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport
from fedmoe.algorithms.label_priors.estimate import answer
from fedmoe.algorithms.label_priors.frequencies import training_offset
from fedmoe.algorithms.prior_mixture.personal import SHARED, SPECIALIST, fine_tune, shared_scores
from fedmoe.algorithms.prior_mixture.stack import halves
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId
from fedmoe.models.mixture import negative_log_likelihood
from fedmoe.streams import Streams
from fedmoe.trees import record_type
from fedmoe.wire import message

LARGEST_GAIN = 2.0  # of one row, in nats: a row that one of the two calls nearly impossible decides nothing alone
STANDARD_ERRORS = 1.0  # by which the mean gain must be above zero


@message
class Vote(NamedTuple):
    gain: Tensor  # the mean over rows of the shared expert's loss less the specialist's
    num_examples: Tensor  # rows behind it. No rows, no vote


def with_vote(calibrated: Algorithm, setup: AlgorithmSetup) -> Algorithm:
    """The server's state and the last broadcast get one field more, `default`: which candidate a client starts from."""
    *_, last = calibrated.delivery
    sent_before = last.broadcast_type
    server_type = record_type("VotedServer", {**calibrated.server_type.__annotations__, "default": Tensor})
    sent_type = message(record_type("Voted", {**sent_before.__annotations__, "default": Tensor}))

    def deliver(server: Any, *rest: Any) -> Any:
        return sent_type(*last.broadcast(server, *rest), server.default)

    def aggregate(server: Any, votes: Mapping[ClientId, Vote], *_: Any) -> Any:
        return server._replace(default=torch.tensor(elected(votes)))

    def init_client(broadcast: Any, client: ClientId, seed: int) -> Any:
        known = sent_before(*broadcast[:-1]) if isinstance(broadcast, sent_type) else broadcast
        return calibrated.init_client(known, client, seed)

    ask = Exchange(
        name="vote",
        broadcast=last.broadcast,
        local_update=lambda b, c, data, rng: (c, vote(setup, b, data, rng), NoReport()),
        aggregate=aggregate,
        update_like=lambda _b: Vote(torch.zeros(()), torch.zeros(())),
        broadcast_type=sent_before,
        update_type=Vote,
        rejection=lambda sent, _b: rejection(sent),
    )
    return calibrated._replace(
        server_type=server_type,
        init_server=lambda seed: server_type(*calibrated.init_server(seed), torch.tensor(SHARED)),
        after_rounds=(*calibrated.after_rounds, ask),
        delivery=(*calibrated.delivery[:-1], last._replace(broadcast=deliver, broadcast_type=sent_type)),
        init_client=init_client,
    )


def vote(setup: AlgorithmSetup, sent: Any, opted_in: ClientData, rng: Streams) -> Vote:
    """What the clients of a cohort send; a client that has nothing to train on has no specialist to vote for."""
    fitting, choosing = halves(opted_in.validation, rng)
    offset_SC = training_offset(opted_in.train, setup.num_classes)
    specialist_S = fine_tune(setup, sent, ClientData(opted_in.train, fitting), offset_SC, rng)

    def gain(tree: Any, batch: Any) -> Tensor:
        shared, specialist, offset_C = tree
        losses = [
            negative_log_likelihood(answer(scores_BC, offset_C), batch.y)
            for scores_BC in (shared_scores(setup, shared, batch.x), setup.expert(specialist, batch.x))
        ]
        return (losses[0] - losses[1]).clamp(-LARGEST_GAIN, LARGEST_GAIN)

    gains_SN = setup.personal.per_example(gain, (sent, specialist_S, offset_SC), choosing)
    rows_S = choosing.counts * (opted_in.train.counts > 0)
    real_SN = torch.arange(gains_SN.shape[1]) < rows_S[:, None]
    return Vote((gains_SN * real_SN).sum(1) / rows_S.clamp(min=1), rows_S.float())


def elected(votes: Mapping[ClientId, Vote]) -> int:
    """Every client counts alike; one vote alone has no standard error, and changes nothing."""
    gains = [vote.gain for _, vote in sorted(votes.items()) if vote.num_examples > 0]
    if len(gains) < 2:
        return SHARED
    gains_V = torch.stack(gains)
    error = gains_V.std() / len(gains) ** 0.5
    return SPECIALIST if gains_V.mean() > STANDARD_ERRORS * error else SHARED


def rejection(sent: Vote) -> str | None:
    gain = float(sent.gain)
    return None if abs(gain) <= LARGEST_GAIN else f"its vote of {gain:.4g} is beyond the bound of {LARGEST_GAIN:g}"
