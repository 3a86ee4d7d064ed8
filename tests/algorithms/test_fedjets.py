"""FedJETs: what Dun et al. (2023) say of it, claim by claim."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import (
    CLASSES,
    FEATURES,
    OPTED_OUT,
    PLAIN,
    UNSEEN,
    Outcome,
    opened,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_parts,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.fedavg import TrainingReport
from fedmoe.algorithms.fedjets.algorithm import aggregate, assemble, fedjets
from fedmoe.algorithms.fedjets.client import choose_experts, predict, train_anchor
from fedmoe.algorithms.fedjets.diagnostics import measure
from fedmoe.algorithms.fedjets.states import ExpertsDown, FedJetsConfig, Parts, RouterDown, ServerState, Trained
from fedmoe.algorithms.fedmix_common import FedMixCommonConfig, fedmix_common
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.federation import Federation, examples
from fedmoe.clients.per_example_cache import with_cached
from fedmoe.core_types import ClientData, Examples
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.models.resnet import resnet
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch
from fedmoe.training.routed_experts import EMBEDDING, RoutedLoss, train_routed

THREE = FedJetsConfig(num_experts=3, num_sent=2, router_hidden=4, router_rate=0.1)
ANCHORS = {"anchors": {"number": 2, "per_round": 2}, "clients_per_round": 4}


def with_anchors() -> Algorithm:
    config = FedJetsConfig(num_experts=2, num_sent=1, router_rate=0.1)
    return fedjets(config, tiny_setup(clients_per_round=2)._replace(anchors=(0, 1)))


def opinionated(parts: Parts) -> dict[str, Tensor]:
    """A router that likes each expert for some examples."""
    router = parts.router.init("r")
    x = torch.randn(200, FEATURES, generator=torch.Generator().manual_seed(1))
    loud = {**router, "second.weight": router["second.weight"] * 50, "second.bias": torch.zeros(3)}
    return {**loud, "second.bias": -parts.router(loud, parts.common.embed(x)).mean(0)}


def run(algorithm: Algorithm, folder: Path, **options: Any) -> Outcome:
    return run_algorithm(algorithm, tiny_federation(), folder / "store", **options)


def data_of(clients: list[int], algorithm: Algorithm) -> ClientData:
    return with_cached(tiny_federation(), algorithm.once_of_examples).data(clients, opted_in_only=True)


# The router's loss


def test_the_loss_is_not_renormalised_over_the_experts_that_were_sent():
    """-log sum_{i in e_s} g_i f_i with g the softmax over all M: moving mass to an expert that was not sent costs."""
    parts = assemble(THREE, tiny_setup())
    router, experts = parts.router.init("r"), trees.stack([parts.setup.expert.init("e", k) for k in range(2)])
    x, y = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
    embedding = parts.common.embed(x)
    batch = Batch(x, y, {EMBEDDING: embedding})
    losses = parts.loss({"experts": experts, "router": router}, {"expert_ids": torch.tensor([2, 0])}, batch)
    gate = parts.router(router, embedding).softmax(-1)
    answers = [parts.setup.expert(trees.pick(experts, h), x).softmax(-1)[torch.arange(5), y] for h in range(2)]
    torch.testing.assert_close(losses, -(gate[:, 2] * answers[0] + gate[:, 0] * answers[1]).log())
    towards_absent = {**router, "second.bias": router["second.bias"] + torch.tensor([0.0, 5.0, 0.0])}
    worse = parts.loss({"experts": experts, "router": towards_absent}, {"expert_ids": torch.tensor([2, 0])}, batch)
    assert (worse > losses + 1).all()


def loss_and_its_slopes(normalised_over: str) -> tuple[Tensor, Tensor]:
    """Of an example with two of three experts, and its gradient by the router's three scores."""
    parts = assemble(replace(THREE, normalised_over=normalised_over), tiny_setup())
    router, experts = parts.router.init("r"), trees.stack([parts.setup.expert.init("e", k) for k in range(2)])
    router = {name: tensor.requires_grad_() for name, tensor in router.items()}
    x = torch.randn(1, FEATURES, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.tensor([1]), {EMBEDDING: parts.common.embed(x)})
    losses = parts.loss({"experts": experts, "router": router}, {"expert_ids": torch.tensor([2, 0])}, batch)
    (slopes,) = torch.autograd.grad(losses.sum(), [router["second.bias"]])
    return losses.detach(), slopes


