from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from algorithms.digits import mean_accuracy, run_digits
from builders import (
    CLASSES,
    FEATURES,
    SOME_OPTED_OUT,
    make_expert,
    newest_private,
    run_algorithm,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.fedrod import FedRodConfig, PersonalState, fedrod, log_label_shares, train_head
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.models.text import BagOfWords
from fedmoe.streams import Streams, torch_stream

EXPERT = tiny_setup().expert


def overlapping(labels, *path):
    """Three classes that no model can tell apart for certain, so that what it expects beforehand matters."""
    means = F.one_hot(labels, FEATURES).float()
    return means + 0.8 * torch.randn(len(labels), FEATURES, generator=torch_stream("overlapping", *path)), labels


def skewed_federation():
    """Every client has far more of label 0 than of the others; the global test examples have all labels alike."""
    parts = {}
    for client in range(6):
        rare = [8, 2] if client % 2 else [2, 8]
        labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor([50, *rare]))
        parts[f"c{client}"] = {"train": overlapping(labels, client)}
    return federation_from_clients(
        parts, num_classes=CLASSES, global_test=overlapping(torch.arange(300) % CLASSES, "global")
    )


def test_the_generic_head_serves_everybody_better_than_fedavg_under_label_skew(tmp_path):
    setup = tiny_setup("batched", clients_per_round=None)
    accuracies = {}
    for name, algorithm in {
        "fedrod": fedrod(FedRodConfig(), setup),
        "fedavg": fedavg(FedAvgConfig(), setup),
    }.items():
        scores = run_algorithm(algorithm, skewed_federation(), tmp_path / name, rounds=10).scores
        accuracies[name] = mean_accuracy(scores, "before", "global")
    assert accuracies["fedrod"] > accuracies["fedavg"] + 0.1


def test_the_personal_head_is_better_at_home(tmp_path):
    ours = run_digits(lambda setup: fedrod(FedRodConfig(), setup), tmp_path / "ours")
    plain = run_digits(lambda setup: fedavg(FedAvgConfig(), setup), tmp_path / "plain")
    assert mean_accuracy(ours, "after", "own") > mean_accuracy(ours, "before", "own") + 0.03
    assert mean_accuracy(ours, "after", "own") > mean_accuracy(plain, "before", "own") + 0.03


def test_without_the_personal_head_it_predicts_with_the_generic_one(tmp_path):
    algorithm, x = fedrod(FedRodConfig(), tiny_setup()), torch.randn(5, FEATURES)
    sent = Broadcast(EXPERT.init(1))
    generic = EXPERT(sent.model, x).log_softmax(1)
    untrained = PersonalState({"weight": torch.zeros(CLASSES, 5), "bias": torch.zeros(CLASSES)})
    torch.testing.assert_close(algorithm.predict(sent, Nothing(), None, x), generic)
    torch.testing.assert_close(algorithm.predict(sent, Nothing(), untrained, x), generic)


@pytest.mark.parametrize("backend", ["batched", "sequential", "native"])
def test_clients_with_all_labels_alike_train_as_in_fedavg(backend):
    """An offset that is the same for all labels changes no softmax."""
    x, y = torch.randn(12, FEATURES), torch.arange(12) % CLASSES
    data = tiny_federation().data([0], opted_in_only=True).map(lambda _: side_by_side([examples(x, y)]))
    sent, rng = trees.stack([Broadcast(EXPERT.init(1))]), Streams(0, "round:train", 1, (0,))
    updates = [
        algorithm.round[0].local_update(sent, Nothing(), data, rng)[1]
        for algorithm in (fedrod(FedRodConfig(), tiny_setup(backend)), fedavg(FedAvgConfig(), tiny_setup(backend)))
    ]
    torch.testing.assert_close(*updates)


def test_label_shares_count_real_examples_only_and_are_finite():
    some, none = torch.tensor([1, 1, 0, 1]), torch.zeros(0, dtype=torch.int64)
    rows = side_by_side([examples(torch.zeros(len(labels), 1), labels) for labels in (some, none)])
    shares = log_label_shares(rows, 3).exp()
    torch.testing.assert_close(shares, torch.tensor([[0.25, 0.75, 1e-6], [1e-6, 1e-6, 1e-6]]))


