import pytest
import torch
import torch.nn.functional as F

from builders import (
    CLASSES,
    EMPTY,
    FEATURES,
    OPTED_OUT,
    UNSEEN,
    make_expert,
    newest_private,
    run_algorithm,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.ifca import (
    Broadcast,
    IfcaConfig,
    PersonalState,
    ServerState,
    Update,
    aggregate,
    choice_rejection,
    distinct_starts,
    ifca,
)
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.streams import Streams, torch_stream

EXPERT = tiny_setup().expert


def two_groups(clients=8, size=60):
    """The same inputs in both groups; in the second one every label means the next class. The last client is unseen."""
    parts = {}
    for client in range(clients):
        x = torch.randn(size, FEATURES, generator=torch_stream("two groups", client))
        parts[f"c{client}"] = {"train": (x, (x[:, :CLASSES].argmax(1) + client % 2) % CLASSES)}
    return federation_from_clients(
        parts, unseen=["c6", "c7"], opted_out={"c5": [True] * size}, num_classes=CLASSES, global_test=None
    )


def mean_accuracy(outcome, model, clients):
    own = [s.accuracy for s in outcome.scores if s.client in clients and (s.model, s.data) == (model, "own")]
    return sum(own) / len(own)


@pytest.mark.parametrize("backend", ["batched", "sequential", "native"])
def test_with_one_cluster_it_is_fedavg_to_the_last_bit(backend, tmp_path):
    outcomes = [
        run_algorithm(algorithm, tiny_federation(), tmp_path / str(number), rounds=3)
        for number, algorithm in enumerate(
            (
                ifca(IfcaConfig(num_clusters=1), tiny_setup(backend)),
                fedavg(FedAvgConfig(), tiny_setup(backend)),
            )
        )
    ]
    clustered, plain = (outcome.server for outcome in outcomes)
    assert all(torch.equal(leaf[0], plain.model[name]) for name, leaf in clustered.experts.items())


def test_it_finds_the_two_clusters_that_one_model_cannot_serve(tmp_path):
    """Every client ends with the model of its own group, also those that never sent anything."""
    setup = tiny_setup("batched", clients_per_round=None)
    found = run_algorithm(ifca(IfcaConfig(), setup), two_groups(), tmp_path / "ifca", rounds=15)
    plain = run_algorithm(fedavg(FedAvgConfig(), setup), two_groups(), tmp_path / "fedavg", rounds=15)
    losses = {c: newest_private(tmp_path / "ifca", "final", PersonalState, c).losses for c in range(8)}
    choices = [int(losses[client].argmin()) for client in range(8)]
    assert len(set(choices[0::2])) == len(set(choices[1::2])) == 1 and choices[0] != choices[1]
    assert mean_accuracy(found, "after", range(8)) > 0.85
    assert mean_accuracy(plain, "before", range(8)) < 0.6


def test_a_client_trains_and_sends_the_model_with_the_lowest_loss():
    """Algorithm 1 in a few lines of plain torch."""
    setup, client = tiny_setup("sequential"), 3
    data = tiny_federation().data([client], opted_in_only=True)
    sent = Broadcast(distinct_starts(EXPERT, 5, 3), torch.arange(3))
    (train,) = ifca(IfcaConfig(num_clusters=3), setup).round
    rng = Streams(0, "round:train", 1, (client,))
    _, update, _ = train.local_update(trees.stack([sent]), Nothing(), data, rng)

    count, models = int(data.train.counts[0]), trees.unstack(sent.experts, 3)
    x, y = data.train.x[0, :count], data.train.y[0, :count]
    losses = [F.cross_entropy(EXPERT(model, x), y) for model in models]
    best = int(torch.stack(losses).argmin())
    module = make_expert()
    module.load_state_dict(models[best])
    optimizer, shuffle = torch.optim.SGD(module.parameters(), lr=0.2), rng.generators("batches")[0]
    for _ in range(2):
        for rows in torch.randperm(count, generator=shuffle).split(4):
            optimizer.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
    assert update.expert_ids.tolist() == [[best]] and update.num_examples.tolist() == [count]
    torch.testing.assert_close(trees.pick(trees.pick(update.experts, 0), 0), dict(sorted(module.state_dict().items())))


def test_each_model_is_the_weighted_mean_over_the_clients_that_chose_it():
    def sent(value, choice, count):
        return Update({"w": torch.full((1, 2), float(value))}, torch.tensor([choice]), torch.tensor(float(count)))

    before = ServerState({"w": torch.tensor([[0.0, 0.0], [5.0, 5.0], [7.0, 7.0]])})
    after = aggregate(IfcaConfig(num_clusters=3), before, {0: sent(1, 0, 10), 1: sent(4, 0, 30), 2: sent(-2, 2, 60)})
    torch.testing.assert_close(after.experts["w"][:, 0], torch.tensor([3.25, 5.0, -2.0]))
    capped = aggregate(IfcaConfig(3, max_weight=10), before, {0: sent(1, 0, 10), 1: sent(4, 0, 30)})
    torch.testing.assert_close(capped.experts["w"][:, 0], torch.tensor([2.5, 5.0, 7.0]))


def test_an_update_holds_the_chosen_model_alone(tmp_path):
    two = Update({"w": torch.zeros(2, 1)}, torch.tensor([0, 2]), torch.tensor(1.0))
    assert choice_rejection(two) == "it holds the models [0, 2], not the one that it chose"
    assert choice_rejection(two._replace(expert_ids=torch.tensor([2]))) is None
    outcome = run_algorithm(ifca(IfcaConfig(), tiny_setup()), tiny_federation(), tmp_path / "store", rounds=2)
    model = sum(leaf.nbytes for leaf in EXPERT.init(0).values())
    for rows in outcome.manifest["messages_of_client"].values():
        assert rows["train"]["bytes"] == rows["train"]["messages"] * (model + 8 + 4 + 4)  # choice, count, loss


def test_who_sends_nothing_chooses_in_private_from_all_records(tmp_path):
    outcome = run_algorithm(ifca(IfcaConfig(), tiny_setup()), tiny_federation(), tmp_path / "store", rounds=2)
    for client in (OPTED_OUT, UNSEEN):
        records = tiny_federation().load(client).train
        models = trees.unstack(outcome.delivered[client].experts, 2)
        expected = torch.stack([F.cross_entropy(EXPERT(model, records.x), records.y) for model in models])
        losses = newest_private(tmp_path / "store", "final", PersonalState, client).losses
        torch.testing.assert_close(losses, expected)
        assert str(client) not in outcome.manifest["messages_of_client"]


def test_without_data_all_models_count_alike(tmp_path):
    algorithm = ifca(IfcaConfig(), tiny_setup())
    outcome = run_algorithm(algorithm, tiny_federation(), tmp_path / "store", rounds=2)
    nothing = newest_private(tmp_path / "store", "final", PersonalState, EMPTY)
    sent, x = outcome.delivered[EMPTY], torch.randn(5, FEATURES)
    mean = torch.stack([EXPERT(model, x).softmax(1) for model in trees.unstack(sent.experts, 2)]).mean(0)
    assert nothing.losses.tolist() == [torch.inf] * 2
    for personal in (None, nothing):
        torch.testing.assert_close(algorithm.predict(sent, Nothing(), personal, x).exp(), mean)


def test_a_diverged_model_is_nobodys_choice():
    broken = {name: torch.full_like(leaf, torch.nan) for name, leaf in EXPERT.init(0).items()}
    sent = Broadcast(trees.stack([broken, EXPERT.init(1)]), torch.arange(2))
    data = tiny_federation().data([0, 3], opted_in_only=True)
    (train,) = ifca(IfcaConfig(), tiny_setup()).round
    rng = Streams(0, "round:train", 1, (0, 3))
    _, update, _ = train.local_update(trees.stack([sent, sent]), Nothing(), data, rng)
    assert update.expert_ids.tolist() == [[1], [1]]


def test_models_that_start_alike_are_refused():
    alike = tiny_setup()._replace(expert=Network(make_expert(), "expert"))
    with pytest.raises(ConfigError, match="all 2 models start with the same weights"):
        ifca(IfcaConfig(), alike).init_server(0)
    assert ifca(IfcaConfig(num_clusters=1), alike).init_server(0)


def test_it_runs_in_whole_native_epochs():
    assert native_fallbacks(ifca(IfcaConfig(), tiny_setup("native")), tiny_federation()) == []