def test_the_printed_loss_takes_scores_from_experts_that_were_not_sent_and_the_other_loss_does_not():
    """So that a router comes to choose, for everybody, whatever has been sent before."""
    printed, slopes = loss_and_its_slopes("all")
    renormalised, other_slopes = loss_and_its_slopes("sent")
    assert slopes[1] > 0.1 and slopes[[0, 2]].sum() < -0.1
    assert other_slopes[[1]].tolist() == [pytest.approx(0, abs=1e-6)] and other_slopes[[0]].abs() > 1e-3
    assert (renormalised < printed).all()


def test_the_router_is_two_layers_over_the_common_experts_embedding():
    parts = assemble(THREE, tiny_setup())
    shapes = {name: tuple(tensor.shape) for name, tensor in parts.router.init(0).items()}
    features = parts.common.num_features
    assert shapes == {
        "first.weight": (4, features), "first.bias": (4,), "second.weight": (3, 4), "second.bias": (3,)
    }  # fmt: skip


# The choice


def chosen_by(embeddings: Tensor, router_bias: Tensor) -> list[int]:
    """By a router whose scores of an example are its embedding and a bias."""
    setup = tiny_setup()
    parts = assemble(FedJetsConfig(num_experts=3, num_sent=2, router_hidden=3), setup)
    parts = parts._replace(router=_Scores())
    rows = Examples(embeddings[None], torch.zeros(1, len(embeddings)), torch.tensor([len(embeddings)]), {})
    inputs = rows._replace(extra={EMBEDDING: embeddings[None]})
    data = ClientData(inputs, inputs, lambda: inputs)
    _, choice, _ = choose_experts(parts, RouterDown({"bias": router_bias[None]}), data)
    return choice.experts[0].tolist()


class _Scores:
    def __call__(self, params: dict[str, Tensor], embedding: Tensor) -> Tensor:
        return embedding + params["bias"]


def test_the_top_k_are_those_of_the_summed_scores():
    """Two examples prefer expert 0 a little, one prefers expert 2 much: by votes 0 would win, by sums 2 does."""
    shares = torch.tensor([[0.40, 0.30, 0.30], [0.40, 0.25, 0.35], [0.01, 0.01, 0.98]])
    assert chosen_by(shares.log(), torch.zeros(3)) == [2, 0]


def test_ties_are_broken_by_index():
    assert chosen_by(torch.zeros(4, 3), torch.zeros(3)) == [0, 1]
    assert chosen_by(torch.zeros(4, 3), torch.tensor([0.0, 1e-9, 1e-8])) == [0, 1]
    assert chosen_by(torch.zeros(4, 3), torch.tensor([0.0, 0.0, 1.0])) == [2, 0]


def test_different_clients_are_sent_different_experts_in_one_cohort(tmp_path):
    plain, router = fedjets(THREE, tiny_setup()), opinionated(assemble(THREE, tiny_setup()))
    algorithm = plain._replace(init_server=lambda seed: plain.init_server(seed)._replace(router=router))
    outcome, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store", rounds=4)
    choices = {
        tuple(update["experts"].tolist())
        for sent in spy.exchanged
        if sent.asked["index"] == 0
        for update, _ in sent.messages.values()
    }
    assert len(choices) > 1
    trains = [sent.asked for sent in spy.exchanged if sent.asked["phase"] == "round" and sent.asked["index"] == 1]
    cohorts = [asked["clients"] for asked in trains]
    assert max(map(len, cohorts)) == 2  # cohort_size of these runs
    assert outcome.manifest["rejected"] == []


def test_with_as_many_sent_as_there_are_and_no_anchors_every_client_receives_all_experts(tmp_path):
    outcome = run(fedjets(replace(THREE, num_sent=3), tiny_setup()), tmp_path)
    down = outcome.manifest["received_by_clients"]["train"]
    times = {row["times"] for name, row in down.items() if name.startswith("experts")}
    assert times == {sum(len(record.clients) for record in outcome.records)}


def test_a_client_that_opted_out_sends_nothing_and_chooses_alone_among_all_experts(tmp_path):
    outcome = run(fedjets(THREE, tiny_setup()), tmp_path)
    assert outcome.delivered[OPTED_OUT].expert_ids.tolist() == [0, 1, 2]
    assert str(OPTED_OUT) not in outcome.manifest["messages_of_client"]
    usable = next(
        tensor for name, tensor in outcome.private_tensors().items() if name.startswith(f"final of client {OPTED_OUT}")
    )
    assert usable.sum() == THREE.num_sent
    assert len(outcome.delivered[PLAIN].expert_ids) == len(outcome.delivered[UNSEEN].expert_ids) == THREE.num_sent


# Anchors


