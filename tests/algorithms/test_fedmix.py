"""FedMix, Algorithms 1 and 2: what the paper says of them must hold."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedmoe
from builders import (
    CLASSES,
    FEATURES,
    PARTICIPANTS,
    PLAIN,
    SOME_OPTED_OUT,
    newest_private,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees, wire
from fedmoe.aggregation.server_optimizer import ServerOptimizer, server_step
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedavg import ServerState as FedAvgServer
from fedmoe.algorithms.fedmix.algorithm import (
    expert_shares,
    fedmix,
    init_client,
    init_server,
    local_update,
    send_experts,
)
from fedmoe.algorithms.fedmix.objective import Objective
from fedmoe.algorithms.fedmix.states import ClientState, FedMixConfig, Update
from fedmoe.clients.federation import side_by_side
from fedmoe.core_types import ClientData
from fedmoe.encoding import decode_tensors
from fedmoe.models.expert_mixture import marginal_entropy
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.batches import shuffled
from fedmoe.training.inference import clients_of

AVERAGING = ServerOptimizer("sgd")


def all_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(trees.leaves(one), trees.leaves(other), strict=True))


# Special cases


@pytest.mark.parametrize("optimizer", [AVERAGING, ServerOptimizer("adam", 0.05), ServerOptimizer("yogi")])
def test_one_expert_is_generalised_fedavg(optimizer, tmp_path):
    setup = tiny_setup("sequential")
    one = run_algorithm(
        fedmix(FedMixConfig(num_experts=1, server_optimizer=optimizer), setup), tiny_federation(), tmp_path / "a"
    ).server
    other = run_algorithm(
        fedavg(FedAvgConfig(server_optimizer=optimizer), setup), tiny_federation(), tmp_path / "b"
    ).server
    for name, leaf in other.model.items():
        torch.testing.assert_close(one.experts[name][0], leaf, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(one.expert_moments.square[name][0], other.moments.square[name], atol=1e-7, rtol=1e-5)


def test_an_expert_for_each_client_with_a_fixed_assignment_is_that_many_separate_models(tmp_path):
    """q(z|s) and the gate name one expert each; then nothing that a client does reaches another's expert."""
    setup, federation = tiny_setup("sequential", clients_per_round=None), tiny_federation()
    config = FedMixConfig(num_experts=4, condition="client", damping=1.0, server_optimizer=AVERAGING)

    def one_expert_each(broadcast, client, _seed):
        blank = init_client(config, setup, broadcast)
        mine_K = torch.eye(4)[PARTICIPANTS.index(client) if client in PARTICIPANTS else 0]
        return blank._replace(usage=mine_K, gate={**blank.gate, "bias": 1e4 * mine_K})

    together = run_algorithm(
        fedmix(config, setup)._replace(init_client=one_expert_each), federation, tmp_path / "together", rounds=3
    )
    for k, client in enumerate(PARTICIPANTS):
        start = trees.pick(init_server(config, setup, 0).experts, k)
        alone = fedavg(FedAvgConfig(), setup)._replace(
            sample=lambda *_, c=client: np.array([c]),
            init_server=lambda _seed, w=start: FedAvgServer(w, w, torch.tensor(torch.inf)),
        )
        outcome = run_algorithm(alone, federation, tmp_path / str(client), rounds=3)
        for name, leaf in outcome.server.model.items():
            torch.testing.assert_close(together.server.experts[name][k], leaf, atol=1e-6, rtol=1e-6)
    assert together.server.usage[list(PARTICIPANTS)].tolist() == torch.eye(4).tolist()


