import pytest
import torch

from algorithms.plain_rounds import BACKENDS, contrary_clients, distance, gradient, random_clients, run_rounds, setup_of
from builders import run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedprox import FedProxConfig, fedprox


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_pull_it_is_fedavg_to_the_bit(backend, tmp_path):
    setup = tiny_setup(backend)
    plain = run_algorithm(fedavg(FedAvgConfig(), setup), tiny_federation(), tmp_path / "plain", rounds=3)
    ours = fedprox(FedProxConfig(proximal_strength=0), setup)
    assert run_algorithm(ours, tiny_federation(), tmp_path / "ours", rounds=3).fingerprint() == plain.fingerprint()
    pulled = fedprox(FedProxConfig(proximal_strength=1), setup)
    outcome = run_algorithm(pulled, tiny_federation(), tmp_path / "pulled", rounds=3)
    assert trees.to_bytes(outcome.server) != trees.to_bytes(plain.server)
    assert outcome.manifest["sent_by_clients"] == plain.manifest["sent_by_clients"]  # the same bytes, too


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_round_is_equation_2(backend):
    """Steps down F_k(w) + mu / 2 |w - w_g|^2, then the mean with weights n_k."""
    rate, mu, steps, sizes = 0.3, 0.7, 3, (6, 9)
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=rate, epochs=steps)
    algorithm, data = fedprox(FedProxConfig(proximal_strength=mu), setup), random_clients(*sizes)
    start = algorithm.init_server(0).model
    ends = []
    for client in range(2):
        w = start
        for _ in range(steps):
            slope = gradient(setup, w, data, client)
            w = {name: w[name] - rate * (slope[name] + mu * (w[name] - start[name])) for name in w}
        ends.append(w)
    expected = {name: (6 * ends[0][name] + 9 * ends[1][name]) / 15 for name in start}
    torch.testing.assert_close(run_rounds(algorithm, data).server.model, expected, atol=1e-5, rtol=1e-4)


def test_a_stronger_pull_leaves_clients_nearer_to_the_global_model_and_to_each_other():
    """The drift that many local steps on unlike data cause, and that the term is there to limit."""
    data = contrary_clients()
    drift, spread = [], []
    for mu in (0.0, 0.1, 1.0):
        setup = setup_of("native", 4, 2, (8,), 4, learning_rate=0.2, epochs=50)
        algorithm = fedprox(FedProxConfig(proximal_strength=mu), setup)
        first, second = [update.model for update in run_rounds(algorithm, data).updates[:2]]
        drift.append(distance(first, algorithm.init_server(0).model))
        spread.append(distance(first, second))
    for length in (drift, spread):
        assert length[0] > 1.3 * length[1] and length[1] > 2 * length[2]
