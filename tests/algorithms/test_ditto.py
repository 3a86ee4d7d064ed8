import pytest
import torch

from algorithms.plain_rounds import (
    BACKENDS,
    contrary_clients,
    distance,
    gradient,
    private,
    random_clients,
    run_rounds,
    setup_of,
)
from builders import (
    PARTICIPANTS,
    SOME_OPTED_OUT,
    UNSEEN,
    draw_examples,
    newest_private,
    run_algorithm,
    tiny_federation,
    tiny_records,
    tiny_setup,
    with_records,
)
from fedmoe import trees
from fedmoe.algorithms.ditto import DittoConfig, PersonalState, ditto, predict
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.streams import Streams


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_pull_the_personal_model_is_trained_on_the_client_alone(backend):
    """It starts from the first global model, and never hears of another."""
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=0.2, epochs=2, batch_size=4)
    algorithm, data = ditto(DittoConfig(personal_pull=0), setup), random_clients(6, 9)
    alone_S = trees.stack([algorithm.init_server(0).model] * 2)
    for number in (1, 2, 3):
        rng = private(Streams(0, "train", number, (0, 1)))
        alone_S = setup.federated.train_classifier(setup.expert, alone_S, data, rng, stop_early=False).params["model"]
    torch.testing.assert_close(run_rounds(algorithm, data, 3).personal_S.model, alone_S, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pull", [0.0, 1.0])
def test_the_global_model_is_that_of_fedavg_to_the_bit(pull, tmp_path):
    ours = run_algorithm(ditto(DittoConfig(personal_pull=pull), tiny_setup()), tiny_federation(), tmp_path / "ours")
    plain = run_algorithm(fedavg(FedAvgConfig(), tiny_setup()), tiny_federation(), tmp_path / "plain")
    assert trees.to_bytes(ours.server) == trees.to_bytes(plain.server)
    assert ours.manifest["sent_by_clients"] == plain.manifest["sent_by_clients"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_are_algorithm_1(backend):
    """v <- v - eta (grad F_k(v) + lambda (v - w_g)), with w_g as it was sent."""
    rate, pull, steps = 0.3, 0.7, 3
    setup = setup_of(backend, 4, 3, (5,), 2, learning_rate=rate, epochs=steps)
    algorithm, data = ditto(DittoConfig(personal_pull=pull), setup), random_clients(6, 9)
    start = algorithm.init_server(0).model
    own = [start, start]
    for sent in (start, run_rounds(algorithm, data, 1).server.model):
        for client in range(2):
            for _ in range(steps):
                v, slope = own[client], gradient(setup, own[client], data, client)
                own[client] = {name: v[name] - rate * (slope[name] + pull * (v[name] - sent[name])) for name in v}
    torch.testing.assert_close(run_rounds(algorithm, data, 2).personal_S.model, trees.stack(own), atol=1e-5, rtol=1e-4)


def test_a_stronger_pull_keeps_personal_models_nearer_to_the_global_one():
    data, distances = contrary_clients(), []
    for pull in (0.0, 0.1, 1.0):
        setup = setup_of("native", 4, 2, (8,), 4, learning_rate=0.2, epochs=10)
        end = run_rounds(ditto(DittoConfig(personal_pull=pull), setup), data, 5)
        distances.append(distance(trees.pick(end.personal_S, 0).model, end.server.model))
    assert distances[0] > 1.3 * distances[1] and distances[1] > 2 * distances[2]


def test_own_models_serve_clients_that_contradict_each_other_where_one_for_all_cannot(tmp_path):
    records, data = {}, contrary_clients(clients=len(PARTICIPANTS))
    for place, client in enumerate(PARTICIPANTS):
        rows = trees.pick(data.train, place)
        everyone = torch.ones(len(rows.y), dtype=torch.bool)
        plain = tiny_records()[client]
        records[client] = plain._replace(train=rows, test=rows, train_opted_in=everyone)
    federation, setup = with_records(tiny_federation(), records), tiny_setup(clients_per_round=None)
    outcome = run_algorithm(ditto(DittoConfig(), setup), federation, tmp_path / "store", rounds=6)
    accuracy = {
        model: [s.accuracy for s in outcome.scores if s.client in PARTICIPANTS and (s.model, s.data) == (model, "own")]
        for model in ("before", "after")  # FedAvg's model, and the client's own
    }
    assert sum(accuracy["before"]) / 4 < 0.65
    assert sum(accuracy["after"]) / 4 > 0.85


def test_the_personal_model_learns_from_opted_out_records_too(tmp_path):
    plain = tiny_records()[SOME_OPTED_OUT]
    x = plain.train.x.clone()
    x[~plain.train_opted_in] += 0.5
    changed = with_records(tiny_federation(), {SOME_OPTED_OUT: plain._replace(train=plain.train._replace(x=x))})
    models = []
    for name, federation in (("plain", tiny_federation()), ("changed", changed)):
        algorithm = ditto(DittoConfig(), tiny_setup(clients_per_round=None))
        outcome = run_algorithm(algorithm, federation, tmp_path / name)
        models.append((outcome.server, newest_private(tmp_path / name, "personal", PersonalState, SOME_OPTED_OUT)))
    assert trees.to_bytes(models[0][0]) == trees.to_bytes(models[1][0])
    assert trees.to_bytes(models[0][1]) != trees.to_bytes(models[1][1])


def test_a_client_that_was_never_sampled_gets_a_personal_model_after_the_rounds(tmp_path):
    records = tiny_records()[UNSEEN]
    without_validation = records._replace(  # so nothing stops it before the first step
        validation=draw_examples(0), validation_opted_in=torch.ones(0, dtype=torch.bool)
    )
    federation = with_records(tiny_federation(), {UNSEEN: without_validation})
    outcome = run_algorithm(ditto(DittoConfig(), tiny_setup()), federation, tmp_path / "store")
    final = newest_private(tmp_path / "store", "final", PersonalState, UNSEEN)
    assert distance(final.model, outcome.delivered[UNSEEN].model) > 0.01


def test_prediction_is_the_personal_models_once_there_is_one():
    setup, x = tiny_setup(), torch.randn(5, 4)
    shared, own = Broadcast(setup.expert.init(1)), PersonalState(setup.expert.init(2))
    torch.testing.assert_close(predict(setup, shared, None, x).exp(), setup.expert(shared.model, x).softmax(1))
    torch.testing.assert_close(predict(setup, shared, own, x).exp(), setup.expert(own.model, x).softmax(1))