def algorithm_1(config, setup, federation, rounds):
    """The printed listing, one step after the other, with plain autograd and everyone in every round."""
    server = init_server(config, setup, 0)
    gates = {}
    for number in range(1, rounds + 1):
        sent, counts, usages = [], [], []
        for client in PARTICIPANTS:
            (rows,) = clients_of(federation.data([client], opted_in_only=True).train)
            start = {**{f"w.{n}": w for n, w in server.experts.items()}, "phi": server.posterior}
            theta = gates.get(client) or {"A": torch.zeros(config.num_experts, 5), "b": torch.zeros(config.num_experts)}
            params = {name: tensor.clone().requires_grad_() for name, tensor in {**start, **theta}.items()}
            (generator,) = Streams(0, "round:train", number, (client,)).generators("batches")
            stream = shuffled(generator, len(rows.y), setup.federated.settings.batch_size)
            for _ in range(setup.federated.settings.epochs * -(-len(rows.y) // setup.federated.settings.batch_size)):
                at = next(stream)
                loss = -printed_objective(setup, params, rows.x[at], rows.y[at], rows.y).mean()
                grads = torch.autograd.grad(loss, list(params.values()))
                rate = setup.federated.settings.learning_rate
                params = {
                    n: (p - rate * g).detach().requires_grad_() for (n, p), g in zip(params.items(), grads, strict=True)
                }
            gates[client] = {"A": params["A"].detach(), "b": params["b"].detach()}
            sent.append({name: params[name].detach() for name in start})
            counts.append(len(rows.y))
            usages.append(server.posterior.softmax(-1)[rows.y].mean(0))
        server = printed_server_step(config, server, sent, torch.tensor(counts), torch.stack(usages))
    return server, gates


def printed_objective(setup, params, x, y, all_y):
    """E_q(z|y) [log p(y|x, z) p(z|x, s)], with eq. 9 for the gate."""
    q_CK = params["phi"].softmax(-1)
    usage_K = q_CK[all_y].mean(0)
    likelihoods, pooled = [], 0
    for k in range(len(usage_K)):
        expert = {name[2:]: tensor[k] for name, tensor in params.items() if name.startswith("w.")}
        scores, features = setup.expert.with_features(expert, x)
        likelihoods.append(scores.log_softmax(-1)[torch.arange(len(y)), y])
        pooled = pooled + usage_K[k] * features
    log_gate = (pooled @ params["A"].T + params["b"]).log_softmax(-1)
    return (q_CK[y] * (torch.stack(likelihoods, 1) + log_gate)).sum(1)


def printed_server_step(config, server, sent, counts, usage_SK):
    mass = usage_SK * counts[:, None]
    p_s_given_z = mass / mass.sum(0)
    experts, moments = [], []
    for k in range(config.num_experts):
        w, m = trees.pick((server.experts, server.expert_moments), k)
        change = {n: sum(p_s_given_z[s, k] * (u[f"w.{n}"][k] - w[n]) for s, u in enumerate(sent)) for n in w}
        for into, part in zip((experts, moments), server_step(config.server_optimizer, w, change, m), strict=True):
            into.append(part)
    delta = sum(n / counts.sum() * (u["phi"] - server.posterior) for n, u in zip(counts, sent, strict=True))
    delta = delta + torch.autograd.functional.jacobian(marginal_entropy, server.posterior)
    common, common_moments = server_step(
        config.server_optimizer, {"posterior": server.posterior}, {"posterior": delta}, server.moments
    )
    return server._replace(
        experts=trees.stack(experts), expert_moments=trees.stack(moments), posterior=common["posterior"],
        moments=common_moments,
    )  # fmt: skip


def test_without_pruning_it_is_algorithm_1_as_printed(tmp_path):
    config = FedMixConfig(num_experts=3, server_optimizer=ServerOptimizer("adam", 0.05))
    setup = tiny_setup("batched", clients_per_round=None)
    algorithm = fedmix(config, setup)
    outcome = run_algorithm(algorithm, tiny_federation(), tmp_path / "store", rounds=3, cohort_size=4)
    expected, gates = algorithm_1(config, setup, tiny_federation(), rounds=3)
    for name, leaf in trees.to_named(expected._replace(usage=outcome.server.usage)).items():
        torch.testing.assert_close(trees.to_named(outcome.server)[name], leaf, atol=2e-5, rtol=1e-4, msg=name)
    for client in PARTICIPANTS:
        gate = newest_private(tmp_path / "store", "client", ClientState, client).gate
        torch.testing.assert_close(
            gate, {"weight": gates[client]["A"], "bias": gates[client]["b"]}, atol=2e-5, rtol=1e-4
        )


# The server


def updates_of(server, usages, expert_ids=None, move=0.1):
    ids = expert_ids or {client: torch.arange(usage.numel()) for client, usage in usages.items()}
    return {
        client: Update(
            experts={name: leaf[ids[client]] + move for name, leaf in server.experts.items()},
            expert_ids=ids[client],
            posterior=server.posterior,
            gate={},
            usage=usage,
            num_examples=torch.tensor(10.0),
        )
        for client, usage in usages.items()
    }


@pytest.mark.parametrize("why", ["nobody used it", "nobody was sent it"])
def test_an_expert_that_no_client_used_keeps_its_weights_and_its_moments(why):
    config = FedMixConfig(num_experts=3)
    algorithm = fedmix(config, tiny_setup())
    server = algorithm.init_server(0)
    aggregate = algorithm.round[0].aggregate
    server = aggregate(server, updates_of(server, {0: torch.full((3,), 1 / 3)}), {}, {})  # so that moments are not 0
    if why == "nobody used it":
        updates = updates_of(server, {0: torch.tensor([0.5, 0.0, 0.5]), 1: torch.tensor([1.0, 0.0, 0.0])})
    else:
        usage = torch.tensor([0.5, 0.1, 0.4])
        updates = updates_of(server, {0: usage, 1: usage}, {0: torch.tensor([0, 2]), 1: torch.tensor([0])})
    after = aggregate(server, updates, {}, {})
    assert all_equal(trees.pick((after.experts, after.expert_moments), 1), trees.pick(server[:2], 1))
    for k in (0, 2):
        assert not all_equal(trees.pick(after.experts, k), trees.pick(server.experts, k))
        assert int(after.expert_moments.step[k]) == 2


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_the_shares_of_clients_in_an_expert_sum_to_one(num_clients, num_experts, seed):
    rng = torch.Generator().manual_seed(seed)
    usage_SK = torch.rand(num_clients, num_experts, generator=rng).double()
    counts_S = torch.randint(1, 100, (num_clients,), generator=rng).double()
    sent_SK = torch.rand(num_clients, num_experts, generator=rng) < 0.7
    shares_SK = expert_shares(usage_SK, counts_S, sent_SK)
    expected = sent_SK.any(0).double()
    torch.testing.assert_close(shares_SK.sum(0), expected)
    assert not shares_SK[~sent_SK].any()
    if sent_SK.sum(0).max() > 1:
        (first, second), k = sent_SK[:, int(sent_SK.sum(0).argmax())].nonzero()[:2, 0], int(sent_SK.sum(0).argmax())
        ratio = usage_SK[first, k] * counts_S[first] / (usage_SK[second, k] * counts_S[second])
        assert float(shares_SK[first, k] / shares_SK[second, k]) == pytest.approx(float(ratio))


def test_a_usage_that_is_no_distribution_is_rejected():
    algorithm = fedmix(FedMixConfig(num_experts=2), tiny_setup())
    sent = algorithm.round[0].broadcast(algorithm.init_server(0), 0, [])
    like = algorithm.round[0].update_like(sent)
    rejection = algorithm.round[0].rejection
    assert rejection(like._replace(usage=torch.tensor([0.25, 0.75])), sent) is None
    for usage in ([0.9, 0.9], [1.5, -0.5], [0.0, 0.0]):
        assert "is not a distribution" in rejection(like._replace(usage=torch.tensor(usage)), sent)


# Padding


def test_padding_changes_nothing():
    """A client beside a larger one, whose rows are padded to the other's length, sends what it would send alone."""
    config, setup = FedMixConfig(num_experts=3, prune_threshold=0.5), tiny_setup()
    server = init_server(config, setup, 0)
    server = server._replace(posterior=torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(1)))
    data = tiny_federation().data([PLAIN, SOME_OPTED_OUT], opted_in_only=False)
    alone = tiny_federation().data([PLAIN], opted_in_only=False)
    longer = ClientData(side_by_side([*clients_of(data.train)]), data.validation)
    poisoned = longer.train.x.clone()
    poisoned[0, int(longer.train.counts[0]) :] = 1e3
    longer = ClientData(longer.train._replace(x=poisoned), longer.validation)

    def sent(clients, examples):
        shared = trees.stack([send_experts(config, server, client) for client in clients])
        states = trees.stack([init_client(config, setup, trees.pick(shared, 0)) for _ in clients])
        return local_update(config, setup, shared, states, examples, Streams(0, "t", 1, tuple(clients)))

    (one, (update, *_), report), (two, (padded, *_), other) = (
        sent([PLAIN], alone),
        sent([PLAIN, SOME_OPTED_OUT], longer),
    )
    for first, second in ((update, padded), (trees.pick(one, 0), trees.pick(two, 0))):
        for name, leaf in trees.to_named(first).items():
            torch.testing.assert_close(trees.to_named(second)[name], leaf, atol=1e-6, rtol=1e-5, msg=name)
    torch.testing.assert_close(report.training_loss[0], other.training_loss[0])


# Pruning


def strict(num_experts=3):
    return FedMixConfig(
        num_experts=num_experts, prune_threshold=1.0, server_optimizer=ServerOptimizer("adam", 0.3)
    )  # whatever is used less than evenly is pruned


def test_the_manifest_counts_the_bytes_of_each_expert_that_were_really_encoded(tmp_path):
    for name, config in {"pruned": strict(), "whole": FedMixConfig(num_experts=3)}.items():
        setup = tiny_setup(clients_per_round=None)
        outcome, spy = run_spied(fedmix(config, setup), tiny_federation(), tmp_path / name, rounds=4, cohort_size=4)
        up, down = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
        for sent in spy.exchanged:
            for update, _report in sent.messages.values():
                add_bytes(up, update)
        for header, blobs in map(wire.unpack, spy.received):
            for which in header["broadcast_index"] if header["do"] == "exchange" else ():
                add_bytes(down, decode_tensors(blobs[which]))
        assert up == bytes_in_manifest(outcome.manifest["sent_by_clients"]["train"])
        assert down == bytes_in_manifest(outcome.manifest["received_by_clients"]["train"])
        whole = 4 * len(PARTICIPANTS) * setup.expert.num_weights * 4
        if name == "whole":
            assert up == down == dict.fromkeys(range(3), whole)
        else:
            assert all(up[k] <= down[k] < whole for k in range(3)) and sum(up.values()) < sum(down.values())


def add_bytes(into, named):
    for place, k in enumerate(named["expert_ids"].tolist()):
        into[k] += sum(leaf[place].nbytes for name, leaf in named.items() if name.startswith("experts/"))


def bytes_in_manifest(rows):
    return {k: sum(row["bytes"] for name, row in rows.items() if name.startswith(f"experts/{k}/")) for k in range(3)}


def test_clients_with_different_experts_train_in_one_cohort(tmp_path):
    algorithm = fedmix(strict(), tiny_setup(clients_per_round=None))
    _, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store", rounds=4, cohort_size=4)
    sent = []
    for header, blobs in map(wire.unpack, spy.received):
        if header["do"] == "exchange":
            sent.append({tuple(decode_tensors(blobs[i])["expert_ids"].tolist()) for i in header["broadcast_index"]})
    assert any(len(sets) > 1 for sets in sent)
    assert all(len({len(one) for one in sets}) == 1 for sets in sent)


def test_the_server_sends_what_the_last_report_says_and_sends_it_again_when_usage_returns():
    config = FedMixConfig(num_experts=4, prune_threshold=0.8)  # floor 0.2; the server's, 0.18
    server = init_server(config, tiny_setup(), 0)
    assert send_experts(config, server, 0).expert_ids.tolist() == [0, 1, 2, 3]
    usage = server.usage.clone()
    usage[0] = torch.tensor([0.5, 0.19, 0.17, 0.14])
    pruned = send_experts(config, server._replace(usage=usage), 0)
    assert pruned.expert_ids.tolist() == [0, 1]
    assert all(torch.equal(leaf, server.experts[name][:2]) for name, leaf in pruned.experts.items())
    usage[0] = torch.tensor([0.4, 0.1, 0.3, 0.2])
    assert send_experts(config, server._replace(usage=usage), 0).expert_ids.tolist() == [0, 2, 3]
    new_client = len(usage) + 3
    assert send_experts(config, server._replace(usage=usage), new_client).expert_ids.tolist() == [0, 1, 2, 3]


def test_a_client_keeps_back_what_it_pruned_and_reports_its_usage_as_it_is():
    config, setup = FedMixConfig(num_experts=3, prune_threshold=0.6), tiny_setup()  # floor 0.2
    posterior = torch.tensor([[0.5, 0.4, 0.1]] * CLASSES).log()
    server = init_server(config, setup, 0)._replace(posterior=posterior)
    shared = trees.stack([send_experts(config, server, PLAIN)])
    state = trees.stack([init_client(config, setup, send_experts(config, server, PLAIN))])
    data = tiny_federation().data([PLAIN], opted_in_only=True)
    _, (update,), _ = local_update(config, setup, shared, state, data, Streams(0, "t", 1, (PLAIN,)))
    assert update.expert_ids.tolist() == [0, 1]
    torch.testing.assert_close(update.usage, torch.tensor([0.5, 0.4, 0.1]))
    assert all(len(leaf) == 2 for leaf in update.experts.values())
    assert not all_equal(trees.pick(update.experts, 1), trees.pick(server.experts, 1))


def test_the_loss_of_a_client_that_pruned_is_that_of_algorithm_2():
    """Of experts 0, 2 and 3 that it holds it uses 0 and 2: the experts' term takes q', the gate's term all of q."""
    config, setup = FedMixConfig(num_experts=4, prune_threshold=0.8), tiny_setup()
    rng = torch.Generator().manual_seed(3)
    phi, x = torch.randn(CLASSES, 4, generator=rng), torch.randn(6, FEATURES, generator=rng)
    y, shares = torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([0.5, 0.3, 0.2])
    gate = {"weight": torch.randn(4, 5, generator=rng), "bias": torch.randn(4, generator=rng)}
    experts = [setup.expert.init(k) for k in (0, 2, 3)]
    parts = {"experts": trees.stack(experts), "posterior": phi, "gate": gate}
    frozen = {"shares": shares, "expert_ids": torch.tensor([0, 2, 3]), "in_use": torch.tensor([True, True, False])}
    losses_B = Objective(config, setup.expert)({"mixture": parts}, frozen, Batch(x, y, {}))

    q_CK = phi.softmax(-1)
    kept_CK = q_CK * torch.tensor([1.0, 0, 1, 0])
    kept_CK, usage_K = kept_CK / kept_CK.sum(1, keepdim=True), shares @ q_CK * torch.tensor([1.0, 0, 1, 0])
    (scores_0, h_0), (scores_2, h_2) = (setup.expert.with_features(expert, x) for expert in experts[:2])
    pooled = (usage_K[0] * h_0 + usage_K[2] * h_2) / usage_K.sum()
    log_gate = (pooled @ gate["weight"].T + gate["bias"]).log_softmax(-1)
    rows = torch.arange(6)
    likelihood = sum(kept_CK[y, k] * s.log_softmax(-1)[rows, y] for k, s in ((0, scores_0), (2, scores_2)))
    torch.testing.assert_close(losses_B, -likelihood - (q_CK[y] * log_gate).sum(1))


# Defaults


def test_by_default_a_few_rounds_bring_it_as_far_as_fedavg(tmp_path):
    """Adam's own default rate does not: it hardly moves in so few rounds."""
    accuracy = {}
    for name in ("fedavg", "fedmix"):
        table = {**digits(), "algorithm": {"name": name}}
        scores = fedmoe.run(table, directory=tmp_path / name).scores
        own = [score.accuracy for score in scores if (score.model, score.data) == ("before", "own")]
        accuracy[name] = sum(own) / len(own)
    assert accuracy["fedmix"] > accuracy["fedavg"] - 0.05, accuracy


# Specialists or an ensemble


def test_dropping_the_entropy_specialises_and_keeping_it_makes_an_ensemble(tmp_path):
    """Figure 3 and 14a in small, on real digits: by the entropy of q(z|y) at the end, in units of log K."""

    def mean_entropy(entropy: bool, directory: Path) -> float:
        algorithm = {"name": "fedmix", "entropy": entropy, "server_optimizer": {"name": "adam", "learning_rate": 0.1}}
        result = fedmoe.run({**digits(), "algorithm": algorithm}, directory=directory)
        q_CK = torch.tensor(result.data["assignment"]["shares"])
        return float(torch.special.entr(q_CK).sum(1).mean() / torch.tensor(4.0).log())

    assert mean_entropy(False, tmp_path / "specialists") < 0.5
    assert mean_entropy(True, tmp_path / "ensemble") > 0.9


def digits():
    return {
        "data": {"name": "digits"},
        "split": {"num_clients": 8, "train_size": 40, "validation_size": 8, "test_size": 20, "global_test_size": 100},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {
            "federated": {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 2},
            "personal": {"epochs": 1},
        },
        "schedule": {"rounds": 30, "clients_per_round": "all", "checkpoint_every": 30},
        "engine": {"workers": 1},
    }