def test_an_anchors_update_touches_its_own_expert_and_the_router_only(tmp_path):
    algorithm = with_anchors()
    server = algorithm.init_server(0)
    sent = algorithm.round[1].broadcast(server, 1, [])
    assert sent.expert_ids.tolist() == [1] and sent.router.keys() == server.router.keys()
    assert algorithm.round[0].broadcast(server, 1, []) is None
    data, rng = data_of([1], algorithm), Streams(0, "round:train", 1, (1,))
    client = trees.stack([algorithm.init_client(sent, 1, 0)])
    _, update, _ = algorithm.round[1].local_update(trees.stack([sent]), client, data, rng)
    after = algorithm.round[1].aggregate(server, {1: trees.pick(update, 0)}, {}, {})
    for name, leaf in server.experts.items():
        assert torch.equal(after.experts[name][0], leaf[0]) and not torch.equal(after.experts[name][1], leaf[1])
    assert any(not torch.equal(after.router[name], leaf) for name, leaf in server.router.items())


def test_an_anchor_trains_its_expert_by_itself_and_the_router_to_name_it():
    """Two independent losses: the expert is what FedAvg would make of it, whatever the router says."""
    algorithm = with_anchors()
    parts = assemble(FedJetsConfig(num_experts=2, num_sent=1, router_rate=5.0), tiny_setup()._replace(anchors=(0, 1)))
    server = algorithm.init_server(0)
    data, rng = data_of([0], algorithm), Streams(0, "round:train", 1, (0,))
    sent = trees.stack([algorithm.round[1].broadcast(server, 0, [])])
    _, update, report = train_anchor(parts, sent, data, rng)
    alone = {name: leaf[0][None] for name, leaf in server.experts.items()}
    expected = parts.setup.federated.train_classifier(parts.setup.expert, alone, data, rng, stop_early=False)
    for name, leaf in expected.params["model"].items():
        assert torch.equal(update.experts[name][:, 0], leaf)
    assert isinstance(report, TrainingReport) and torch.equal(report.training_loss, expected.loss_S)
    embedding = data.train.extra[EMBEDDING][0]

    def named(router: dict[str, Tensor]) -> float:
        return float(parts.router(router, embedding).softmax(-1)[:, 0].mean())

    assert named(trees.pick(update.router, 0)) > named(server.router) + 0.1


def test_anchors_are_drawn_beside_the_others_and_only_they_are_not_asked_to_choose(tmp_path):
    outcome, spy = run_spied(with_anchors(), tiny_federation(), tmp_path / "store", rounds=3, **ANCHORS)
    for record in outcome.records:
        assert record.clients == [0, 1, 3, 4]
    asked = [sent for sent in spy.exchanged if sent.asked["phase"] == "round" and sent.asked["index"] == 0]
    assert {client for sent in asked for client in sent.messages} == {3, 4}


# The server


def trained(experts: list[int], value: float, count: int) -> Trained:
    weights, router = torch.full((len(experts), 2), value), torch.full((1,), value)
    return Trained({"w": weights}, torch.tensor(experts), {"r": router}, torch.tensor(float(count)))


def test_router_and_experts_are_averaged_over_those_that_trained_them_and_an_untouched_expert_stays():
    server = ServerState({"w": torch.zeros(3, 2)}, {"r": torch.zeros(1)})
    after = aggregate(THREE, server, {5: trained([2, 0], 1.0, 10), 7: trained([2], 4.0, 20)})
    assert torch.equal(after.experts["w"], torch.tensor([[1.0, 1.0], [0.0, 0.0], [3.0, 3.0]]))
    assert after.router["r"].item() == pytest.approx(3.0)
    capped = aggregate(replace(THREE, max_weight=10.0), server, {5: trained([2, 0], 1.0, 10), 7: trained([2], 4.0, 20)})
    assert torch.equal(capped.experts["w"][2], torch.tensor([2.5, 2.5]))
    assert aggregate(THREE, server, {5: trained([2, 0], 1.0, 0)}) is server


def test_a_choice_out_of_range_or_twice_is_rejected_and_so_are_experts_that_were_not_sent():
    algorithm = fedjets(THREE, tiny_setup())
    choose, train = algorithm.round
    like = choose.update_like(None)
    assert choose.rejection(like._replace(experts=torch.tensor([2, 0])), None) is None
    assert "[0, 3]" in str(choose.rejection(like._replace(experts=torch.tensor([0, 3])), None))
    assert "each once" in str(choose.rejection(like._replace(experts=torch.tensor([1, 1])), None))
    sent = ExpertsDown({}, torch.tensor([2, 0]), {})
    assert "was sent [2, 0]" in str(train.rejection(trained([2, 1], 1.0, 1), sent))


