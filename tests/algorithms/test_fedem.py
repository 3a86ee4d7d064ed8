import pytest
import torch
import torch.nn.functional as F

from builders import (
    CLASSES,
    EMPTY,
    FEATURES,
    SOME_OPTED_OUT,
    make_expert,
    newest_private,
    run_algorithm,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedem import (
    Broadcast,
    FedEmConfig,
    MixtureWeights,
    Update,
    components_rejection,
    fedem,
    responsibilities,
)
from fedmoe.algorithms.ifca import distinct_starts
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.streams import Streams, torch_stream

EXPERT = tiny_setup().expert
SHARES = (0.9, 0.1, 0.7, 0.3, 0.8, 0.2, 0.85, 0.25)  # of the first way to label, client by client; the last two are new


def mixed_federation(size=200):
    """Every client labels some of its examples in one way and the others in another way, in shares of its own."""
    parts = {}
    for client, share in enumerate(SHARES):
        generator = torch_stream("mixed", client)
        x = torch.randn(size, FEATURES, generator=generator)
        other_way = torch.rand(size, generator=generator) > share
        parts[f"c{client}"] = {"train": (x, (x[:, :CLASSES].argmax(1) + other_way.long()) % CLASSES)}
    return federation_from_clients(parts, unseen=["c6", "c7"], num_classes=CLASSES)


def mean_of(outcome, figure, model):
    own = [getattr(s, figure) for s in outcome.scores if (s.model, s.data) == (model, "own")]
    return sum(own) / len(own)


@pytest.mark.parametrize("backend", ["batched", "sequential", "native"])
def test_with_one_component_it_is_fedavg(backend, tmp_path):
    """Every responsibility is 1, so the weighted loss is the plain one."""
    setup = tiny_setup(backend)
    ours = run_algorithm(fedem(FedEmConfig(num_components=1), setup), tiny_federation(), tmp_path / "ours", rounds=3)
    plain = run_algorithm(fedavg(FedAvgConfig(), setup), tiny_federation(), tmp_path / "plain", rounds=3)
    torch.testing.assert_close(trees.pick(ours.server.experts, 0), plain.server.model, rtol=1e-5, atol=1e-6)
    weights = newest_private(tmp_path / "ours", "final", MixtureWeights, 0).weights
    assert weights.tolist() == [1.0]


def test_it_recovers_two_components_and_every_clients_shares(tmp_path):
    """Also those of new clients, which fit nothing but their mixture weights."""
    setup = tiny_setup("batched", clients_per_round=None)
    setup = setup._replace(federated=setup.federated.with_settings(batch_size=20, learning_rate=0.5))
    config = FedEmConfig(num_components=2)
    found = run_algorithm(fedem(config, setup), mixed_federation(), tmp_path / "fedem", rounds=30)
    plain = run_algorithm(fedavg(FedAvgConfig(), setup), mixed_federation(), tmp_path / "fedavg", rounds=30)
    weights_SM = torch.stack(
        [newest_private(tmp_path / "fedem", "final", MixtureWeights, client).weights for client in range(len(SHARES))]
    )
    first = int(weights_SM[0].argmax())
    torch.testing.assert_close(weights_SM[:, first], torch.tensor(SHARES), atol=0.12, rtol=0)
    assert mean_of(found, "accuracy", "after") > mean_of(plain, "accuracy", "before") + 0.1
    assert mean_of(found, "loss", "after") < mean_of(plain, "loss", "before") - 0.1


def test_a_round_is_one_step_of_em():
    """In a few lines of plain torch: q, then pi, then weighted training."""
    setup, client, pi = tiny_setup("sequential"), SOME_OPTED_OUT, torch.tensor([0.6, 0.3, 0.1])
    data = tiny_federation().data([client], opted_in_only=True)
    sent = Broadcast(distinct_starts(EXPERT, 5, 3), torch.arange(3))
    (train,) = fedem(FedEmConfig(), setup).round
    rng = Streams(0, "round:train", 1, (client,))
    state, update, _ = train.local_update(trees.stack([sent]), MixtureWeights(pi[None]), data, rng)

    count = int(data.train.counts[0])
    x, y = data.train.x[0, :count], data.train.y[0, :count]
    modules = [make_expert() for _ in range(3)]
    for module, start in zip(modules, trees.unstack(sent.experts, 3), strict=True):
        module.load_state_dict(start)
    losses_MN = torch.stack([F.cross_entropy(module(x), y, reduction="none") for module in modules]).detach()
    joint_MN = pi[:, None] * torch.exp(-losses_MN)
    q_MN = joint_MN / joint_MN.sum(0)
    torch.testing.assert_close(state.weights[0], q_MN.mean(1))
    for m, module in enumerate(modules):
        optimizer, shuffle = torch.optim.SGD(module.parameters(), lr=0.2), rng.generators("batches")[0]
        for _ in range(2):
            for rows in torch.randperm(count, generator=shuffle).split(4):
                optimizer.zero_grad()
                (q_MN[m, rows] * F.cross_entropy(module(x[rows]), y[rows], reduction="none")).mean().backward()
                optimizer.step()
        own = {name: leaf[0, m] for name, leaf in update.experts.items()}
        torch.testing.assert_close(own, dict(sorted(module.state_dict().items())))
    assert update.num_examples.tolist() == [count]


def test_responsibilities_bear_weights_of_zero_and_tiny_likelihoods():
    q = responsibilities(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([[[0.0, -2000.0, -2001.0]]]))
    torch.testing.assert_close(q[0, 0], torch.tensor([0.0, 0.7310586, 0.2689414]))


def test_it_predicts_the_mixture_with_the_clients_own_weights():
    algorithm, x = fedem(FedEmConfig(), tiny_setup()), torch.randn(5, FEATURES)
    sent, pi = Broadcast(distinct_starts(EXPERT, 5, 3), torch.arange(3)), torch.tensor([0.2, 0.0, 0.8])
    probs_MBC = torch.stack([EXPERT(one, x).softmax(1) for one in trees.unstack(sent.experts, 3)])
    expected = torch.einsum("m,mbc->bc", pi, probs_MBC)
    start = algorithm.init_client(sent, 0, 0)
    torch.testing.assert_close(algorithm.predict(sent, MixtureWeights(pi), None, x).exp(), expected)
    torch.testing.assert_close(algorithm.predict(sent, start, MixtureWeights(pi), x).exp(), expected)
    torch.testing.assert_close(algorithm.predict(sent, start, None, x).exp(), probs_MBC.mean(0))


def test_weights_fitted_after_the_rounds_are_the_most_likely_ones():
    """With the components fixed the likelihood is concave in pi: no direction improves on a long fit."""
    setup = tiny_setup()
    algorithm, sent = (
        fedem(FedEmConfig(mixture_steps=2000), setup),
        Broadcast(distinct_starts(EXPERT, 5, 3), torch.arange(3)),
    )
    data = tiny_federation().data([0, 2, EMPTY], opted_in_only=False)
    states = trees.stack([MixtureWeights(torch.tensor([0.2, 0.3, 0.5]))] * 3)
    fitted = algorithm.personalize(trees.stack([sent] * 3), states, None, data, None).weights
    for s in (0, 1):
        count = int(data.train.counts[s])
        x, y = data.train.x[s, :count], data.train.y[s, :count]
        at_label_NM = torch.stack(
            [EXPERT(one, x).softmax(1)[torch.arange(count), y] for one in trees.unstack(sent.experts, 3)], dim=1
        )
        mean_gain_M = (at_label_NM / (at_label_NM @ fitted[s])[:, None]).mean(0)
        assert mean_gain_M.max() < 1 + 1e-3  # the Karush-Kuhn-Tucker condition
    torch.testing.assert_close(fitted[2], torch.tensor([0.2, 0.3, 0.5]))  # nothing to fit to


def test_mixture_weights_are_no_part_of_any_message(tmp_path):
    manifest = run_algorithm(
        fedem(FedEmConfig(num_components=5), tiny_setup()), tiny_federation(), tmp_path / "store"
    ).manifest
    listed = {
        name.split("/")[0] for table in ("sent_by_clients", "received_by_clients")
        for rows in manifest[table].values() for name in rows
    }  # fmt: skip
    assert listed == {"experts", "expert_ids", "num_examples", "report:training_loss"}


def test_an_update_holds_every_component_in_order():
    sent = Broadcast(distinct_starts(EXPERT, 5, 3), torch.arange(3))
    assert components_rejection(Update(sent.experts, torch.arange(3), torch.tensor(1.0)), sent) is None
    fewer = Update({name: leaf[:2] for name, leaf in sent.experts.items()}, torch.arange(2), torch.tensor(1.0))
    for update in (fewer, Update(sent.experts, torch.tensor([1, 0, 2]), torch.tensor(1.0))):
        assert "it holds the components" in components_rejection(update, sent)
