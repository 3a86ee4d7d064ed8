"""How a client scores itself: each of its models, on each part of its data, by each answer that its algorithm gives.

Nothing is sent or kept here: the worker decides what becomes of the scores.
"""

from typing import NamedTuple

import torch

from fedmoe.assembly import Parts
from fedmoe.clients.federation import take
from fedmoe.core_types import ClientId, Examples, Tree
from fedmoe.evaluation.metrics import Measured, Score, score_examples
from fedmoe.evaluation.score_message import VALIDATION
from fedmoe.streams import torch_stream
from fedmoe.training.devices import predicting_on
from fedmoe.training.inference import clients_of


class Trained(NamedTuple):
    """What one client predicts with; `personal` is none before personalisation."""

    shared: Tree
    state: Tree
    personal: Tree | None


class Scorer:
    def __init__(self, parts: Parts) -> None:
        self.algorithm, self.federation = parts.algorithm, parts.federation
        self.metrics, self.task, self.device = parts.metrics, parts.task, parts.device
        self.seed = parts.config.seed

    def scores(self, client: ClientId, shared: Tree, state: Tree, final: Tree | None) -> list[Score]:
        """Before and, where there is a final state, after personalisation."""
        trains = self.algorithm.round or self.algorithm.after_rounds or self.algorithm.personalize is None
        models = {"before": Trained(shared, state, None)} if trains else {}
        if final is not None:
            models["after"] = Trained(shared, state, final)
        return [
            self._score(client, name, model, trained, data, rows)
            for model, trained in models.items()
            for data, rows in self._test_parts(client).items()
            for name, answer in self.algorithm.scored_answers.items()
            if len(rows.y) and model in answer.models and data in answer.data
        ]

    def validation_scores(self, client: ClientId, shared: Tree, state: Tree) -> list[Score]:
        """On opted-in validation records alone, before personalisation; none without such records."""
        (rows,) = clients_of(self.federation.data([client], opted_in_only=True).validation)
        if not len(rows.y):
            return []
        trained = Trained(shared, state, None)
        predict = predicting_on(self.device, self.algorithm.predict, *trained)
        found = self._with_own_metrics(score_examples(predict, rows, self.metrics, self.task), trained, rows)
        return [Score(client, False, "before", VALIDATION, *found[:4], reliability=found.reliability)]

    def _test_parts(self, client: ClientId) -> dict[str, Examples]:
        pooled, validates = client == self.federation.pooled, self.federation.validates(client)
        own = "pooled" if pooled else "tuning" if validates else "own"
        parts = {own: self.federation.load(client).test, "global": self.federation.global_test}
        if self.federation.global_validation is not None:
            parts["global_validation"] = self.federation.global_validation
        return parts

    def _score(self, client: ClientId, name: str, model: str, trained: Trained, data: str, rows: Examples) -> Score:
        """Questions answered together are drawn by the seed: in the order of the data, labels may be sorted."""
        answer = self.algorithm.scored_answers[name]
        if answer.batch_size:
            rows = take(rows, torch.randperm(len(rows.y), generator=torch_stream(self.seed, "questions", client, data)))
        predict = predicting_on(self.device, answer.predict, *trained)
        found = score_examples(predict, rows, self.metrics, self.task, answer.batch_size)
        found = self._with_own_metrics(found, trained, rows)
        choice = self.algorithm.choice if answer.is_candidate else None
        chosen = choice is not None and choice(trained.personal) == name
        unseen = client >= self.federation.num_clients
        return Score(client, unseen, model, data, *found[:4], name, chosen, found.reliability)

    def _with_own_metrics(self, found: Measured, trained: Trained, rows: Examples) -> Measured:
        """The algorithm's own metrics beside the others."""
        if self.algorithm.measure is None:
            return found
        own = self.algorithm.measure(*trained, rows)
        return found._replace(metrics={**found.metrics, **{name: float(own[name]) for name in self.algorithm.measured}})
