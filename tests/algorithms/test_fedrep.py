import pytest
import torch

from algorithms.plain_rounds import BACKENDS, gradient, random_clients, run_rounds, setup_of
from builders import run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.biased_fedavg import mean_of_clients
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedrep import FedRepConfig, fedrep, head_names
from fedmoe.algorithms.partial_personalization import partial_personalization, predict_with
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams, torch_stream

HEAD, BODY = {"3.weight", "3.bias"}, {"1.weight", "1.bias"}
FEDPER = FedRepConfig(joint=True)


class TestTheHead:
    def test_it_is_the_last_layers_with_weights(self):
        deep = Network(lambda: mlp((4,), 3, (5, 6)), "expert")
        assert head_names(deep, 1) == {"5.weight", "5.bias"}
        assert head_names(deep, 2) == {"3.weight", "3.bias", "5.weight", "5.bias"}

    def test_something_must_be_shared(self):
        with pytest.raises(ConfigError, match="private_layers=2, but the expert has 2 layers with weights"):
            fedrep(FedRepConfig(private_layers=2), tiny_setup())

    @pytest.mark.parametrize("config", [FedRepConfig(), FEDPER])
    def test_it_is_no_part_of_any_message_and_clients_come_to_differ_in_it(self, config, tmp_path):
        outcome = run_algorithm(fedrep(config, tiny_setup()), tiny_federation(), tmp_path / "store")
        for table in (outcome.manifest["sent_by_clients"], outcome.manifest["received_by_clients"]):
            listed = {name.split("/")[-1] for rows in table.values() for name in rows}
            assert listed >= BODY and not listed & HEAD
        heads = {
            tuple(tensor.flatten().tolist())
            for name, tensor in outcome.private_tensors().items()
            if name.startswith("client of") and name.endswith("3.weight")
        }
        assert len(heads) >= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_are_algorithm_1(backend):
    """Steps of the head with the body as received, then of the body with the new head; bodies are averaged."""
    rate, head_steps, body_steps = 0.3, 4, 2
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=rate, epochs=body_steps)
    algorithm, data = fedrep(FedRepConfig(head_epochs=head_steps), setup), random_clients(6, 9)
    start = setup.expert.init(0, "init", "expert")
    body, heads = {name: start[name] for name in BODY}, [{name: start[name] for name in HEAD}] * 2
    for _ in range(2):
        ends, heads = [], list(heads)
        for client in range(2):
            model = {**body, **heads[client]}
            for names in [HEAD] * head_steps + [BODY] * body_steps:
                slope = gradient(setup, model, data, client)
                model = {n: t - rate * slope[n] if n in names else t for n, t in model.items()}
            heads[client] = {name: model[name] for name in HEAD}
            ends.append(model)
        body = {name: (6 * ends[0][name] + 9 * ends[1][name]) / 15 for name in BODY}
    end = run_rounds(algorithm, data, 2)
    torch.testing.assert_close(end.server.model, body, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(end.client_S.private, trees.stack(heads), atol=1e-5, rtol=1e-4)
    assert end.client_S.rounds.tolist() == [2, 2]


@pytest.mark.parametrize("backend", BACKENDS)
class TestFedPer:
    def test_two_rounds_train_both_together(self, backend):
        rate = 0.3
        setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=rate, epochs=2)
        data, start = random_clients(6, 9), setup.expert.init(0, "init", "expert")
        body, heads = {name: start[name] for name in BODY}, [{name: start[name] for name in HEAD}] * 2
        for _ in range(2):
            ends = []
            for client in range(2):
                model = {**body, **heads[client]}
                for _ in range(2):
                    slope = gradient(setup, model, data, client)
                    model = {name: tensor - rate * slope[name] for name, tensor in model.items()}
                ends.append(model)
            heads = [{name: model[name] for name in HEAD} for model in ends]
            body = {name: (6 * ends[0][name] + 9 * ends[1][name]) / 15 for name in BODY}
        end = run_rounds(fedrep(FEDPER, setup), data, 2)
        torch.testing.assert_close(end.server.model, body, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(end.client_S.private, trees.stack(heads), atol=1e-5, rtol=1e-4)

    def test_with_an_empty_head_it_is_fedavg_to_the_bit(self, backend):
        setup, data = setup_of(backend, 4, 3, (5,), 2, learning_rate=0.2, epochs=2, batch_size=4), random_clients(6, 9)
        empty = run_rounds(partial_personalization(FEDPER, setup, set(), mean_of_clients), data, 3)
        plain = run_rounds(fedavg(FedAvgConfig(), setup), data, 3)
        assert all(torch.equal(empty.server.model[name], plain.server.model[name]) for name in HEAD | BODY)


def clients_with_a_common_representation(clients, size, purpose, features=16):
    """Labels depend on two directions that all clients share; how, is each client's own affair."""
    directions = torch.linalg.qr(torch.randn(features, 2, generator=torch_stream("directions")))[0]
    parts = []
    for client in range(clients):
        angle = torch.rand((), generator=torch_stream("angle", client)) * 2 * torch.pi
        x = torch.randn(size, features, generator=torch_stream(purpose, client))
        towards = torch.stack([angle.cos(), angle.sin()])
        parts.append(examples(x, (x @ directions @ towards > 0).long()))
    return side_by_side(parts)


def test_a_shared_representation_helps_where_one_head_for_all_cannot_and_no_client_has_enough_data():
    """As in Section 4 there: better than FedAvg, whose head must serve contrary clients, and than each alone."""
    clients, size = 40, 24
    train, test = (clients_with_a_common_representation(clients, n, p) for n, p in ((size, "train"), (200, "test")))
    data = ClientData(train, train)
    setup = setup_of("native", 16, 2, (4,), clients, learning_rate=0.1, batch_size=8, epochs=1)

    def accuracy(models):
        hits = [setup.expert(model, test.x[s]).argmax(1) == test.y[s] for s, model in enumerate(models)]
        return float(torch.stack(hits).float().mean())

    ours = run_rounds(fedrep(FedRepConfig(), setup), data, 60)
    own = accuracy([{**ours.server.model, **trees.pick(ours.client_S, s).private} for s in range(clients)])
    one_for_all = accuracy([run_rounds(fedavg(FedAvgConfig(), setup), data, 60).server.model] * clients)
    alone = [run_rounds(fedavg(FedAvgConfig(), setup), one_of(data, s), 60).server.model for s in range(clients)]
    assert own > 0.85 and own > accuracy(alone) + 0.08 and own > one_for_all + 0.25


def one_of(data, s):
    return data.map(lambda part: trees.tree_map(lambda leaf: leaf[s : s + 1], part))


def test_after_the_rounds_the_head_alone_goes_on():
    setup = tiny_setup()
    keen = setup._replace(personal=setup.personal.with_settings(epochs=5, patience=100))
    algorithm = fedrep(FedRepConfig(), keen)
    data = random_clients(6, 9)
    shared_S = trees.stack([algorithm.round[0].broadcast(algorithm.init_server(0), 0, ())] * 2)
    client_S = trees.stack([algorithm.init_client(None, client, 0) for client in range(2)])
    personal_S = algorithm.personalize(shared_S, client_S, None, data, Streams(0, "personalize", 0, (0, 1)))
    assert set(personal_S.private) == HEAD
    assert not torch.equal(personal_S.private["3.weight"], client_S.private["3.weight"])
    x, own = torch.randn(5, 4), trees.pick(personal_S, 0)
    expected = predict_with(setup, trees.pick(shared_S, 0), own.private, x)
    torch.testing.assert_close(algorithm.predict(trees.pick(shared_S, 0), trees.pick(client_S, 0), own, x), expected)
