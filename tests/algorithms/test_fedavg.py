import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from builders import run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.aggregation.server_optimizer import ServerOptimizer, init_moments, server_step
from fedmoe.algorithms.algorithm import Nothing, uniform_sample
from fedmoe.algorithms.fedavg import (
    DIVERGED_LOSS,
    Broadcast,
    FedAvgConfig,
    ServerState,
    Update,
    ValidationUpdate,
    aggregate,
    fedavg,
    init_server,
    keep_best,
    send_best_model,
    send_model,
)
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.storage.checkpoints import Checkpoint, load_newest, save_checkpoint
from fedmoe.streams import Streams
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

EXPERT = Network(lambda: mlp((3,), 2, (4,)), "expert")
GATE = Network(lambda: mlp((3,), 1, (4,)), "gate")


def setup(backend="sequential", **plan):
    federated = LocalTraining(**{"epochs": 2, "batch_size": 3, "learning_rate": 0.05, **plan})
    other = LocalTrainer(LocalTraining(), backend)
    return AlgorithmSetup(EXPERT, GATE, LocalTrainer(federated, backend), other, other, None)


def rows(size, seed):
    rng = torch.Generator().manual_seed(seed)
    return examples(torch.randn(size, 3, generator=rng), torch.randint(0, 2, (size,), generator=rng))


def cohort(*sizes, validation=4):
    return ClientData(
        side_by_side([rows(size, seed) for seed, size in enumerate(sizes)]),
        side_by_side([rows(validation, 100 + seed) for seed in range(len(sizes))]),
    )


def server(value=0.0, best=-1.0, best_loss=torch.inf):
    return ServerState({"w": torch.tensor([value])}, {"w": torch.tensor([best])}, torch.tensor(best_loss))


def update(value, num_examples):
    return Update({"w": torch.tensor([float(value)])}, torch.tensor(float(num_examples)))


def validated(loss, num_examples=10):
    return ValidationUpdate(torch.tensor(float(loss)), torch.tensor(float(num_examples)))


class TestAggregation:
    def test_it_is_equation_2(self):
        """w_g <- sum_k (n_k / n) w_k"""
        after = aggregate(server(), {0: update(1, 10), 7: update(4, 30), 3: update(-2, 60)})
        assert after.model["w"].item() == pytest.approx(0.1 * 1 + 0.3 * 4 + 0.6 * -2)
        assert after.best_model["w"] == -1 and after.best_loss == torch.inf  # only validation chooses

    def test_a_reported_count_is_capped(self):
        after = aggregate(server(), {0: update(1, 10), 1: update(4, 1e9)}, max_weight=20.0)
        assert after.model["w"].item() == pytest.approx((10 * 1 + 20 * 4) / 30)

    def test_a_negative_count_is_zero(self):
        assert aggregate(server(), {0: update(1, 10), 1: update(100, -5)}).model["w"] == 1

    def test_if_nobody_has_examples_the_model_stays(self):
        assert aggregate(server(3.0), {0: update(1, 0), 1: update(2, -1)}).model["w"] == 3
        assert aggregate(server(3.0), {}).model["w"] == 3

    def test_the_order_of_clients_does_not_matter(self):
        replies = [(5, update(1 / 3, 7)), (2, update(0.1, 11)), (9, update(2 / 7, 13))]
        models = {aggregate(server(), dict(order)).model["w"].item() for order in itertools.permutations(replies)}
        assert len(models) == 1