# Bytes


def bytes_of(table: dict[str, Any], *prefixes: str) -> int:
    return sum(row["bytes"] for name, row in table.items() if name.startswith(prefixes))


def test_a_client_costs_k_experts_and_the_router_and_fedmix_m_over_k_times_as_much(tmp_path):
    config, setup = FedJetsConfig(num_experts=4, num_sent=2, router_hidden=4), tiny_setup()
    routed = run(fedjets(config, setup), tmp_path / "fedjets").manifest
    mixed = run(fedmix_common(FedMixCommonConfig(num_experts=4, router_hidden=4), setup), tmp_path / "fedmix").manifest
    expert = sum(tensor.nbytes for tensor in setup.expert.init(0).values())
    router = sum(tensor.nbytes for tensor in assemble(config, setup).router.init(0).values())
    messages = 6  # three clients in each of two rounds
    for manifest, sent in ((routed, 2), (mixed, 4)):
        down, up = manifest["received_by_clients"], manifest["sent_by_clients"]
        assert bytes_of(down["train"], "experts") == bytes_of(up["train"], "experts") == messages * sent * expert
        downs = [table for name, table in down.items() if name in ("choose", "train")]
        assert sum(bytes_of(table, "router") for table in downs) == messages * router
        assert bytes_of(up["train"], "router") == messages * router
    common = routed["received_by_clients"]["frozen weights"]
    assert {row["times"] for row in common.values()} == {UNSEEN + 1}  # once for each of seven clients
    constants = setup.common.constants  # type: ignore[union-attr]
    assert sum(row["bytes"] for row in common.values()) == (UNSEEN + 1) * sum(t.nbytes for t in constants.values())


# The common expert


def test_training_uses_the_common_experts_embeddings_alone_and_never_changes_it(tmp_path):
    setup = tiny_setup()
    common = setup.common
    assert common is not None
    before = {name: tensor.clone() for name, tensor in common.constants.items()}
    common.log_probs = None  # type: ignore[assignment,method-assign]
    embedded: list[int] = []
    embed = common.embed
    common.embed = lambda x: (embedded.append(len(x)), embed(x))[1]  # type: ignore[method-assign]
    algorithm = fedjets(THREE, setup)._replace(measure=None, measured=())
    outcome, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store", rounds=3)
    assert embedded
    assert all(torch.equal(tensor, before[name]) for name, tensor in common.constants.items())
    sent = b"".join(one.frame for one in spy.sent)
    assert not any(tensor.numpy().tobytes() in sent for tensor in before.values())
    assert not any("constants" in name for rows in outcome.manifest["sent_by_clients"].values() for name in rows)


# New clients


