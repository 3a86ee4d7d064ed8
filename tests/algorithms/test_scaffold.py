from dataclasses import replace

import pytest
import torch

from algorithms.plain_rounds import BACKENDS, gradient, mean_loss, random_clients, run_rounds, setup_of
from builders import PARTICIPANTS, newest_private, run_algorithm, tiny_federation, tiny_plan, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.scaffold import ClientState, ScaffoldConfig, num_steps, scaffold
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError
from fedmoe.streams import torch_stream
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_are_algorithm_1_with_option_ii(backend):
    """The second round starts from control variates that are not zero."""
    rate, steps, rounds = 0.3, 3, 2
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=rate, epochs=steps)
    algorithm, data = scaffold(ScaffoldConfig(), setup), random_clients(6, 9)
    x = algorithm.init_server(0).model
    c = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    c_i = [dict(c), dict(c)]
    for _ in range(rounds):
        ends, changes = [], []
        for i in range(2):
            y = x
            for _ in range(steps):
                g = gradient(setup, y, data, i)
                y = {name: y[name] - rate * (g[name] - c_i[i][name] + c[name]) for name in y}
            new = {name: c_i[i][name] - c[name] + (x[name] - y[name]) / (steps * rate) for name in y}
            ends.append(y)
            changes.append({name: new[name] - c_i[i][name] for name in y})
            c_i[i] = new
        x = {name: (ends[0][name] + ends[1][name]) / 2 for name in x}  # clients count alike, whatever they hold
        c = {name: c[name] + (changes[0][name] + changes[1][name]) / 2 for name in c}
    end = run_rounds(algorithm, data, rounds)
    torch.testing.assert_close(end.server.model, x, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(end.server.control, c, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(end.client_S.control, trees.stack(c_i), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_client_alone_is_fedavg(backend):
    """c and c_i are the same then, and cancel."""
    setup = setup_of(backend, 4, 3, (5,), 1, learning_rate=0.2, epochs=2, batch_size=4)
    data = random_clients(9)
    ours = run_rounds(scaffold(ScaffoldConfig(), setup), data, 4)
    plain = run_rounds(fedavg(FedAvgConfig(), setup), data, 4)
    assert all(map(torch.equal, ours.server.model.values(), plain.server.model.values()))


def unlike_clients():
    """Logistic regression on features of other kinds and scales, labels noisy enough that the best model is finite."""
    parts = []
    for client, (scale, shift) in enumerate([(0.5, 2.0), (3.0, -1.0), (1.0, 0.0)]):
        generator = torch_stream("unlike", client)
        x = scale * torch.randn(60, 3, generator=generator)
        x[:, client] += shift
        doubt = 2 * torch.randn(60, generator=generator)
        parts.append(examples(x, ((1 - client) * x[:, 0] + x[:, 1] + shift + doubt > 0).long()))
    return ClientData(side_by_side(parts), side_by_side(parts))


def test_many_local_steps_on_unlike_clients_reach_the_common_optimum_which_fedavg_misses():
    """Section 3 of the paper: FedAvg's fixed point is elsewhere, whatever the number of rounds."""
    data = unlike_clients()

    def end_loss(method, config, rounds, **plan):
        setup = setup_of("native", 3, 2, (), 3, **plan)
        return mean_loss(setup, run_rounds(method(config, setup), data, rounds).server.model, data)

    best = end_loss(fedavg, FedAvgConfig(), 2000, learning_rate=0.2, steps=1)  # one step each: gradient descent
    many = {"learning_rate": 0.2, "epochs": 30}
    plain, ours = end_loss(fedavg, FedAvgConfig(), 60, **many), end_loss(scaffold, ScaffoldConfig(), 60, **many)
    assert plain > best + 0.005
    assert ours - best < 0.1 * (plain - best)


def test_control_variates_are_sent_both_ways_and_counted(tmp_path):
    ours = run_algorithm(scaffold(ScaffoldConfig(), tiny_setup()), tiny_federation(), tmp_path / "ours").manifest
    plain = run_algorithm(fedavg(FedAvgConfig(), tiny_setup()), tiny_federation(), tmp_path / "plain").manifest

    def weights(manifest, way):
        rows = manifest[way]["train"]
        return sum(row["bytes"] for name, row in rows.items() if name.startswith(("model/", "control")))

    for way in ("sent_by_clients", "received_by_clients"):
        assert weights(ours, way) == 2 * weights(plain, way) > 0


def test_the_servers_control_variate_is_the_mean_over_those_who_can_take_part(tmp_path):
    """Also of those who were never sampled, whose own is zero; not of those who opted out."""
    store, model = tmp_path / "store", tiny_setup().expert.init(0)
    outcome = run_algorithm(scaffold(ScaffoldConfig(), tiny_setup(clients_per_round=2)), tiny_federation(), store)
    sampled = {client for record in outcome.records for client in record.clients}
    own = [newest_private(store, "client", ClientState, client).control for client in sampled]
    for name in model:
        expected = torch.stack([control[name] for control in own]).sum(0) / len(PARTICIPANTS)
        torch.testing.assert_close(outcome.server.control[name], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"optimizer": "adam"}, {"momentum": 0.9}])
def test_another_optimizer_than_plain_sgd_is_an_error(changes):
    setup = tiny_setup()._replace(federated=LocalTrainer(replace(tiny_plan(), **changes), "batched"))
    with pytest.raises(ConfigError, match=r"plain SGD.*asks for (adam|sgd with momentum 0\.9)"):
        scaffold(ScaffoldConfig(), setup)


def test_clipped_gradients_are_an_error():
    setup = tiny_setup()._replace(federated=LocalTrainer(replace(tiny_plan(), max_gradient_norm=1.0), "batched"))
    with pytest.raises(ConfigError, match=r"max_gradient_norm=1.*control variates"):
        scaffold(ScaffoldConfig(), setup)


def test_steps_are_counted_as_the_trainer_takes_them():
    counts = torch.tensor([0, 1, 4, 9])
    assert num_steps(LocalTraining(epochs=3, batch_size=4), counts).tolist() == [0, 3, 3, 9]
    assert num_steps(LocalTraining(steps=5, batch_size=4), counts).tolist() == [0, 5, 5, 5]
