"""Claims of Peterson, Kanani and Marathe (2019), and of what may be said of their privacy."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedmoe
from builders import PLAIN, SOME_OPTED_OUT, make_expert, make_gate, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms import domain_experts as module
from fedmoe.algorithms import fedavg
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.domain_experts import (
    DomainExpertsConfig,
    PrivateParts,
    domain_experts,
    evolve,
    predict,
    send_general,
    send_mixed,
)
from fedmoe.algorithms.fedavg import Broadcast, ServerState, Update
from fedmoe.clients.federation import examples, side_by_side, take
from fedmoe.models.task import Regression
from fedmoe.privacy_report import privacy_of
from fedmoe.streams import Streams
from fedmoe.training.halves import halves, in_first_half
from fedmoe.training.inference import clients_of

CLIENTS = (SOME_OPTED_OUT, PLAIN)
PRIVACY = {"sampling_rate": 0.5, "expected_batch_size": 2.0, "noise_multiplier": 1.0, "noise_source": "seeded"}


def own_parts(setup, seed: int) -> PrivateParts:
    parts = [PrivateParts(setup.expert.init(seed, c), setup.gate.init(seed, c), torch.tensor(1)) for c in CLIENTS]
    return trees.stack(parts)


def shared_of(setup) -> Broadcast:
    return trees.stack([Broadcast(setup.expert.init(1))] * len(CLIENTS))


def data_and_rng():
    return tiny_federation().data(CLIENTS, opted_in_only=True), Streams(0, "round:train", 1, CLIENTS)


def test_the_prediction_is_the_mixture_of_eq_2_where_alpha_weighs_the_general_model():
    setup, x = tiny_setup(), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    shared, own = Broadcast(setup.expert.init(1)), trees.pick(own_parts(setup, 2), 0)
    alpha = setup.gate(own.gate, x).sigmoid()
    general, private = (setup.predict(params, x).exp() for params in (shared.model, own.expert))
    torch.testing.assert_close(predict(setup, shared, own, x).exp(), alpha * general + (1 - alpha) * private)
    torch.testing.assert_close(predict(setup, shared, None, x).exp(), general)
    numbers = setup._replace(task=Regression())
    mixed = predict(numbers, shared, own, x)
    scores = [setup.expert(params, x) for params in (shared.model, own.expert)]
    torch.testing.assert_close(mixed, alpha * scores[0] + (1 - alpha) * scores[1])


def test_what_algorithm_2_sends_does_not_depend_on_gate_and_private_expert_and_algorithm_1s_does():
    setup, config = tiny_setup(), DomainExpertsConfig(variant=1)
    data, rng = data_and_rng()
    sent = [send_mixed(config, setup, shared_of(setup), own_parts(setup, seed), data, rng)[1].model for seed in (2, 3)]
    assert not any(torch.equal(sent[0][name], sent[1][name]) for name in sent[0])
    general = [send_general(setup, shared_of(setup), Nothing(), data, rng)[1].model for _ in range(2)]
    assert all(torch.equal(general[0][name], general[1][name]) for name in general[0])
    second = domain_experts(DomainExpertsConfig(), setup)
    assert second.client_type is Nothing and second.personal_type is PrivateParts  # so it is not even handed them


def test_a_gate_that_trusts_the_private_expert_keeps_gradients_from_the_general_model():
    """Section "Effects of the gating function on gradients": alpha near 0 suppresses what Algorithm 1 sends."""
    setup, config = tiny_setup(), DomainExpertsConfig(variant=1)
    data, rng = data_and_rng()
    sizes = {}
    for trust in (-9.0, 9.0):
        own = own_parts(setup, 2)
        gate = {name: torch.zeros_like(leaf) for name, leaf in own.gate.items()}
        last = max(name for name in gate if name.endswith("bias"))
        gate[last] += trust
        _, update, _ = send_mixed(config, setup, shared_of(setup), own._replace(gate=gate), data, rng)
        before = ServerState(setup.expert.init(1), {}, torch.tensor(0.0))
        each = {s: Update(trees.pick(update.model, s), torch.tensor(1.0)) for s in range(len(CLIENTS))}
        sizes[trust] = fedavg.gradient_size(setup, before, each)["gradient_norm"]
    assert sizes[-9.0] < 0.01 * sizes[9.0]


def test_the_gate_learns_from_its_own_half_and_the_expert_from_the_other(monkeypatch):
    setup, config = tiny_setup(), DomainExpertsConfig()
    trainer = setup.federated.with_settings(steps=1)
    data, rng = tiny_federation().data((PLAIN,), opted_in_only=False), Streams(0, "private", 1, (PLAIN,))
    shared, own = Broadcast(trees.stack([setup.expert.init(1)])), own_parts(setup, 2)
    own = trees.tree_map(lambda leaf: leaf[:1], own)
    rows = data.train
    other = rows._replace(x=rows.x + 1)
    found = []
    for pair in ((rows, rows), (rows, other), (other, rows)):
        monkeypatch.setattr(module, "halves", lambda _train, pair=pair: pair)
        found.append(evolve(config, setup, trainer, shared, own, data, rng))
    plain, gate_changed, expert_changed = found
    assert _equal(plain.expert, gate_changed.expert) and not _equal(plain.gate, gate_changed.gate)
    assert _equal(plain.gate, expert_changed.gate) and not _equal(plain.expert, expert_changed.expert)


def _equal(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_halves_are_fixed_by_record():
    generator = torch.Generator().manual_seed(3)
    rows = examples(torch.randn(400, 5, generator=generator), torch.randint(3, (400,), generator=generator))
    first = in_first_half(rows)
    assert 160 < int(first.sum()) < 240
    kept = torch.rand(400, generator=generator) < 0.5
    assert torch.equal(in_first_half(take(rows, kept)), first[kept])  # whoever else is there
    order = torch.randperm(400, generator=generator)
    assert torch.equal(in_first_half(take(rows, order)), first[order])
    cohort = trees.stack([rows, rows])
    models, gate = halves(cohort)
    assert models.counts.tolist() == [int(first.sum())] * 2 and gate.counts.tolist() == [int((~first).sum())] * 2
    ragged = side_by_side([rows, take(rows, slice(250))])
    models, gate = halves(ragged)
    for half, mask in ((models, first), (gate, ~first)):
        for own, count in zip(clients_of(half), (400, 250), strict=True):
            expected = take(take(rows, slice(count)), mask[:count])
            assert torch.equal(own.x, expected.x) and torch.equal(own.y, expected.y)
        assert not half.x[1, half.counts[1] :].any()  # padded with zeros
    integers = examples(torch.randint(9, (200, 2, 4), generator=generator), torch.randn(200, 2, generator=generator))
    assert 70 < int(in_first_half(integers).sum()) < 130


def test_the_penalty_pulls_the_gate_to_use_both():
    """|mean alpha - 1/2|: with it alone a gate that prefers one expert comes back to the middle."""
    setup = tiny_setup()
    setup = setup._replace(federated=setup.federated.with_settings(steps=300, learning_rate=0.05))
    data, rng = tiny_federation().data((PLAIN,), opted_in_only=False), Streams(0, "private", 1, (PLAIN,))
    model = trees.stack([setup.expert.init(1)])
    means = {}
    for balance in (0.0, 5.0):
        gate = {name: torch.zeros_like(leaf) for name, leaf in trees.stack([setup.gate.init(1)]).items()}
        gate[max(name for name in gate if name.endswith("bias"))] += 3.0
        own = PrivateParts(model, gate, torch.ones(1))  # both experts alike: the loss does not move the gate
        config = DomainExpertsConfig(balance=balance, expert_rate=1e-9)
        trained = evolve(config, setup, setup.federated, Broadcast(model), own, data, rng)
        means[balance] = float(setup.gate(trees.pick(trained.gate, 0), data.train.x[0]).sigmoid().mean())
    assert means[0.0] > 0.9 and abs(means[5.0] - 0.5) < 0.1


@pytest.mark.parametrize("variant", [1, 2])
def test_algorithm_2_has_a_ledger_and_algorithm_1_no_guarantee(variant: int, tmp_path: Path) -> None:
    table = {
        "algorithm": {"name": "domain_experts", "variant": variant},
        "schedule": {"rounds": 3, "clients_per_round": "all"},
        "training": {"federated": {"steps": 1, "optimizer": "sgd", "learning_rate": 0.1}},
        "engine": {"workers": 1},
        "privacy": PRIVACY,
    }
    result = fedmoe.run(table, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=tmp_path)
    report = privacy_of(tmp_path)
    assert result.data["history"][0]["reports"]["gradient_norm"] > 0  # what the server can tell from what it was sent
    if variant == 2:
        assert report.epsilon and report.epsilon > 0 and {one.steps for one in report.spent} == {3}
    else:
        assert report.epsilon is None and report.no_guarantee and "mixed loss" in report.no_guarantee


def test_a_linear_gate_beside_a_network(tmp_path: Path) -> None:
    table = {
        "algorithm": {"name": "domain_experts"},
        "model": {"name": "mlp", "hidden": [7]},
        "gate": {"name": "mlp", "hidden": []},
        "data": {"name": "generated"},
        "split": {"num_clients": 3, "train_size": 20, "validation_size": 5, "test_size": 5, "global_test_size": 10},
        "schedule": {"rounds": 1, "clients_per_round": 2},
    }
    parts = fedmoe.build(table)
    kinds = [[type(m) for m in net.module.modules() if isinstance(m, nn.Linear)] for net in (parts.expert, parts.gate)]
    assert [len(kind) for kind in kinds] == [2, 1]


def test_private_experts_help_where_users_differ(tmp_path: Path) -> None:
    """Two users of opposite labels: no shared linear model serves both, a private expert does."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    federation = fedmoe.federation_from_clients({"one": (x, y), "other": (x, 1 - y)})
    table = {
        "algorithm": {"name": "domain_experts"},
        "schedule": {"rounds": 60, "clients_per_round": "all"},
        "training": {"federated": {"steps": 2, "optimizer": "sgd", "learning_rate": 0.5, "batch_size": 20}},
        "engine": {"workers": 1},
    }
    result = fedmoe.run(
        table, federation=federation, expert=lambda: nn.Linear(4, 2), gate=lambda: nn.Linear(4, 1), directory=tmp_path
    )
    own = {(s["model"], s["client"]): s["accuracy"] for s in result.data["scores"] if s["data"] == "own"}
    assert all(own["after", user] > own["before", user] + 0.2 for user in range(2)), own