class TestTheServerOptimizer:
    replies = {0: update(1, 10), 7: update(4, 30), 3: update(-2, 60)}  # noqa: RUF012

    def test_it_steps_along_the_mean_minus_the_model(self):
        start = server(0.5)._replace(moments=init_moments({"w": torch.zeros(1)}))
        optimizer = ServerOptimizer("adam", 0.1)
        change = {"w": torch.tensor([0.1 * 1 + 0.3 * 4 + 0.6 * -2 - 0.5])}
        first, moments = server_step(optimizer, start.model, change, start.moments)
        after = aggregate(start, self.replies, None, optimizer)
        torch.testing.assert_close((after.model, after.moments), (first, moments))
        again = aggregate(after, self.replies, None, optimizer)
        assert again.moments.step == 2 and again.model["w"] != after.model["w"]

    def test_sgd_with_rate_1_is_plain_averaging(self):
        start = server(0.5)._replace(moments=init_moments({"w": torch.zeros(1)}))
        stepped = aggregate(start, self.replies, None, ServerOptimizer()).model
        torch.testing.assert_close(stepped, aggregate(start, self.replies).model)

    def test_if_nobody_has_examples_the_moments_stay_too(self):
        start = server(3.0)._replace(moments=init_moments({"w": torch.zeros(1)}))
        after = aggregate(start, {0: update(1, 0)}, None, ServerOptimizer("adam"))
        assert after.model["w"] == 3 and after.moments.step == 0

    def test_without_one_the_server_keeps_no_moments(self):
        assert trees.leaves(fedavg(FedAvgConfig(), setup()).init_server(0).moments) == [torch.tensor(0)]

    def test_a_run_carries_its_moments_from_round_to_round(self, tmp_path):
        config = FedAvgConfig(server_optimizer={"name": "adam", "learning_rate": 0.1})
        outcome = run_algorithm(fedavg(config, tiny_setup()), tiny_federation(), tmp_path / "store", rounds=3)
        plain = run_algorithm(fedavg(FedAvgConfig(), tiny_setup()), tiny_federation(), tmp_path / "plain", rounds=3)
        assert outcome.server.moments.step == 3
        assert outcome.manifest["sent_by_clients"] == plain.manifest["sent_by_clients"]  # the server's business alone

    @pytest.mark.parametrize("optimizer", [None, ServerOptimizer("adam")])
    def test_a_checkpoint_gives_the_moments_back(self, optimizer, tmp_path):
        state = init_server(EXPERT, 0, optimizer)
        state = aggregate(state, {0: Update(EXPERT.init(1), torch.tensor(4.0))}, None, optimizer)
        save_checkpoint(tmp_path, Checkpoint(1, state, {}), "run")
        checkpoint, _ = load_newest(tmp_path, ServerState, "run")
        torch.testing.assert_close(checkpoint.server, state, rtol=0, atol=0)


