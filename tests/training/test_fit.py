"""Most problems here have one weight, so that a person can compute the answer."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmoe import trees
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.batches import shuffled
from fedmoe.training.classifier import ClassifierLoss
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.group import Group, Schedule
from fedmoe.training.optimizers import Adam, Sgd

BACKENDS = ["sequential", "batched"]


def streams(size, first=0):
    return Streams(0, "test", 1, tuple(range(first, first + size)))


def targets(*clients):
    """One client per list; each number is an example."""
    return side_by_side([examples(torch.tensor(list(map(float, t))), torch.zeros(len(t)).long()) for t in clients])


def weight(*values):
    return {"w": torch.tensor([float(v) for v in values])}


def squared_distance(trainable, _frozen, batch):
    return (trainable["model"]["w"] - batch.x) ** 2


def slope_one(trainable, _frozen, batch):
    """Every step of Sgd(1) takes 1 off the weight, so that the weight counts steps."""
    return trainable["model"]["w"].expand(len(batch.x))


def points(size, seed):
    rng = torch.Generator().manual_seed(seed)
    return examples(torch.randn(size, 3, generator=rng), torch.randint(0, 2, (size,), generator=rng))


def linear():
    return Network(lambda: nn.Linear(3, 2))


def starts(network, size):
    return trees.stack([network.init(seed) for seed in range(size)])


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    held_out=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    schedule=st.builds(Schedule, st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, None, 5])),
    optimizer=st.sampled_from([Sgd(0.3), Sgd(0.1, 0.9), Adam(0.03, epsilon=1e-3)]),
    patience=st.sampled_from([None, 1, 2]),
    extras=st.booleans(),
)
def test_batched_equals_sequential(sizes, held_out, schedule, optimizer, patience, extras):
    """Ragged clients, two groups that read each other, noise, a term per batch, frozen parts, early stopping."""
    network, clients = linear(), len(sizes)
    train = side_by_side([points(size, seed) for seed, size in enumerate(sizes)])
    validation = side_by_side([points(held_out[seed], 50 + seed) for seed in range(clients)])

    def main_loss(trainable, frozen, batch):
        scores = network(trainable["model"], batch.x + batch.extra.get("noise", 0.0))
        return F.cross_entropy(scores * trainable["scale"]["w"] + frozen["shift"], batch.y, reduction="none")

    def scale_loss(trainable, _frozen, batch):
        return (network(trainable["model"], batch.x).sum(1) - trainable["scale"]["w"]) ** 2

    def spread(trainable, _frozen, batch, real):
        scores = network(trainable["model"], batch.x)[:, 0]
        mean = (scores * real).sum() / real.sum()
        return 0.1 * ((scores - mean) ** 2 * real).sum()

    groups = {
        "model": Group(
            starts(network, clients), main_loss, train, optimizer,
            batch_term=spread if extras else None,
            noise=(lambda rng, size: {"noise": torch.randn(size, 3, generator=rng)}) if extras else None,
        ),
        "scale": Group(weight(*[1.0] * clients), scale_loss, train, Sgd(0.05)),
    }  # fmt: skip
    frozen = {"shift": torch.linspace(-1, 1, 2 * clients).view(clients, 2)}
    stopping = EarlyStopping(main_loss, validation, patience) if patience else None
    one, other = (fit(groups, schedule, streams(clients), backend, frozen, stopping) for backend in BACKENDS)
    for a, b in zip(trees.leaves(one), trees.leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(one.epochs_S, other.epochs_S)
    for s, size in enumerate(sizes):
        if not size:
            assert torch.equal(other.params["model"]["weight"][s], groups["model"].params["weight"][s])
            assert other.epochs_S[s] == other.loss_S[s] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ours", "theirs"), [(Sgd(0.1, 0.9), torch.optim.SGD), (Adam(0.01), torch.optim.Adam)])
def test_training_is_plain_training_with_torch_optim(backend, ours, theirs):
    network, data, client = linear(), points(7, 3), 4
    module = nn.Linear(3, 2)
    module.load_state_dict(network.init(0))
    settings_of = {"lr": 0.1, "momentum": 0.9} if isinstance(ours, Sgd) else {"lr": 0.01}
    optimizer = theirs(module.parameters(), **settings_of)
    batches = shuffled(streams(1, client).generators("batches")[0], 7, 3)
    losses = []
    for _ in range(4 * 3):
        index = next(batches)
        loss = F.cross_entropy(module(data.x[index]), data.y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    group = Group(starts(network, 1), ClassifierLoss(network), side_by_side([data]), ours)
    fitted = fit({"model": group}, Schedule(3, epochs=4), streams(1, client), backend)
    for name, expected in module.named_parameters():
        torch.testing.assert_close(fitted.params["model"][name][0], expected, rtol=1e-5, atol=1e-6)
    assert fitted.loss_S[0].item() == pytest.approx(sum(losses[-3:]) / 3, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_does_not_change_an_update(backend):
    network, data = linear(), side_by_side([points(5, 0), points(2, 1)])
    rubbish = torch.full((2, 4, 3), 1e6)
    padded = data._replace(x=torch.cat([data.x, rubbish], 1), y=torch.cat([data.y, torch.ones(2, 4).long()], 1))
    padded.x[1, 2:] = 1e6

    def train(examples_S):
        group = Group(starts(network, 2), ClassifierLoss(network), examples_S, Sgd(0.5))
        stop = EarlyStopping(group.loss, examples_S, patience=2)
        return fit({"model": group}, Schedule(2, epochs=3), streams(2), backend, stopping=stop)

    for a, b in zip(trees.leaves(train(data)), trees.leaves(train(padded)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_client_trains_the_same_whoever_else_is_in_the_cohort(backend):
    network = linear()
    parts = [points(size, size) for size in (6, 3, 8)]
    group = Group(starts(network, 3), ClassifierLoss(network), side_by_side(parts), Adam(0.05))
    together = fit({"model": group}, Schedule(2, epochs=2), streams(3), backend)
    lone = group._replace(params=trees.tree_map(lambda leaf: leaf[1:2], group.params), data=side_by_side([parts[1]]))
    alone = fit({"model": lone}, Schedule(2, epochs=2), streams(1, 1), backend)
    torch.testing.assert_close(together.params["model"]["weight"][1], alone.params["model"]["weight"][0])


@pytest.mark.parametrize("backend", BACKENDS)
class TestEarlyStopping:
    """The weight walks from 0 to 8 by halves of the distance: 4, 6, 7, 7.5, ...; validation wants it elsewhere."""

    def fit(self, backend, *validation, patience=2, epochs=10, every=1):
        size = len(validation)
        group = Group(weight(*[0] * size), squared_distance, targets(*[[8]] * size), Sgd(0.25))
        stopping = EarlyStopping(squared_distance, targets(*validation), patience, every)
        return fit({"model": group}, Schedule(1, epochs), streams(size), backend, stopping=stopping)

    def test_the_best_copy_is_returned_and_not_the_last(self, backend):
        fitted = self.fit(backend, [3.9])
        assert fitted.params["model"]["w"].tolist() == [4]
        assert fitted.epochs_S.tolist() == [3]  # one good epoch, then two without a better loss

    def test_each_client_stops_on_its_own(self, backend):
        fitted = self.fit(backend, [3.9], [7.1], [-1], [100])
        assert fitted.params["model"]["w"][:3].tolist() == [4, 7, 0]
        assert fitted.params["model"]["w"][3] == pytest.approx(8 - 8 / 2**10)
        assert fitted.epochs_S.tolist() == [3, 5, 2, 10]

    def test_a_model_that_only_gets_worse_stays_where_it_started(self, backend):
        assert self.fit(backend, [-5]).params["model"]["w"].tolist() == [0]

    def test_without_validation_examples_a_client_trains_to_the_end(self, backend):
        fitted = self.fit(backend, [], [3.9])
        assert fitted.epochs_S.tolist() == [10, 3]
        assert fitted.params["model"]["w"][0] == pytest.approx(8 - 8 / 2**10)

    def test_checks_may_be_rare(self, backend):
        """Looks after epochs 3, 6, 9 and the last: 7, 7.875, ... of which 7 is best for 6.5."""
        fitted = self.fit(backend, [6.5], every=3, patience=1)
        assert fitted.params["model"]["w"].tolist() == [7] and fitted.epochs_S.tolist() == [6]

    def test_the_mean_is_over_real_examples(self, backend):
        """Padded with zeros, the second client's single 7.1 must not look like a wish for less."""
        fitted = self.fit(backend, [3.9] * 6, [7.1])
        assert fitted.params["model"]["w"].tolist() == [4, 7]

    def test_the_best_copy_is_not_overwritten_by_later_steps(self, backend):
        fitted = self.fit(backend, [3.9], patience=9)
        assert fitted.params["model"]["w"].tolist() == [4] and fitted.epochs_S.tolist() == [10]