class Untouchable(torch.Tensor):
    """Labels that raise when anything is done with them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a label was read by {func}")


def without_readable_labels(federation: Federation) -> Federation:
    class NewClient:
        train_opted_in = torch.zeros(0, dtype=torch.bool)
        validation_opted_in = torch.zeros(0, dtype=torch.bool)

        def __init__(self, x: Tensor) -> None:
            y = torch.zeros(len(x), dtype=torch.int64).as_subclass(Untouchable)
            self.test = Examples(x, y, torch.tensor(len(x)), {})
            self.train = self.validation = examples(x[:0], torch.zeros(0, dtype=torch.int64))
            self.unlabelled = examples(x, torch.zeros(len(x), dtype=torch.int64))

    x = federation.load(UNSEEN).test.x
    return replace(federation, load=lambda client: NewClient(x) if client == UNSEEN else federation.load(client))


def test_no_label_of_an_unseen_client_is_read_until_its_predictions_are_there(tmp_path):
    federation = without_readable_labels(tiny_federation())
    with pytest.raises(AssertionError, match="a label was read"):
        federation.load(UNSEEN).test.y.sum()
    parts = tiny_parts(fedjets(THREE, tiny_setup()), federation)
    with opened(parts, tmp_path / "store") as transport:
        session = Session(parts, transport)
        while not session.is_trained:
            session.next_round()
        session.deliver([UNSEEN])
        list(session.personalize())
        model = session.personal_model(UNSEEN)
        predictions = model(federation.load(UNSEEN).test.x)
    assert len(session.delivered[UNSEEN].expert_ids) == THREE.num_sent
    assert predictions.shape == (6, CLASSES) and torch.allclose(predictions.sum(1), torch.ones(6))


def test_each_example_is_answered_by_its_best_scoring_expert_among_those_delivered():
    parts = assemble(THREE, tiny_setup())
    experts = trees.stack([parts.setup.expert.init("e", k) for k in range(2)])
    router = opinionated(parts)
    shared = ExpertsDown(experts, torch.tensor([2, 1]), router)
    x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(2))
    scores = parts.router(router, parts.common.embed(x))
    answers = torch.stack([parts.setup.expert(trees.pick(experts, h), x).log_softmax(-1) for h in range(2)])
    first = scores[:, 2] > scores[:, 1]
    assert first.any() and not first.all()
    torch.testing.assert_close(predict(parts, shared, None, x), torch.where(first[:, None], answers[0], answers[1]))


# Diagnostics


def test_a_choice_is_right_where_the_answer_is_or_where_no_expert_has_it():
    parts = assemble(THREE, tiny_setup())
    experts = trees.stack([parts.setup.expert.init("e", k) for k in range(3)])
    shared = ExpertsDown(experts, torch.tensor([0, 1, 2]), parts.router.init("r"))
    x = torch.randn(300, FEATURES, generator=torch.Generator().manual_seed(1)) * 3
    y = torch.randint(0, CLASSES, (300,), generator=torch.Generator().manual_seed(2))
    usable = torch.tensor([True, False, True])
    found = measure(parts.setup.expert, parts.router, parts.common, shared, usable, examples(x, y))
    right = torch.stack([parts.setup.expert(trees.pick(experts, h), x).argmax(-1) == y for h in (0, 2)])
    scores = parts.router(shared.router, parts.common.embed(x))[:, [0, 2]]
    chosen = right.T.gather(1, scores.argmax(1, keepdim=True))[:, 0]
    assert float(found["right_choice"]) == pytest.approx(float((chosen | ~right.any(0)).double().mean()))
    assert found["expert_accuracy:0"] == pytest.approx(float(right[0].double().mean()))
    assert math.isnan(found["expert_accuracy:1"])
    assert 0 < float(found["confidence"]) < 1
    common_right = parts.common.log_probs(x).argmax(-1) == y
    assert float(found["common_accuracy"]) == pytest.approx(float(common_right.double().mean()))


def test_first_choices_are_watched_without_the_anchors(tmp_path):
    outcome = run(with_anchors(), tmp_path, rounds=3, **ANCHORS)
    for record in outcome.records:
        assert sum(record.experts["first_choice"]) == pytest.approx(1)


# Speed and size


def test_whole_epochs_run_in_the_native_kernels():
    federation = tiny_federation()
    for algorithm in (
        fedjets(THREE, tiny_setup("native")),
        fedmix_common(FedMixCommonConfig(), tiny_setup("native")),
        fedjets(FedJetsConfig(num_experts=2), tiny_setup("native")._replace(anchors=(0, 1))),
    ):
        assert native_fallbacks(algorithm, with_cached(federation, algorithm.once_of_examples)) == []


def test_a_resnet_34_takes_a_step():
    """As in the paper; experiments on a CPU use small networks."""
    expert = Network(lambda: resnet((3, 8, 8), CLASSES, 34, None), "expert", (3, 8, 8))
    router = assemble(THREE, tiny_setup()).router
    loss = RoutedLoss(expert, router, 0.1)
    setup = tiny_setup("sequential")
    generator = torch.Generator().manual_seed(0)
    x, embedding = torch.randn(1, 2, 3, 8, 8, generator=generator), torch.randn(1, 2, 5, generator=generator)
    rows = Examples(x, torch.tensor([[0, 2]]), torch.tensor([2]), {EMBEDDING: embedding})
    start = trees.stack([trees.stack([expert.init(0), expert.init(1)])])
    trainer = setup.federated.with_settings(epochs=1, batch_size=2)
    fitted = train_routed(
        loss, trainer, start, torch.tensor([[2, 0]]), trees.stack([router.init(0)]), rows, Streams(0, "s", 1, (0,))
    )
    assert float(fitted.loss_S) > 0
    assert not torch.equal(fitted.params["experts"]["head.weight"], start["head.weight"])


# Bad settings


def test_more_experts_to_send_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"num_sent=3 is above algorithm\.num_experts=2"):
        FedJetsConfig(num_experts=2, num_sent=3)


def test_anchors_are_none_or_one_per_expert():
    with pytest.raises(ConfigError, match=r"schedule\.anchors\.number=2, but algorithm\.num_experts=5"):
        fedjets(FedJetsConfig(), tiny_setup()._replace(anchors=(0, 1)))


def test_without_a_common_expert_the_error_says_where_one_comes_from():
    with pytest.raises(ConfigError, match=r"needs a common expert.*fedmoe pretrain"):
        fedjets(THREE, tiny_setup()._replace(common=None))