class TestTheBestModel:
    def test_it_is_the_aggregated_model_with_the_lowest_mean_over_clients(self):
        state = keep_best(server(1.0), {0: validated(2.0), 1: validated(4.0)})
        assert state.best_loss == 3 and state.best_model["w"] == 1
        worse = keep_best(state._replace(model={"w": torch.tensor([2.0])}), {0: validated(3.5), 1: validated(3.5)})
        assert worse.best_model["w"] == 1 and worse.model["w"] == 2
        better = keep_best(worse._replace(model={"w": torch.tensor([5.0])}), {0: validated(1.0), 1: validated(4.5)})
        assert better.best_model["w"] == 5 and better.best_loss == 2.75

    def test_the_mean_is_over_clients_and_not_over_examples(self):
        assert keep_best(server(), {0: validated(1.0, 1000), 1: validated(3.0, 1)}).best_loss == 2

    def test_clients_without_validation_data_have_no_vote(self):
        assert keep_best(server(), {0: validated(1.0), 1: validated(0.0, 0)}).best_loss == 1
        nobody = keep_best(server(4.0), {0: validated(0.0, 0)})
        assert nobody.best_loss == torch.inf and nobody.best_model["w"] == -1

    @pytest.mark.parametrize("loss", [DIVERGED_LOSS, 2 * DIVERGED_LOSS, float("inf"), float("nan")])
    def test_a_model_that_diverged_for_one_client_is_never_best(self, loss):
        """Not even the first that is validated, when there is nothing to beat."""
        assert keep_best(server(4.0), {0: validated(0.5), 1: validated(loss)}).best_model["w"] == -1

    @pytest.mark.parametrize("weight", [1e30, float("nan")])
    @pytest.mark.parametrize("backend", ["sequential", "batched"])
    def test_a_client_reports_a_diverged_model_by_a_large_finite_loss(self, backend, weight):
        validation = fedavg(FedAvgConfig(), setup(backend)).validation.exchange
        sent = Broadcast({name: torch.full_like(leaf, weight) for name, leaf in EXPERT.init(1).items()})
        data = ClientData(cohort(3, 3).train, side_by_side([rows(4, 5), rows(0, 6)]))
        _, update, _ = validation.local_update(trees.stack([sent, sent]), Nothing(), data, None)
        assert update.validation_loss.tolist() == [DIVERGED_LOSS, 0.0] and update.num_examples.tolist() == [4, 0]
        state = validation.aggregate(server(4.0), dict(enumerate(trees.unstack(update, 2))), {}, {})
        assert state.best_model["w"] == -1 and state.best_loss == torch.inf

    def test_a_loss_below_zero_is_rejected(self):
        rejection = fedavg(FedAvgConfig(), setup()).validation.exchange.rejection
        assert "-3e+38 is negative" in rejection(validated(-3e38), None)
        assert rejection(validated(0.0), None) is None

    def test_clients_get_the_best_model_in_the_end_and_the_last_without_validation(self):
        assert send_best_model(server(1.0, best=2.0, best_loss=0.5), 0, ()).model["w"] == 2
        assert send_best_model(server(1.0, best=2.0), 0, ()).model["w"] == 1
        assert send_model(server(1.0, best=2.0, best_loss=0.5), 0, ()).model["w"] == 1

    @pytest.mark.parametrize("backend", ["sequential", "batched"])
    def test_a_client_validates_what_it_was_sent_on_its_validation_data(self, backend):
        validation = fedavg(FedAvgConfig(validate_every=7), setup(backend)).validation
        data = cohort(3, 3)
        data = ClientData(data.train, side_by_side([rows(4, 5), rows(0, 6)]))
        sent = Broadcast(EXPERT.init(1))
        _, update, _ = validation.exchange.local_update(trees.stack([sent, sent]), Nothing(), data, None)
        expected = F.cross_entropy(EXPERT(sent.model, rows(4, 5).x), rows(4, 5).y)
        torch.testing.assert_close(update.validation_loss, torch.stack([expected, torch.tensor(0.0)]))
        assert update.num_examples.tolist() == [4, 0] and validation.every == 7


def run_rounds(algorithm, state, data, clients, rounds):
    """What an engine does, in four lines."""
    (exchange,) = algorithm.round
    for number in range(1, rounds + 1):
        sent = trees.stack([exchange.broadcast(state, client, ()) for client in clients])
        rng = Streams(0, exchange.name, number, tuple(clients))
        _, updates, _ = exchange.local_update(sent, Nothing(), data, rng)
        state = exchange.aggregate(state, dict(zip(clients, trees.unstack(updates, len(clients)), strict=True)), {}, {})
    return state