def test_a_round_follows_the_balanced_softmax():
    """In a few lines of plain torch: -log of n_y exp(s_y) / sum_c n_c exp(s_c)."""
    setup, client = tiny_setup("sequential"), SOME_OPTED_OUT
    data = tiny_federation().data([client], opted_in_only=True)
    sent, rng = Broadcast(EXPERT.init(1)), Streams(0, "round:train", 1, (client,))
    (train,) = fedrod(FedRodConfig(), setup).round
    _, update, _ = train.local_update(trees.stack([sent]), Nothing(), data, rng)

    count = int(data.train.counts[0])
    x, y = data.train.x[0, :count], data.train.y[0, :count]
    frequency = torch.bincount(y, minlength=CLASSES)
    assert (frequency > 0).all()
    module = make_expert()
    module.load_state_dict(sent.model)
    optimizer, shuffle = torch.optim.SGD(module.parameters(), lr=0.2), rng.generators("batches")[0]
    for _ in range(2):
        for rows in torch.randperm(count, generator=shuffle).split(4):
            optimizer.zero_grad()
            weighted = frequency * module(x[rows]).exp()
            (-(weighted[torch.arange(len(rows)), y[rows]] / weighted.sum(1)).log().mean()).backward()
            optimizer.step()
    torch.testing.assert_close(trees.pick(update.model, 0), dict(sorted(module.state_dict().items())))


@pytest.mark.parametrize("backend", ["batched", "sequential", "native"])
def test_the_personal_head_adds_to_the_generic_scores_and_alone_is_trained(backend):
    """In a few lines of plain torch: a linear layer on the frozen features, by the plain cross-entropy."""
    setup, client = tiny_setup(backend), 3
    setup = setup._replace(personal=setup.personal.with_settings(epochs=2))
    data = tiny_federation().data([client], opted_in_only=False)
    data = type(data)(data.train, data.train)  # validated on what it learns from, so the last copy is the best
    sent, rng = Broadcast(EXPERT.init(1)), Streams(0, "personalize", 0, (client,))
    before = trees.tree_map(torch.clone, sent)
    head = trees.pick(train_head(setup, trees.stack([sent]), data, rng).head, 0)

    count = int(data.train.counts[0])
    x, y = data.train.x[0, :count], data.train.y[0, :count]
    features = (x @ sent.model["1.weight"].T + sent.model["1.bias"]).relu()
    generic = EXPERT(sent.model, x)
    weight, bias = torch.zeros(CLASSES, 5, requires_grad=True), torch.zeros(CLASSES, requires_grad=True)
    optimizer, shuffle = torch.optim.SGD([weight, bias], lr=0.2), rng.generators("batches")[0]
    for _ in range(2):
        for rows in torch.randperm(count, generator=shuffle).split(4):
            optimizer.zero_grad()
            F.cross_entropy(generic[rows] + F.linear(features[rows], weight, bias), y[rows]).backward()
            optimizer.step()
    torch.testing.assert_close(head, {"weight": weight.detach(), "bias": bias.detach()})
    torch.testing.assert_close(sent, before)
    predicted = fedrod(FedRodConfig(), setup).predict(sent, Nothing(), PersonalState(head), x)
    torch.testing.assert_close(predicted, (generic + F.linear(features, weight, bias)).log_softmax(1))


def test_the_personal_head_is_no_part_of_any_message(tmp_path: Path):
    outcome = run_algorithm(fedrod(FedRodConfig(), tiny_setup()), tiny_federation(), tmp_path / "store")
    listed = {name for rows in outcome.manifest["sent_by_clients"].values() for name in rows}
    assert {name for name in listed if name.startswith("model/")} == {f"model/{name}" for name in EXPERT.init(0)}
    assert newest_private(tmp_path / "store", "final", PersonalState, 2).head["weight"].any()


def test_a_model_without_an_output_layer_is_refused_before_the_rounds():
    words = tiny_setup()._replace(expert=Network(lambda: BagOfWords(10, CLASSES), "expert", (2, 4)))
    with pytest.raises(ConfigError, match="no output layer"):
        fedrod(FedRodConfig(), words)
