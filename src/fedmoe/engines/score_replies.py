"""Scores as clients sent them: read, checked, and counted apart from what trains."""

from collections.abc import Collection, Sequence

from fedmoe import trees, wire
from fedmoe.core_types import ClientId
from fedmoe.encoding import Bytes
from fedmoe.engines.frames import Cohort
from fedmoe.engines.manifest import Manifest
from fedmoe.engines.replies import read_groups, shown_reason
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.score_message import ScoreMessage, scores_in

MAX_BYTES = 4096  # of one client's scores: a handful of numbers for each of the answers that are scored
MAX_METRIC_BYTES = 512  # of each metric beside them, its name not counted


def read_scores(
    cohort: Cohort,
    reply_to: str,
    frame: Bytes,
    manifest: Manifest,
    step: int,
    num_clients: int,
    metrics: Collection[str] = (),
    answers: Sequence[str] = ("",),
) -> list[Score]:
    """The scores of the cohort's clients, whatever the frame holds; a client whose scores are no scores has none."""
    scores: dict[ClientId, list[Score]] = {}
    reason = "it sent no scores"
    max_bytes = len(answers) * (MAX_BYTES + sum(MAX_METRIC_BYTES + len(name.encode()) for name in metrics))
    try:
        groups, blobs = read_groups(frame, reply_to, len(cohort.clients))
        for group, blob in zip(groups, blobs, strict=True):
            (client,) = group
            if client in cohort.clients and client not in scores and len(blob) <= max_bytes:
                sent = wire.decode(ScoreMessage, blob)
                unseen = client >= num_clients
                scores[client] = scores_in(sent, client, unseen=unseen, metrics=metrics, answers=answers)
                manifest.count_scores(client, trees.to_named(sent))
    except Exception as error:  # what a client sent must not end the run
        reason = shown_reason(error)
    for client in cohort.clients:
        if client not in scores:
            manifest.reject(step, "score", client, reason)
    return [score for client in sorted(scores) for score in scores[client]]