@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_one_client_that_always_takes_part_is_plain_training(backend):
    """Whole-batch SGD has no memory between rounds: 3 rounds of 4 epochs are 12 steps."""
    algorithm = fedavg(FedAvgConfig(), setup(backend, epochs=4, batch_size=50, optimizer="sgd", learning_rate=0.1))
    start, data = algorithm.init_server(0), cohort(9)
    module = mlp((3,), 2, (4,))
    module.load_state_dict(start.model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(module(data.train.x[0]), data.train.y[0]).backward()
        optimizer.step()
    end = run_rounds(algorithm, start, data, [6], 3)
    for name, expected in module.named_parameters():
        torch.testing.assert_close(end.model[name], expected.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_one_step_of_each_client_is_one_step_on_all_their_data(backend):
    """The gradient of a mean is the weighted mean of gradients, so n_k are the right weights."""
    plan = {"steps": 1, "batch_size": 50, "optimizer": "sgd", "learning_rate": 0.1}
    algorithm = fedavg(FedAvgConfig(), setup(backend, **plan))
    start = algorithm.init_server(0)
    apart = run_rounds(algorithm, start, cohort(2, 7, 4), [0, 1, 2], 1)
    joined = [
        torch.cat(column) for column in zip(*((r.x, r.y) for r in (rows(2, 0), rows(7, 1), rows(4, 2))), strict=True)
    ]
    pooled = run_rounds(algorithm, start, ClientData(side_by_side([examples(*joined)]), cohort(0).validation), [0], 1)
    torch.testing.assert_close(apart.model, pooled.model, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(apart.model["1.weight"], start.model["1.weight"])


def test_an_update_reports_the_number_of_examples_and_the_training_loss():
    algorithm = fedavg(FedAvgConfig(), setup(epochs=1, batch_size=50))
    (exchange,) = algorithm.round
    start = algorithm.init_server(0)
    sent = trees.stack([exchange.broadcast(start, client, ()) for client in (0, 1)])
    data = cohort(5, 8)
    _, updates, reports = exchange.local_update(sent, Nothing(), data, Streams(0, "train", 1, (0, 1)))
    assert updates.num_examples.tolist() == [5, 8]
    for s, size in enumerate((5, 8)):
        expected = F.cross_entropy(EXPERT(start.model, data.train.x[s, :size]), data.train.y[s, :size])
        torch.testing.assert_close(reports.training_loss[s], expected)


def test_all_clients_start_from_the_same_weights_and_the_broadcast_is_not_trained():
    first, again, other = (init_server(EXPERT, seed) for seed in (0, 0, 1))
    assert torch.equal(first.model["1.weight"], again.model["1.weight"])
    assert not torch.equal(first.model["1.weight"], other.model["1.weight"])
    assert first.best_loss == torch.inf
    before = trees.tree_map(torch.clone, first.model)
    run_rounds(fedavg(FedAvgConfig(), setup()), first, cohort(5, 6), [0, 1], 1)
    assert all(torch.equal(before[name], first.model[name]) for name in before)


def test_prediction_is_the_softmax_of_the_global_model():
    sent, x = Broadcast(EXPERT.init(3)), torch.randn(5, 3)
    predicted = fedavg(FedAvgConfig(), setup()).predict(sent, Nothing(), None, x)
    torch.testing.assert_close(predicted.exp(), EXPERT(sent.model, x).softmax(1))


class TestSampling:
    pool = np.array([2, 5, 7, 11, 13, 17])

    def test_clients_are_drawn_without_replacement_from_those_who_opted_in(self):
        sample = uniform_sample(4)
        for seed in range(20):
            drawn = sample(None, 1, self.pool, np.random.default_rng(seed))
            assert len(set(drawn.tolist())) == 4 and set(drawn.tolist()) <= set(self.pool.tolist())

    def test_nobody_is_favoured(self):
        rng = np.random.default_rng(0)
        drawn = np.concatenate([uniform_sample(2)(None, 1, self.pool, rng) for _ in range(600)])
        counts = np.array([(drawn == client).sum() for client in self.pool])
        assert (abs(counts - 200) < 60).all()

    def test_all_means_all(self):
        assert uniform_sample(None)(None, 1, self.pool, np.random.default_rng(0)).tolist() == self.pool.tolist()

    def test_more_than_there_are_is_an_error(self):
        with pytest.raises(ConfigError, match=r"clients_per_round=7, but only 6 clients opted in"):
            uniform_sample(7)(None, 1, self.pool, np.random.default_rng(0))


def test_the_expert_may_be_any_module_and_scalars_are_weights_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.scale * self.layer(x)

    for backend in ("sequential", "batched"):
        algorithm = fedavg(FedAvgConfig(), setup(backend)._replace(expert=Network(Scaled)))
        end = run_rounds(algorithm, algorithm.init_server(0), cohort(5, 6), [0, 1], 1)
        assert end.model["scale"].shape == () and end.model["scale"] != 1