def test_a_client_that_stopped_is_no_longer_trained():
    calls = []

    def counted(trainable, frozen, batch):
        calls.append(len(batch))
        return squared_distance(trainable, frozen, batch)

    group = Group(weight(0), counted, targets([8]), Sgd(0.25))
    stopping = EarlyStopping(squared_distance, targets([3.9]), patience=2)
    fit({"model": group}, Schedule(1, 50), streams(1), "sequential", stopping=stopping)
    assert len(calls) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_epochs_are_passes_over_a_clients_own_rows(backend):
    group = Group(weight(0, 0, 0), slope_one, targets([1] * 5, [1], []), Sgd(1.0))
    fitted = fit({"model": group}, Schedule(2, epochs=4), streams(3), backend)
    assert fitted.params["model"]["w"].tolist() == [-12, -4, 0]
    assert fitted.epochs_S.tolist() == [4, 4, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_of_steps_replaces_epochs_for_every_client_with_data(backend):
    group = Group(weight(0, 0, 0), slope_one, targets([1] * 5, [1], []), Sgd(1.0))
    fitted = fit({"model": group}, Schedule(2, epochs=4, steps=7), streams(3), backend)
    assert fitted.params["model"]["w"].tolist() == [-7, -7, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_take_their_gradients_at_the_same_point(backend):
    """Two weights that chase each other by halves meet in the middle; one after the other they would not."""

    def towards(other):
        return lambda trainable, _frozen, batch: (
            (trainable["a"]["w"] - trainable["b"]["w"]) ** 2 + 0 * batch.x + 0 * trainable[other]["w"]
        )

    groups = {
        "a": Group(weight(0), towards("b"), targets([1]), Sgd(0.25)),
        "b": Group(weight(1), towards("a"), targets([1]), Sgd(0.25)),
    }
    fitted = fit(groups, Schedule(1), streams(1), backend)
    assert fitted.params["a"]["w"].tolist() == [0.5] == fitted.params["b"]["w"].tolist()


def test_groups_with_equal_data_see_equal_batches():
    seen = {"a": [], "b": []}

    def spy(name):
        def loss(trainable, _frozen, batch):
            seen[name].append(batch.x.tolist())
            return trainable[name]["w"] + 0 * batch.x

        return loss

    data = targets(range(7))
    fit({name: Group(weight(0), spy(name), data, Sgd(1.0)) for name in seen}, Schedule(3, 2), streams(1), "sequential")
    assert seen["a"] == seen["b"] and len(seen["a"]) == 6
    for epoch in (seen["a"][:3], seen["a"][3:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_parts_are_read_but_never_changed(backend):
    frozen = {"pull": torch.tensor([2.0, 4.0])}

    def loss(trainable, frozen, batch):
        return (trainable["model"]["w"] - frozen["pull"]) ** 2 + 0 * batch.x

    start = weight(0, 0)
    group = Group(start, loss, targets([1], [1]), Sgd(0.25))
    fitted = fit({"model": group}, Schedule(1), streams(2), backend, frozen)
    assert fitted.params["model"]["w"].tolist() == [1, 2]
    assert frozen["pull"].tolist() == [2, 4] and frozen["pull"].grad is None
    assert start["w"].tolist() == [0, 0]  # what is trained is never the sender's tensor


def test_dropout_trains_deterministically_and_leaves_the_global_generator_alone():
    network = Network(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    group = Group(starts(network, 2), ClassifierLoss(network), side_by_side([points(6, 0), points(4, 1)]), Sgd(0.3))

    def train(global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        fitted = fit({"model": group}, Schedule(2, epochs=2), streams(2), "sequential")
        assert torch.equal(before, torch.get_rng_state())
        return fitted.params["model"]["0.weight"]

    assert torch.equal(train(1), train(2))
    off = Network(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Linear(8, 2)))
    plain = group._replace(loss=ClassifierLoss(off))
    without = fit({"model": plain}, Schedule(2, epochs=2), streams(2), "sequential").params["model"]["0.weight"]
    assert not torch.allclose(train(1), without)


def test_a_module_that_cannot_be_batched_says_what_to_do():
    network = Network(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)))
    group = Group(starts(network, 2), ClassifierLoss(network), side_by_side([points(3, 0), points(3, 1)]), Sgd(0.3))
    with pytest.raises(ConfigError, match=r"cannot be trained batched.*engine.backend = 'sequential'"):
        fit({"model": group}, Schedule(2), streams(2), "batched")


@given(count=st.integers(1, 30), batch_size=st.integers(1, 12), seed=st.integers(0, 2**40))
def test_every_row_is_visited_once_per_epoch(count, batch_size, seed):
    batches = shuffled(torch.Generator().manual_seed(seed), count, batch_size)
    for _ in range(3):
        epoch = [next(batches) for _ in range(-(-count // batch_size))]
        assert torch.cat(epoch).sort().values.tolist() == list(range(count))
        assert all(len(batch) == batch_size for batch in epoch[:-1])


def test_epochs_are_reshuffled_and_nobody_without_rows_is_asked():
    batches = shuffled(torch.Generator().manual_seed(0), 20, 20)
    assert next(batches).tolist() != next(batches).tolist()
    assert list(shuffled(torch.Generator(), 0, 5)) == []
