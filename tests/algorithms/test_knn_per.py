import pytest
import torch

from algorithms.digits import mean_accuracy, run_digits
from builders import (
    CLASSES,
    EMPTY,
    FEATURES,
    ONE_RECORD,
    OPTED_OUT,
    PLAIN,
    TRAIN_SIZES,
    UNSEEN,
    newest_private,
    run_algorithm,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.knn_per import SHARES, KnnPerConfig, PersonalState, best_share, knn_per, log_vote
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.federation import examples
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.models.text import BagOfWords
from fedmoe.streams import Streams

EXPERT = tiny_setup().expert


def hidden(model, x):
    return (x @ model["1.weight"].T + model["1.bias"]).relu()


def memorized(clients, setup=None, sent=None):
    sent = sent or Broadcast(EXPERT.init(1))
    algorithm = knn_per(KnnPerConfig(), setup or tiny_setup())
    data = tiny_federation().data(clients, opted_in_only=False)
    rng = Streams(0, "personalize", 0, tuple(clients))
    return algorithm.personalize(trees.stack([sent] * len(clients)), Nothing(), None, data, rng)


def test_the_vote_is_that_of_a_few_plain_lines():
    """Kernel weights of the K nearest, normalised, added up by label."""
    config = KnnPerConfig(num_neighbors=3, scale=0.5)
    stored, labels, asked = torch.randn(20, 5), torch.arange(20) % 4, torch.randn(6, 5)
    vote = log_vote(config, PersonalState(stored, labels, torch.tensor(0.5)), asked, 4).exp()
    for row, features in enumerate(asked):
        distances = ((stored - features) ** 2).sum(1)
        nearest = distances.argsort()[:3]
        weights = torch.exp(-distances[nearest] / (5 * 0.5))
        expected = torch.zeros(4)
        for label, weight in zip(labels[nearest], weights / weights.sum(), strict=True):
            expected[label] += weight
        torch.testing.assert_close(vote[row], expected)


def test_a_prediction_mixes_probabilities_by_lambda():
    algorithm, x = knn_per(KnnPerConfig(num_neighbors=2), tiny_setup()), torch.randn(6, FEATURES)
    sent = Broadcast(EXPERT.init(1))
    store = PersonalState(torch.randn(8, 5).abs(), torch.arange(8) % CLASSES, torch.tensor(0.3))
    vote = log_vote(KnnPerConfig(num_neighbors=2), store, hidden(sent.model, x), CLASSES).exp()
    expected = 0.3 * vote + 0.7 * EXPERT(sent.model, x).softmax(1)
    predicted = algorithm.predict(sent, Nothing(), store, x)
    torch.testing.assert_close(predicted.exp(), expected)
    assert predicted.isfinite().all()


def test_with_lambda_zero_it_is_fedavgs_model_to_the_last_bit(tmp_path):
    setup, x = tiny_setup(), torch.randn(6, FEATURES)
    ours = run_algorithm(knn_per(KnnPerConfig(), setup), tiny_federation(), tmp_path / "ours")
    plain = run_algorithm(fedavg(FedAvgConfig(), setup), tiny_federation(), tmp_path / "plain")
    sent = ours.delivered[PLAIN]
    assert trees.to_bytes(sent) == trees.to_bytes(plain.delivered[PLAIN])
    store = newest_private(tmp_path / "ours", "final", PersonalState, PLAIN)._replace(share=torch.tensor(0.0))
    expected = fedavg(FedAvgConfig(), setup).predict(sent, Nothing(), None, x)
    assert torch.equal(knn_per(KnnPerConfig(), setup).predict(sent, Nothing(), store, x), expected)


def test_it_improves_a_frozen_model_on_skewed_clients_own_data(tmp_path):
    scores = run_digits(lambda setup: knn_per(KnnPerConfig(), setup), tmp_path / "store")
    assert mean_accuracy(scores, "after", "own") > mean_accuracy(scores, "before", "own") + 0.05


@pytest.mark.parametrize("backend", ["batched", "sequential", "native"])
def test_all_of_a_clients_training_records_are_stored_and_no_padding(backend):
    clients = [PLAIN, OPTED_OUT, ONE_RECORD, EMPTY]
    sent = Broadcast(EXPERT.init(1))
    for client, store in zip(clients, memorized(clients, tiny_setup(backend), sent), strict=True):
        records = tiny_federation().load(client).train
        assert len(store.labels) == TRAIN_SIZES[client]
        assert store.labels.tolist() == records.y.tolist()
        torch.testing.assert_close(store.features, hidden(sent.model, records.x))


class TestLambda:
    def test_it_is_the_one_with_the_lowest_validation_loss(self, tmp_path):
        outcome = run_algorithm(knn_per(KnnPerConfig(), tiny_setup()), tiny_federation(), tmp_path / "store")
        algorithm = knn_per(KnnPerConfig(), tiny_setup())
        for client in (0, OPTED_OUT, PLAIN, UNSEEN):
            store = newest_private(tmp_path / "store", "final", PersonalState, client)
            assert len(store.labels) == TRAIN_SIZES[client]  # whoever else was in the cohort
            rows = tiny_federation().load(client).validation
            losses = []
            for share in SHARES:
                mixed = store._replace(share=torch.tensor(share))
                log_probs = algorithm.predict(outcome.delivered[client], Nothing(), mixed, rows.x)
                losses.append(float(-log_probs[torch.arange(len(rows.y)), rows.y].mean()))
            assert float(store.share) == pytest.approx(SHARES[losses.index(min(losses))])

    def test_neighbours_that_are_right_where_the_model_is_wrong_get_the_most_of_it(self):
        store = PersonalState(torch.tensor([[0.0], [10.0]]), torch.tensor([0, 1]), torch.zeros(()))
        scores = torch.tensor([[-5.0, 5.0], [5.0, -5.0]])
        rows = examples(torch.tensor([[0.0], [10.0]]), torch.tensor([0, 1]))._replace(extra={"generic_scores": scores})
        assert float(best_share(KnnPerConfig(num_neighbors=1), store, rows)) == pytest.approx(0.9)
        assert best_share(KnnPerConfig(num_neighbors=1), store._replace(labels=torch.tensor([1, 0])), rows) == 0

    def test_without_validation_or_training_records_the_model_predicts_alone(self):
        one_record, empty = memorized([ONE_RECORD, EMPTY])
        assert one_record.share == 0 and empty.share == 0
        assert len(one_record.labels) == 1 and len(empty.labels) == 0


def test_it_has_nothing_to_fall_back_from():
    assert native_fallbacks(knn_per(KnnPerConfig(), tiny_setup("native")), tiny_federation()) == []


def test_a_model_without_an_output_layer_is_refused_before_the_rounds():
    words = tiny_setup()._replace(expert=Network(lambda: BagOfWords(10, CLASSES), "expert", (2, 4)))
    with pytest.raises(ConfigError, match="no output layer"):
        knn_per(KnnPerConfig(), words)
