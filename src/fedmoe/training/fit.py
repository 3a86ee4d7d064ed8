"""The one local trainer: a cohort of clients, ragged sizes, several parameter groups, early stopping per client.

Three backends with one meaning. *Native*: compiled kernels for chains of common layers; a client's whole epoch is one
call where the kernels know the loss, and otherwise each step goes through Python, which `fallbacks` reports. *Batched*:
parameters with a client axis and a batched forward by ``vmap``: pays for dense models. *Sequential*: one client at a
time: pays for convolutions on a CPU. They agree to float tolerance; a test says so.

Shape suffixes: S clients, R clients that take this step, P parameters of a group, N examples, B examples of a batch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmoe import trees
from fedmoe.core_types import Examples, Tree
from fedmoe.streams import Streams
from fedmoe.training.backends import Backend
from fedmoe.training.cohort_batches import CohortBatches
from fedmoe.training.corrections import Corrections
from fedmoe.training.devices import CPU, examples_to, index_on, to_device, to_host
from fedmoe.training.early_stopping import Best, EarlyStopping
from fedmoe.training.fallbacks import report_fallback
from fedmoe.training.flat import Layout
from fedmoe.training.gradients import gradient_of_one, gradients_of_many
from fedmoe.training.group import Fitted, Group, Schedule, of_one_client, on_device, rows_of_one
from fedmoe.training.inference import per_example
from fedmoe.training.native_epochs import NativeEpochs, kernel_spec_of, native_epochs
from fedmoe.training.optimizers import descend, init_optimizer_state
from fedmoe.training.privacy import clipped_sums, private_gradients, require_private_training


def fit(
    groups: Mapping[str, Group],
    schedule: Schedule,
    rng: Streams,
    backend: Backend,
    frozen: Tree = None,
    stopping: EarlyStopping | None = None,
    device: torch.device = CPU,
) -> Fitted:
    """Train every client of the cohort on its own. `frozen` is a tree with a client axis that no group changes.

    On another `device` (batched backend) the cohort goes there, and what it comes to comes back.
    """
    frozen = {} if frozen is None else frozen
    if device.type != "cpu":
        there = {name: on_device(group, device) for name, group in groups.items()}
        stopping = stopping and stopping._replace(data=examples_to(stopping.data, device))
        trained = _Cohort(there, schedule, rng, backend, to_device(frozen, device), stopping).train()
        return Fitted(*to_host(tuple(trained)))
    if backend != "sequential":
        return _Cohort(groups, schedule, rng, backend, frozen, stopping).train()
    parts = []
    for s, client in enumerate(rng.clients):
        alone = {name: of_one_client(group, s) for name, group in groups.items()}
        stop = stopping._replace(data=rows_of_one(stopping.data, s)) if stopping else None
        here = rng._replace(clients=(client,))
        with torch.random.fork_rng(devices=[]):  # a module's own dropout draws here, and leaves no trace
            torch.manual_seed(here.seeds("module")[0])
            frozen_of_one = trees.tree_map(lambda leaf, s=s: leaf[s : s + 1], frozen)
            parts.append(_Cohort(alone, schedule, here, backend, frozen_of_one, stop).train())
    return trees.tree_map(lambda *leaf: torch.cat(leaf), parts[0], *parts[1:])


class _Cohort:
    """The state of one training run; clients that have stopped are no longer computed."""

    def __init__(
        self,
        groups: Mapping[str, Group],
        schedule: Schedule,
        rng: Streams,
        backend: Backend,
        frozen: Tree,
        stopping: EarlyStopping | None,
    ) -> None:
        self.groups, self.schedule, self.backend = groups, schedule, backend
        self.rng, self.privacy = rng, rng.private_steps
        if self.privacy:
            require_private_training(groups, stops_early=stopping is not None)
        self.frozen, self.stopping = frozen, stopping
        self.layouts = {name: Layout.of(group.params) for name, group in groups.items()}
        self.flat = {name: self.layouts[name].pack(group.params) for name, group in groups.items()}
        self.optimizer_state = {
            name: init_optimizer_state(group.optimizer, self.flat[name]) for name, group in groups.items()
        }
        self.corrections = {
            name: Corrections.of(
                group.proximal,
                group.gradient_offset,
                group.trained_names,
                group.max_gradient_norm,
                self.layouts[name],
                self.flat[name],
            )
            for name, group in groups.items()
        }
        self.size, self.device = len(rng.clients), next(iter(self.flat.values())).device
        self.steps_S = self._steps_per_epoch()
        self.taken_S = [0] * self.size
        self.rates = {name: self._rates(group, rng) for name, group in groups.items() if group.rates}
        self.native = self._native_epochs(rng) if backend == "native" and not self.privacy else None
        self.batches = None if self.native else CohortBatches(groups, schedule.batch_size, rng, self.device)
        if backend == "sequential" and not self.privacy:
            # Views of the rows that are trained in place: made once, seen anew by each step.
            self.leaves = {
                name: _leaves(self.layouts[name], self.flat[name][0], group.trained_names)
                for name, group in groups.items()
            }
            self.grads = {name: torch.empty_like(flat) for name, flat in self.flat.items()}
            self.frozen_of_one = trees.pick(frozen, 0)
        self.loss_S, self.epochs_S = torch.zeros(self.size, device=self.device), torch.zeros(self.size)

    def _native_epochs(self, rng: Streams) -> NativeEpochs | None:
        spec = kernel_spec_of(self.groups, self.frozen)
        if isinstance(spec, str):
            report_fallback(spec)
            return None
        first = next(iter(self.groups))
        state, corrections = self.optimizer_state[first], self.corrections[first]
        rates_S, batch_size = self.rates.get(first), self.schedule.batch_size
        return native_epochs(self.groups, spec, self.layouts, self.flat, state, corrections, rates_S, batch_size, rng)

    def train(self) -> Fitted:
        epochs = self.schedule.passes
        still_training = [s for s in range(self.size) if self.steps_S[s]]
        best = Best(self.size, self.stopping) if self.stopping else None
        if best and still_training:
            still_training = best.keep(still_training, self.flat, self.validation_losses(still_training))
        for epoch in range(1, epochs + 1):
            if not still_training:
                break
            self.run_epoch(still_training)
            self.epochs_S[slice(None) if len(still_training) == self.size else still_training] += 1
            if best and (epoch % best.every == 0 or epoch == epochs):
                still_training = best.keep(still_training, self.flat, self.validation_losses(still_training))
        flat = best.restore(self.flat) if best else self.flat
        params = {name: self.layouts[name].unpack(flat[name]) for name in self.groups}
        return Fitted(params, self.loss_S, self.epochs_S)

    def run_epoch(self, still_training: list[int]) -> None:
        if self.native:
            losses = self.native.run(still_training, self.steps_S, self.taken_S)
            self.loss_S[self.at(still_training)] = torch.tensor(losses) / torch.tensor(
                [self.steps_S[s] for s in still_training]
            )
            for s in still_training:
                self.taken_S[s] += self.steps_S[s]
            return
        self.loss_S[self.at(still_training)] = 0
        for step in range(max(self.steps_S[s] for s in still_training)):
            self.step([s for s in still_training if step < self.steps_S[s]])
        steps = to_device(torch.tensor([self.steps_S[s] for s in still_training]), self.device)
        self.loss_S[self.at(still_training)] /= steps

    def at(self, rows: list[int]) -> list[int] | slice | Tensor:
        """These clients, as an index to tensors with a client axis."""
        if len(rows) == self.size:
            return slice(None)  # a list costs ten times a slice
        return rows if self.device.type == "cpu" else index_on(self.device, rows)

    def of(self, tree: Tree, rows: list[int]) -> Tree:
        """What these clients have of it: itself where they are all."""
        if len(rows) == self.size:
            return tree
        at = self.at(rows)
        return trees.tree_map(lambda leaf: leaf[at], tree)

    def step(self, rows: list[int]) -> None:
        """Gradients of all groups at the same point, then all groups move."""
        at, everyone, point = self.at(rows), len(rows) == self.size, self.of(self.flat, rows)
        gradients = self.private_gradients if self.privacy else self.gradients
        grads = {name: gradients(name, point, rows) for name in self.groups}
        for s in rows:
            self.taken_S[s] += 1
        counts = [self.taken_S[s] for s in rows]
        count = counts[0] if len(set(counts)) == 1 else to_device(torch.tensor(counts), self.device)[:, None]
        for name, group in self.groups.items():
            self.corrections[name].apply(grads[name], point[name], at)
            own = self.optimizer_state[name]
            state = self.of(own, rows)
            rate, untrained_P = self.rate(name, rows), self.corrections[name].untrained_P
            descend(group.optimizer, point[name], grads[name], state, count, rate, untrained_P)
            if not everyone:
                self.flat[name][at] = point[name]
                for key, tensor in state.items():
                    own[key][at] = tensor

    def rate(self, name: str, rows: list[int]) -> float | Tensor:
        """Of the step that has just been counted: a number, or (R, 1) where clients are differently far."""
        if name not in self.rates:
            return self.groups[name].optimizer.learning_rate
        rates = [float(self.rates[name][s][self.taken_S[s] - 1]) for s in rows]
        return rates[0] if len(set(rates)) == 1 else to_device(torch.tensor(rates), self.device)[:, None]

    def gradients(self, name: str, point: dict[str, Tensor], rows: list[int]) -> Tensor:
        assert self.batches is not None
        group, indices = self.groups[name], self.batches.next_rows(name, rows)
        if self.backend == "sequential":
            batch = self.batches.of_one(name, rows[0], indices[0])
            grad, own = self.grads[name], self.leaves[name]
            loss = gradient_of_one(group.loss, group.batch_term, own, self.leaves, self.frozen_of_one, batch, grad)
        else:
            batches, real_RB = self.batches.of_many(name, rows, indices)
            frozen = self.of(self.frozen, rows)
            many = (name, group.loss, group.batch_term, self.layouts, point, frozen, batches, real_RB)
            loss, grad = gradients_of_many(*many)
        if name == next(iter(self.groups)):
            self.loss_S.index_add_(0, index_on(self.device, rows), loss)
        return grad

    def private_gradients(self, name: str, point: dict[str, Tensor], rows: list[int]) -> Tensor:
        """DP-SGD: Poisson batches, clipped gradients of single examples, noise. No loss is told: it has no noise."""
        assert self.privacy is not None and self.batches is not None
        group, clients = self.groups[name], [self.rng.clients[s] for s in rows]
        trained = self.layouts[name].names if group.trained_names is None else group.trained_names
        sensitivity = self.privacy.mechanism.sensitivity(len(trained))
        numbers = [self.privacy.begin_step(client, sensitivity) for client in clients]
        indices = [
            self.privacy.sampled_rows(client, number, int(group.data.counts[s]))
            for client, number, s in zip(clients, numbers, rows, strict=True)
        ]
        batches, real_RB = self.batches.of_many(name, rows, indices)
        sums_RP = clipped_sums(
            name, group.loss, self.layouts, point, self.of(self.frozen, rows), batches, real_RB, self.privacy.mechanism,
            self.corrections[name].untrained_P,
        )  # fmt: skip
        self.loss_S[rows] = torch.nan
        return private_gradients(self.privacy, clients, numbers, sums_RP, sensitivity)

    def validation_losses(self, still_training: list[int]) -> Tensor:
        """Mean validation loss per client that is still training; -inf, always the best, for one without examples."""
        assert self.stopping is not None
        loss = self.stopping.loss
        every = self.stopping.data
        x, y, extra, flat, frozen = self.of((every.x, every.y, every.extra, self.flat, self.frozen), still_training)
        data = Examples(x, y, every.counts[still_training], extra)
        params = {name: self.layouts[name].unpack(rows) for name, rows in flat.items()}
        losses = per_example(lambda tree, batch: loss(tree[0], tree[1], batch), (params, frozen), data, self.backend)
        mean_S: Tensor = to_host(losses.sum(1)) / data.counts
        return mean_S.masked_fill(data.counts == 0, -torch.inf)

    def _rates(self, group: Group, rng: Streams) -> list[Tensor]:
        """Of each client at each of its steps, float64."""
        assert group.rates is not None
        number = rng.round if rng.in_rounds else None
        shares_S = [group.rates.shares(number, self.schedule.passes * steps) for steps in self.steps_S]
        return [group.optimizer.learning_rate * shares for shares in shares_S]

    def _steps_per_epoch(self) -> list[int]:
        """Groups step together, so a client that lacks examples for one of them takes no step."""
        if self.privacy:  # public, for everybody alike: how many records a client has is not told
            per_epoch = self.privacy.mechanism.steps_per_epoch
            return [per_epoch if self.schedule.steps is None else self.schedule.steps] * self.size
        counts_GS = [group.data.counts.tolist() for group in self.groups.values()]
        able_S = [all(counts) for counts in zip(*counts_GS, strict=True)]
        if self.schedule.steps is not None:
            return [self.schedule.steps if able else 0 for able in able_S]
        batch_size = self.schedule.batch_size
        return [-(-count // batch_size) if able else 0 for count, able in zip(counts_GS[0], able_S, strict=True)]


def _leaves(layout: Layout, row_P: Tensor, trained_names: frozenset[str] | None) -> Tree:
    """Views of a client's vector. Where only some are trained, autograd need not go further than these."""
    named = trees.to_named(layout.unpack(row_P))
    return trees.nested(
        {
            name: view.detach().requires_grad_(trained_names is None or name in trained_names)
            for name, view in named.items()
        }
    )
