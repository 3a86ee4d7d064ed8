import pytest
import torch
import torch.nn.functional as F

from algorithms.plain_rounds import BACKENDS, contrary_clients, gradient, private, random_clients, run_rounds, setup_of
from builders import run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.apfl import ApflConfig, PersonalState, adapted_alpha, apfl, predict
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.clients.federation import side_by_side
from fedmoe.core_types import ClientData
from fedmoe.streams import Streams
from fedmoe.training.mixed_weights import mixed


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_global_model_is_that_of_fedavg_to_the_bit(alpha, tmp_path):
    ours = run_algorithm(apfl(ApflConfig(alpha=alpha), tiny_setup()), tiny_federation(), tmp_path / "ours")
    plain = run_algorithm(fedavg(FedAvgConfig(), tiny_setup()), tiny_federation(), tmp_path / "plain")
    assert trees.to_bytes(ours.server) == trees.to_bytes(plain.server)
    assert ours.manifest["sent_by_clients"] == plain.manifest["sent_by_clients"]


def test_alpha_0_predicts_as_fedavg(tmp_path):
    outcome = run_algorithm(apfl(ApflConfig(alpha=0.0), tiny_setup()), tiny_federation(), tmp_path / "store")
    before, after = (
        [score._replace(model="") for score in outcome.scores if score.model == model] for model in ("before", "after")
    )
    assert before == after and len(before) > 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_alpha_1_is_training_on_the_client_alone(backend):
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=0.2, epochs=2, batch_size=4)
    algorithm, data = apfl(ApflConfig(alpha=1.0), setup), random_clients(6, 9)
    alone_S = trees.stack([algorithm.init_server(0).model] * 2)
    for number in (1, 2, 3):
        rng = private(Streams(0, "train", number, (0, 1)))
        alone_S = setup.federated.train_classifier(setup.expert, alone_S, data, rng, stop_early=False).params["model"]
    own = run_rounds(algorithm, data, 3).personal_S
    torch.testing.assert_close(own.model, alone_S, atol=1e-5, rtol=1e-4)
    x, other = torch.randn(5, 4), Broadcast(setup.expert.init(9))
    alone = setup.expert(trees.pick(alone_S, 0), x).log_softmax(1)
    torch.testing.assert_close(predict(setup, other, trees.pick(own, 0), x), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_round_is_algorithm_1(backend):
    """w <- w - eta grad f(w), v <- v - eta alpha grad f(alpha v + (1 - alpha) w), both at the same point."""
    rate, alpha, steps = 0.3, 0.3, 3
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=rate, epochs=steps)
    algorithm, data = apfl(ApflConfig(alpha=alpha), setup), random_clients(6, 9)
    start, own = algorithm.init_server(0).model, []
    for client in range(2):
        w = v = start
        for _ in range(steps):
            of_mixture = gradient(setup, mixed(torch.tensor(alpha), v, w), data, client)
            of_w = gradient(setup, w, data, client)
            v = {name: v[name] - rate * alpha * of_mixture[name] for name in v}
            w = {name: w[name] - rate * of_w[name] for name in w}
        own.append(v)
    personal = run_rounds(algorithm, data).personal_S
    torch.testing.assert_close(personal.model, trees.stack(own), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(personal.alpha, torch.full((2,), alpha))


class TestTheAdaptiveRule:
    def adapted(self, backend, start, rate, *, sizes=(6, 9)):
        setup = setup_of(backend, 4, 3, (5,), len(sizes), learning_rate=0.1, batch_size=2)
        data, clients = random_clients(*sizes), tuple(range(len(sizes)))
        shared = Broadcast(trees.stack([setup.expert.init("w")] * len(sizes)))
        own = PersonalState(trees.stack([setup.expert.init("v", s) for s in clients]), torch.full((len(sizes),), start))
        rng = Streams(0, "train", 1, clients)
        return adapted_alpha(setup, rate, shared, own, data, rng), setup, shared, own, data

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_it_is_one_step_along_the_inner_product(self, backend):
        """alpha <- alpha - eta <v - w, grad f(alpha v + (1 - alpha) w)>, on all records at once."""
        found, setup, shared, own, data = self.adapted(backend, 0.4, 0.05)
        for client in range(2):
            v, w = trees.pick(own.model, client), trees.pick(shared.model, client)
            slope = gradient(setup, mixed(torch.tensor(0.4), v, w), data, client)
            inner = sum(((v[name] - w[name]) * slope[name]).sum() for name in v)
            torch.testing.assert_close(found[client], 0.4 - 0.05 * inner)

    @pytest.mark.parametrize("start", [0.0, 1.0])
    def test_alpha_stays_within_0_and_1(self, start):
        found = self.adapted("batched", start, 1e3)[0]
        assert all(value in (0.0, 1.0) for value in found.tolist())

    def test_a_client_without_records_stays_where_it_is(self):
        assert self.adapted("batched", 0.4, 0.05, sizes=(6, 0))[0][1] == torch.tensor(0.4)

    def test_it_moves_to_the_own_model_where_clients_contradict_each_other(self):
        contrary = contrary_clients()
        alike = ClientData(*[side_by_side([trees.pick(contrary.train, 1)] * 4)] * 2)
        alphas = []
        for data in (contrary, alike):
            setup = setup_of("batched", 4, 2, (8,), 4, learning_rate=0.2, epochs=5)
            end = run_rounds(apfl(ApflConfig(alpha=0.3, alpha_rate=0.2), setup), data, 25)
            alphas.append(end.personal_S.alpha)
        assert (alphas[0] > 0.8).all() and (alphas[1] < 0.4).all(), alphas


def test_the_mixture_serves_clients_that_contradict_each_other_where_one_for_all_cannot():
    setup, data = setup_of("batched", 4, 2, (8,), 4, learning_rate=0.2, epochs=5), contrary_clients()
    end = run_rounds(apfl(ApflConfig(), setup), data, 15)
    shared = Broadcast(end.server.model)

    def accuracy(personal_of):
        hits = [predict(setup, shared, personal_of(s), data.train.x[s]).argmax(1) == data.train.y[s] for s in range(4)]
        return float(torch.stack(hits).float().mean())

    assert accuracy(lambda _: None) < 0.65 and accuracy(lambda s: trees.pick(end.personal_S, s)) > 0.85


def test_prediction_is_that_of_the_mixed_weights():
    setup, x = tiny_setup(), torch.randn(5, 4)
    network = setup.expert
    shared, own = Broadcast(network.init(1)), PersonalState(network.init(2), torch.tensor(0.3))
    weights = {name: 0.3 * own.model[name] + 0.7 * shared.model[name] for name in own.model}
    torch.testing.assert_close(predict(setup, shared, own, x), F.log_softmax(network(weights, x), -1))
    torch.testing.assert_close(predict(setup, shared, None, x), F.log_softmax(network(shared.model, x), -1))
