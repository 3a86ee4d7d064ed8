"""Just-in-time personalisation (Dun et al. 2023): the right experts of a finished run for a client nobody has seen.

It goes the way that every client goes at the end of a run: the router comes down, the client chooses by its unlabelled
rows, and the chosen experts come down. No label is asked for, and there is none to read.
Shape suffixes: N rows, B a batch, M all experts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.clients.per_example_cache import PerExampleCache
from fedmoe.core_types import ClientData, Examples, Tree
from fedmoe.deployment.predictions import BATCH, Predictions, reader_of
from fedmoe.errors import RunError
from fedmoe.evaluation.metrics import Score
from fedmoe.loading import load
from fedmoe.models.common_expert import CommonExpert
from fedmoe.models.router import best_held, confidence
from fedmoe.result import Result
from fedmoe.streams import Streams

NOBODY = "there are no clients for tuning in this run (split.num_validation), so no threshold is known"


class Onboarded(NamedTuple):
    """What a new client is given."""

    scores_M: list[float]  # the router's mean score of each expert over the rows
    experts: list[int]  # those that were sent, best first
    confidence: float  # what the router gives to the expert that answers, mean over the rows
    threshold: float | None  # below it the common expert answers; None: it never does
    fell_back: bool
    why: str  # why it did or did not, in words
    bytes_sent: dict[str, int]  # down by part, and the choice up
    answered_by: list[str]  # for each row: "expert 3", or "common expert"
    predictions: Predictions

    def facts(self) -> dict[str, str]:
        """In words: which experts were sent, how sure the router is of them, and what that cost."""
        parts = ", ".join(f"{part} {size:,}" for part, size in self.bytes_sent.items())
        return {
            "scores": ", ".join(f"expert {m}: {score:.3f}" for m, score in enumerate(self.scores_M)),
            "sent": ", ".join(f"expert {m}" for m in self.experts),
            "confidence": f"{self.confidence:.3f}; {self.why}",
            "bytes": f"{sum(self.bytes_sent.values()):,} ({parts})",
        }

    def columns(self) -> dict[str, list[Any]]:
        return {"class": self.predictions.classes, "by": self.answered_by, **self.predictions.columns()}


def onboard(run: Result | str | Path, data: Any, **given: Any) -> Onboarded:
    """`data`: a file as `fedmoe predict` reads it, or x of shape (N, *input shape). `given`: as for `fedmoe.load`."""
    result = run if isinstance(run, Result) else load(run, **given)
    predictor, common = _routed(result)
    reader = reader_of(result)
    x = reader.file(Path(data)) if isinstance(data, str | Path) else reader.array(np.asarray(data))
    parts = result.session.parts
    client = parts.federation.num_clients + parts.federation.num_unseen
    sent, delivered = deliver(predictor, result.session.server, x, client, parts.config.seed)
    scores_of = predictor.router_scores
    assert scores_of is not None
    with torch.no_grad():
        log_scores_NM = torch.cat([scores_of(delivered, part) for part in x.split(BATCH)])
        sure = float(confidence(log_scores_NM, delivered.expert_ids).double().mean())
        threshold = fallback_threshold(result.scores)
        fell_back, why = _falls_back(sure, threshold, common)
        answers = [
            common.log_probs(part) if fell_back else predictor.predict(delivered, None, None, part)
            for part in x.split(BATCH)
        ]
    place_N = best_held(log_scores_NM, delivered.expert_ids)
    by = [f"expert {m}" for m in delivered.expert_ids[place_N].tolist()]
    return Onboarded(
        scores_M=log_scores_NM.exp().double().mean(0).tolist(),
        experts=delivered.expert_ids.tolist(),
        confidence=sure,
        threshold=threshold,
        fell_back=fell_back,
        why=why,
        bytes_sent={**sent, "common expert": _bytes(common.constants)},
        answered_by=["common expert"] * len(x) if fell_back else by,
        predictions=Predictions(torch.cat(answers).exp().numpy(), parts.class_names),
    )


def deliver(algorithm: Algorithm, server: Tree, x: Tensor, client: int, seed: int) -> tuple[dict[str, int], Any]:
    """The exchanges that end every run, with one client and its inputs alone; bytes by part, and the last broadcast."""
    rows = Examples(x, torch.zeros(len(x), dtype=torch.int64), torch.tensor(len(x)), {})
    embedded = PerExampleCache(algorithm.once_of_examples)(client, "unlabelled", rows)
    inputs = trees.tree_map(lambda leaf: leaf[None], embedded)
    no_extra = {name: tensor[:, :0] for name, tensor in inputs.extra.items()}
    nothing = Examples(inputs.x[:, :0], inputs.y[:, :0], torch.zeros(1, dtype=torch.int64), no_extra)
    data = ClientData(nothing, nothing, lambda: inputs)
    *questions, last = algorithm.delivery
    updates: list[Any] = []
    sent: dict[str, int] = {}
    for question in questions:
        broadcast = question.broadcast(server, client, updates)
        state_S = trees.stack([algorithm.init_client(broadcast, client, seed)])
        rng = Streams(seed, f"delivery:{question.name}", 0, (client,))
        _, update_S, _ = question.local_update(trees.stack([broadcast]), state_S, data, rng)
        updates.append(trees.pick(update_S, 0))
        sent = {"router": _bytes(broadcast), "choice, up": _bytes(updates[-1])}
    delivered = last.broadcast(server, client, updates)
    return {**sent, "experts": _bytes(delivered.experts)}, delivered


def fallback_threshold(scores: Sequence[Score]) -> float | None:
    """The confidence below which the common expert did better, on the clients for tuning; None where there are none.

    Of all cuts between their confidences the one that would have given the highest mean accuracy, the lowest of those.
    """
    final = "after" if any(score.model == "after" for score in scores) else "before"
    known = [
        (score.metrics["confidence"], score.accuracy, score.metrics["common_accuracy"])
        for score in scores
        if score.data == "tuning" and score.model == final and {"confidence", "common_accuracy"} <= score.metrics.keys()
    ]
    if not known:
        return None

    def mean_accuracy(threshold: float) -> float:
        return sum(routed if sure >= threshold else common for sure, routed, common in known) / len(known)

    cuts = [0.0, *(float(np.nextafter(sure, 2.0)) for sure, _, _ in sorted(known))]
    return max(cuts, key=lambda cut: (mean_accuracy(cut), -cut))


def _falls_back(sure: float, threshold: float | None, common: CommonExpert) -> tuple[bool, str]:
    if threshold is None:
        return False, f"{NOBODY}: the experts answer"
    if sure >= threshold:
        return False, f"the router is confident ({sure:.3f}, threshold {threshold:.3f}): the experts answer"
    if not common.can_predict:
        return False, (
            f"the router is not confident ({sure:.3f}, threshold {threshold:.3f}), but the common expert has no output "
            "layer: the experts answer all the same"
        )
    return True, f"the router is not confident ({sure:.3f}, threshold {threshold:.3f}): the common expert answers"


def _routed(result: Result) -> tuple[Algorithm, CommonExpert]:
    parts = result.session.parts
    predictor = parts.predictor()
    common = parts.setup.common
    if predictor.algorithm.router_scores is None or common is None:
        raise RunError(
            f"{result.directory} was trained with {parts.title}, which has no router to choose experts for a new "
            "client. Onboard with a run of 'fedjets', or use 'fedmoe predict' for a client of this run."
        )
    return predictor.algorithm, common


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in trees.leaves(tree))
