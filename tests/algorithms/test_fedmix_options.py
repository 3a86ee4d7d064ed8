"""FedMix beyond Algorithm 1: other conditions, other parts, other ways to predict; and what it rejects."""

from dataclasses import replace

import pytest
import torch

import fedmoe
from builders import (
    CLASSES,
    EMPTY,
    FEATURES,
    OPTED_OUT,
    PARTICIPANTS,
    PLAIN,
    UNSEEN,
    make_expert,
    make_gate,
    newest_private,
    run_algorithm,
    run_spied,
    tiny_config,
    tiny_federation,
    tiny_plan,
    tiny_records,
    tiny_setup,
    with_records,
)
from fedmoe import trees
from fedmoe.aggregation.server_optimizer import ServerOptimizer
from fedmoe.algorithms.fedmix.algorithm import fedmix, init_client, init_server, local_update, send_experts
from fedmoe.algorithms.fedmix.objective import train_parts
from fedmoe.algorithms.fedmix.personal import personalize, predict
from fedmoe.algorithms.fedmix.release import log_average_gate, log_client_shares, log_gate_of
from fedmoe.algorithms.fedmix.states import ClientState, FedMixConfig, PersonalState
from fedmoe.clients.federation import examples
from fedmoe.config import parse_config
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError, DataError
from fedmoe.models import expert_mixture as equations
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams, torch_stream
from fedmoe.training.batches import shuffled
from fedmoe.training.inference import clients_of
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

ADAM = ServerOptimizer("adam", 0.05)


def loaded(path, kind, state_type, client):
    return newest_private(path, kind, state_type, client)


def on_plain(config, setup, **changes):
    """What the plain client does in one round: its state before, then what `local_update` returns, for one client."""
    server = init_server(config, setup, 0)._replace(**changes)
    sent = send_experts(config, server, PLAIN)
    before = init_client(config, setup, sent)
    data = tiny_federation().data([PLAIN], opted_in_only=True)
    rng = Streams(0, "t", 1, (PLAIN,))
    state_S, (update,), _ = local_update(config, setup, trees.stack([sent]), trees.stack([before]), data, rng)
    return sent, trees.pick(state_S, 0), update


# Parts of a client's own


@pytest.mark.parametrize("backend", ["batched", "sequential"])
@pytest.mark.parametrize(
    "options",
    [
        {"personal_bias": True},
        {"share_gates": True},
        {"share_gates": True, "condition": "client"},
        {"fine_tune_epochs": 2},
        {"condition": "client", "prune_threshold": 0.9, "fine_tune_epochs": 1},
        {"objective": "mixture", "personal_bias": True},
        {"entropy": True, "prune_threshold": 0.9},
    ],
    ids=str,
)
def test_every_option_trains_predicts_and_is_the_same_in_any_order(options, backend, tmp_path):
    algorithm = fedmix(FedMixConfig(num_experts=3, server_optimizer=ADAM, **options), tiny_setup(backend))
    can_release = algorithm.release is not None
    outcome = run_algorithm(algorithm, tiny_federation(), tmp_path / "a", rounds=3, release=can_release)
    again = run_algorithm(
        algorithm, tiny_federation(), tmp_path / "b", rounds=3, release=can_release, workers=2
    ).fingerprint()
    assert outcome.fingerprint() == again
    assert outcome.manifest["rejected"] == []
    assert all(torch.tensor(score.loss).isfinite() for score in outcome.scores)


def test_a_personal_bias_is_private_and_moves_every_expert_alike():
    config, setup = FedMixConfig(num_experts=2, personal_bias=True), tiny_setup()
    sent, state, update = on_plain(config, setup)
    assert state.output_bias.shape == (CLASSES,) and state.output_bias.any()
    assert not {"output_bias", "gate"} & {name.split("/")[0] for name in trees.to_named(update)}
    x = torch.randn(5, FEATURES, generator=torch_stream("x"))
    sure = state._replace(output_bias=torch.tensor([0.0, 0.0, 1e4]))
    assert predict(config, setup, sent, sure, None, x).argmax(1).tolist() == [2] * 5


def test_shared_gates_are_sent_and_averaged_and_no_private_gate_is_left(tmp_path):
    config = FedMixConfig(num_experts=2, share_gates=True, server_optimizer=ServerOptimizer("sgd"))
    setup = tiny_setup(clients_per_round=None)
    outcome, spy = run_spied(fedmix(config, setup), tiny_federation(), tmp_path / "store", rounds=1)
    sent = {c: update for one in spy.exchanged for c, (update, _) in one.messages.items()}
    counts = {client: update["num_examples"] for client, update in sent.items()}
    for name in ("weight", "bias"):
        mean = sum(counts[c] * sent[c][f"gate/{name}"] for c in PARTICIPANTS) / sum(counts.values())
        torch.testing.assert_close(outcome.server.gate[name], mean)
    assert outcome.server.gate["weight"].any()
    assert loaded(tmp_path / "store", "client", ClientState, PLAIN).gate == {}


def test_with_shared_gates_there_is_nothing_to_release():
    assert fedmix(FedMixConfig(share_gates=True), tiny_setup()).release is None


def test_fine_tuning_is_local_training_of_all_parts_before_evaluation(tmp_path):
    plain, tuned = (FedMixConfig(num_experts=2, server_optimizer=ADAM, fine_tune_epochs=e) for e in (0, 2))
    setup = tiny_setup()
    for name, config in (("plain", plain), ("tuned", tuned)):
        run_algorithm(fedmix(config, setup), tiny_federation(), tmp_path / name, rounds=4)
    before, after = (loaded(tmp_path / name, "final", PersonalState, PLAIN) for name in ("plain", "tuned"))
    assert before.experts == {} and after.experts.keys() == init_server(plain, setup, 0).experts.keys()
    assert not torch.equal(before.gate["weight"], after.gate["weight"])
    one, other = (loaded(tmp_path / name, "client", ClientState, PLAIN) for name in ("plain", "tuned"))
    assert torch.equal(one.gate["weight"], other.gate["weight"])  # rounds do not know of it
    assert torch.equal(before.gate["weight"], one.gate["weight"])  # a client that trained keeps its gate


def test_a_fine_tuned_gate_is_the_one_that_predicts_even_if_it_started_from_a_shared_one():
    config, setup = FedMixConfig(num_experts=2, share_gates=True, fine_tune_epochs=2), tiny_setup()
    sent, state, _ = on_plain(config, setup)
    data = tiny_federation().data([PLAIN], opted_in_only=False)
    stacked = [trees.stack([tree]) for tree in (sent, state)]
    personal = trees.pick(personalize(config, setup, *stacked, data, Streams(0, "t", 1, (PLAIN,))), 0)
    assert not torch.equal(personal.gate["weight"], sent.gate["weight"])
    x = torch.randn(5, FEATURES, generator=torch_stream("x"))
    expected = predict(config, setup, sent._replace(gate=personal.gate), state, personal, x)
    torch.testing.assert_close(predict(config, setup, sent, state, personal, x), expected)
    untuned = personal._replace(gate=sent.gate)
    assert not torch.allclose(predict(config, setup, sent, state, untuned, x), expected)


@pytest.mark.parametrize("backend", ["batched", "sequential"])
def test_training_images_are_augmented_in_the_rounds_and_for_the_gate(backend):
    config = FedMixConfig(num_experts=2, condition="client")
    network = Network(lambda: mlp((1, 6, 6), CLASSES, (5,)), "expert")
    images = examples(torch.randn(8, 1, 6, 6, generator=torch_stream("images")), torch.arange(8) % CLASSES)
    data = ClientData(*[trees.stack([images])] * 2)
    rng = Streams(0, "t", 1, (0,))
    results = []
    for augment in (None, "crop_flip"):
        plan = replace(tiny_plan(), augment=augment)
        setup = tiny_setup(backend)._replace(
            expert=network, federated=LocalTrainer(plan, backend), personal=LocalTrainer(plan, backend)
        )
        sent = send_experts(config, init_server(config, setup, 0), 0)
        stacked = [trees.stack([tree]) for tree in (sent, init_client(config, setup, sent))]
        _, (update,), _ = local_update(config, setup, *stacked, data, rng)
        personal = personalize(config, setup, *stacked, data, rng)
        results.append((update.experts["1.weight"], update.usage, personal.gate["weight"], personal.usage))
    assert not any(torch.equal(plain, augmented) for plain, augmented in zip(*results, strict=True))


# What q is conditioned on


def with_side_information(values):
    """The tiny federation; every training and validation example with `values(rows)` as its "angle"."""
    changed = {
        client: held._replace(
            train=held.train._replace(extra=values(held.train)),
            validation=held.validation._replace(extra=values(held.validation)),
        )
        for client, held in tiny_records().items()
    }
    return with_records(tiny_federation(), changed)


def test_q_may_be_conditioned_on_side_information_instead_of_the_label(tmp_path):
    """With the label itself as side information nothing changes; with another one, something does."""
    setup = tiny_setup(clients_per_round=None)._replace(side_values={"angle": CLASSES})
    runs = {
        "label": ("label", tiny_federation()),
        "same": ("angle", with_side_information(lambda rows: {"angle": rows.y})),
        "other": ("angle", with_side_information(lambda rows: {"angle": (rows.x[:, 3] > 0).long()})),
    }
    posterior = {
        name: run_algorithm(
            fedmix(FedMixConfig(num_experts=2, condition=condition, server_optimizer=ServerOptimizer("sgd")), setup),
            federation, tmp_path / name,
        ).server.posterior
        for name, (condition, federation) in runs.items()
    }  # fmt: skip
    assert torch.equal(posterior["label"], posterior["same"])
    assert not torch.equal(posterior["label"], posterior["other"])
    assert posterior["other"][2].abs().sum() < 1e-2 < posterior["other"][:2].abs().sum()  # nobody has the third value


@pytest.mark.parametrize("backend", ["batched", "sequential"])
def test_a_clients_own_q_is_the_closed_form_with_damping(backend):
    """Eq. 13 minibatch by minibatch, at the point where all parts take their step."""
    config = FedMixConfig(num_experts=3, condition="client", damping=0.75)
    setup = tiny_setup(backend)._replace(federated=LocalTrainer(replace(tiny_plan(), epochs=1), backend))
    sent, state, update = on_plain(config, setup)
    (rows,) = clients_of(tiny_federation().data([PLAIN], opted_in_only=True).train)
    (generator,) = Streams(0, "t", 1, (PLAIN,)).generators("batches")
    at = next(shuffled(generator, len(rows.y), 4))
    scores, _ = equations.expert_outputs(setup.expert, sent.experts, rows.x[at])
    likelihood_KB = scores.log_softmax(-1)[:, torch.arange(4), rows.y[at]]
    target = likelihood_KB.mean(1).softmax(0)  # the gate is still even
    first = 0.75 / 3 + 0.25 * target
    torch.testing.assert_close(own_q_after_one_step(config, setup, sent), first)
    assert not torch.allclose(state.usage, first)  # the second minibatch moved it on
    torch.testing.assert_close(update.usage, state.usage)
    assert float(state.usage.sum()) == pytest.approx(1, abs=1e-5)
    assert update.posterior.shape == (0, 3)


def own_q_after_one_step(config, setup, sent):
    plan = LocalTraining(batch_size=4, learning_rate=0.2, optimizer="sgd", steps=1)
    data = tiny_federation().data([PLAIN], opted_in_only=True)
    blank = init_client(config, setup, sent)
    parts = {"experts": sent.experts, "gate": blank.gate}
    frozen = {"expert_ids": sent.expert_ids, "in_use": torch.ones(3, dtype=torch.bool)}
    stacked = [trees.stack([part]) for part in (parts, frozen, blank.usage)]
    trainer = setup.federated._replace(settings=plan)
    fitted = train_parts(config, setup, *stacked, data, trainer, Streams(0, "t", 1, (PLAIN,)))
    return fitted.params["usage"]["share"][0]


def test_clients_with_permuted_labels_find_their_own_expert(tmp_path):
    """Section 4.3 in small: two groups of clients whose labels mean opposite things."""

    def held(client):
        rng = torch_stream("permuted", client)
        x = torch.randn(60, FEATURES, generator=rng)
        y = (x[:, 0] > 0).long()
        part = examples(x, 1 - y if client % 2 else y)
        plain = tiny_records()[PLAIN]
        return plain._replace(
            train=part, validation=part, test=part, train_opted_in=torch.ones(60, dtype=torch.bool),
            validation_opted_in=torch.ones(60, dtype=torch.bool),
        )  # fmt: skip

    federation = replace(tiny_federation(), load=held)
    config = FedMixConfig(num_experts=2, condition="client", server_optimizer=ServerOptimizer("adam", 0.05))
    setup = tiny_setup(clients_per_round=None)._replace(
        federated=LocalTrainer(replace(tiny_plan(3), batch_size=10), "batched")
    )
    usage = run_algorithm(fedmix(config, setup), federation, tmp_path / "store", rounds=15).server.usage
    groups = usage[list(PARTICIPANTS)].argmax(1)
    odd = torch.tensor([client % 2 for client in PARTICIPANTS])
    assert (groups == odd).all() or (groups == 1 - odd).all()
    assert usage[list(PARTICIPANTS)].max(1).values.min() > 0.9


# Three ways to predict


def test_a_new_client_with_labels_fits_its_gate_and_nothing_else():
    config, setup = FedMixConfig(num_experts=2), tiny_setup()
    setup = setup._replace(personal=LocalTrainer(LocalTraining(200, 8, 0.1), "batched"))
    posterior = torch.tensor([[9.0, -9], [-9, 9], [-9, 9]])  # expert 0 for class 0, expert 1 for the others
    server = init_server(config, setup, 0)._replace(posterior=posterior)
    sent = send_experts(config, server, UNSEEN)
    data = tiny_federation().data([PLAIN], opted_in_only=False)
    state = init_client(config, setup, sent)
    rng = Streams(0, "personalize", 0, (UNSEEN,))
    personal = trees.pick(personalize(config, setup, *(trees.stack([t]) for t in (sent, state)), data, rng), 0)
    assert personal.experts == {}
    (rows,) = clients_of(data.train)
    torch.testing.assert_close(personal.usage, posterior.softmax(-1)[rows.y].mean(0))
    _, features_HBF = equations.expert_outputs(setup.expert, sent.experts, rows.x)
    pooled = torch.einsum("h,hbf->bf", personal.usage, features_HBF)
    chosen = equations.log_gate(personal.gate, pooled).argmax(1)
    assert (chosen == (rows.y > 0)).float().mean() > 0.8


def gates_released(path, release, **options):
    config = FedMixConfig(num_experts=2, server_optimizer=ADAM, **options)
    setup = tiny_setup(clients_per_round=None)
    records = {EMPTY: tiny_records()[EMPTY], OPTED_OUT: tiny_records()[OPTED_OUT]}
    federation = with_records(tiny_federation(), records)
    return config, setup, run_algorithm(fedmix(config, setup), federation, path, rounds=3, release=release)


@pytest.mark.parametrize("personal_bias", [False, True])
def test_without_labels_the_prediction_is_by_the_average_of_the_released_gates(personal_bias, tmp_path):
    """Each gate with its own q(z|s); their outputs are averaged, not their weights (Section 2.1)."""
    config, setup, outcome = gates_released(tmp_path / "store", release=True, personal_bias=personal_bias)
    x = torch.randn(7, FEATURES, generator=torch_stream("x"))
    kept = outcome.delivered[UNSEEN]
    states = {c: loaded(tmp_path / "store", "client", ClientState, c) for c in PARTICIPANTS}
    counts = {c: len(clients_of(tiny_federation().data([c], opted_in_only=True).train)[0].y) for c in PARTICIPANTS}
    total = sum(counts.values())
    scores, features = equations.expert_outputs(setup.expert, kept.experts, x)
    gate_BK, bias = 0, 0
    for client, state in states.items():
        usage_K = state.shares @ kept.posterior.softmax(-1)
        h = usage_K[0] * features[0] + usage_K[1] * features[1]
        gate_BK = gate_BK + counts[client] / total * (h @ state.gate["weight"].T + state.gate["bias"]).softmax(-1)
        bias = bias + counts[client] / total * state.output_bias if personal_bias else 0
    expected = torch.einsum("bk,kbc->bc", gate_BK, (scores + bias).softmax(-1))
    blank = init_client(config, setup, kept)
    torch.testing.assert_close(predict(config, setup, kept, blank, None, x).exp(), expected)
    personal = loaded(tmp_path / "store", "final", PersonalState, EMPTY)
    torch.testing.assert_close(predict(config, setup, outcome.delivered[EMPTY], blank, personal, x).exp(), expected)


def test_gates_leave_their_clients_only_by_the_release_and_go_to_those_without_one(tmp_path):
    _, _, quiet = gates_released(tmp_path / "quiet", release=False)
    _, _, released = gates_released(tmp_path / "released", release=True)
    assert not any("gate" in name for rows in quiet.manifest["sent_by_clients"].values() for name in rows)
    assert all(broadcast.released == {} for broadcast in quiet.delivered.values())
    rows = released.manifest["sent_by_clients"]["release gates"]
    assert rows["gate/weight"]["times"] == len(PARTICIPANTS)
    for client, broadcast in released.delivered.items():
        assert bool(broadcast.released) == (client not in PARTICIPANTS)


def test_a_gate_that_was_never_trained_has_no_say(tmp_path):
    config, setup = FedMixConfig(num_experts=2), tiny_setup(clients_per_round=1)
    outcome = run_algorithm(fedmix(config, setup), tiny_federation(), tmp_path / "a", rounds=1, release=True)
    (client,) = outcome.records[0].clients
    asked = outcome.manifest["sent_by_clients"]["release gates"]["gate/weight"]["times"]
    assert asked == len(PARTICIPANTS) and len(outcome.delivered[UNSEEN].released["usage"]) == 1
    trained = loaded(tmp_path / "a", "client", ClientState, client)
    assert torch.equal(outcome.delivered[UNSEEN].released["gate"]["weight"][0], trained.gate["weight"])


def test_a_released_gate_weighs_the_experts_that_its_client_uses_as_that_client_does():
    """Of four experts the client was sent 0, 1 and 2 and uses 0 and 1; alone it decides what a new client predicts."""
    config, setup = FedMixConfig(num_experts=4, prune_threshold=0.8), tiny_setup()  # floor 0.2; the server's, 0.18
    algorithm = fedmix(config, setup)
    server = algorithm.init_server(0)
    usage = server.usage.clone()
    usage[PLAIN] = torch.tensor([0.4, 0.3, 0.19, 0.11])
    phi = torch.tensor([[0.3, 0.3, 0.12, 0.28]] * CLASSES).log()  # has moved since: 3 is not sent, so not used either
    server = server._replace(usage=usage, posterior=phi)
    rng = torch_stream("gate")
    gate = {"weight": 3 * torch.randn(4, 5, generator=rng), "bias": torch.randn(4, generator=rng)}
    kept = send_experts(config, server, PLAIN)
    trained = init_client(config, setup, kept)._replace(
        gate=gate, shares=torch.full((CLASSES,), 1 / CLASSES), trained=torch.tensor(1.0)
    )
    assert kept.expert_ids.tolist() == [0, 1, 2]
    data = tiny_federation().data([PLAIN], opted_in_only=True)
    exchange = algorithm.release
    asked = [trees.stack([tree]) for tree in (exchange.broadcast(server, PLAIN, ()), trained)]
    _, released_S, _ = exchange.local_update(*asked, data, Streams(0, "release", 1, (PLAIN,)))
    released = trees.pick(released_S, 0)
    assert exchange.rejection(released, None) is None
    server = exchange.aggregate(server, {PLAIN: released}, {}, {})
    new = algorithm.delivery[0].broadcast(server, UNSEEN, ())
    x = torch.randn(6, FEATURES, generator=torch_stream("x"))
    expected = algorithm.predict(kept, trained, None, x)
    torch.testing.assert_close(algorithm.predict(new, init_client(config, setup, new), None, x), expected)


def test_a_released_usage_that_is_no_distribution_is_rejected():
    exchange = fedmix(FedMixConfig(num_experts=2), tiny_setup()).release
    like = exchange.update_like(None)
    assert exchange.rejection(like._replace(usage=torch.tensor([0.25, 0.75])), None) is None
    assert "is not a distribution" in exchange.rejection(like._replace(usage=torch.tensor([1.5, -0.5])), None)


def test_without_gates_all_experts_count_alike(tmp_path):
    config, setup, outcome = gates_released(tmp_path / "store", release=False)
    x = torch.randn(7, FEATURES, generator=torch_stream("x"))
    kept = outcome.delivered[UNSEEN]
    scores, _ = equations.expert_outputs(setup.expert, kept.experts, x)
    blank = init_client(config, setup, kept)
    torch.testing.assert_close(predict(config, setup, kept, blank, None, x).exp(), scores.softmax(-1).mean(0))


def test_with_densities_a_new_client_predicts_by_the_gate_of_the_client_that_its_inputs_resemble(tmp_path):
    """Inputs of every client lie far from those of the others, so p(s|x) names one client (eq. 18)."""
    plain = tiny_records()[PLAIN]

    def apart(client):
        place = 8 * torch.eye(FEATURES)[PARTICIPANTS.index(client)]
        rows = [examples(torch.randn(40, FEATURES, generator=torch_stream(client, p)) + place, labels) for p in "tv"]
        return plain._replace(train=rows[0], validation=rows[1], train_opted_in=every, validation_opted_in=every)

    labels, every = torch.arange(40) % CLASSES, torch.ones(40, dtype=torch.bool)
    config = FedMixConfig(num_experts=2, server_optimizer=ADAM, new_clients="density")
    setup = tiny_setup(clients_per_round=None)._replace(release=True, input_shape=(FEATURES,))
    algorithm = fedmix(config, setup)
    outcome = run_algorithm(
        algorithm,
        with_records(tiny_federation(), {c: apart(c) for c in PARTICIPANTS}),
        tmp_path / "store",
        release=True,
    )
    assert outcome.manifest["sent_by_clients"]["release gates"]["density/log_scale"]["times"] == len(PARTICIPANTS)
    kept = outcome.delivered[UNSEEN]
    x = apart(PLAIN).train.x
    shares_SB = log_client_shares(setup, kept.released, x).exp()
    assert (shares_SB.argmax(0) == PARTICIPANTS.index(PLAIN)).all()
    torch.testing.assert_close(shares_SB.sum(0), torch.ones(len(x)))
    _, features_KBF = equations.expert_outputs(setup.expert, kept.experts, x)
    own = log_gate_of(config, trees.pick(kept.released, PARTICIPANTS.index(PLAIN)), features_KBF).exp()
    average = log_average_gate(config, kept.released, features_KBF, log_client_shares(setup, kept.released, x)).exp()
    torch.testing.assert_close(average, own, atol=0.02, rtol=0)
    assert all(torch.tensor(score.loss).isfinite() for score in outcome.scores)


# Bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 0}, "algorithm.num_experts=0"),
        ({"prune_threshold": 1.5}, "algorithm.prune_threshold=1.5"),
        ({"prune_threshold": -0.1}, "algorithm.prune_threshold=-0.1"),
        ({"objective": "mixture", "prune_threshold": 0.5}, "objective='mixture' has no q"),
        ({"objective": "mixture", "condition": "client"}, "objective='mixture' has no q"),
        ({"condition": "client", "entropy": True}, "always keeps its entropy"),
        ({"server_optimizer": {"name": "adagrad"}}, "server_optimizer"),
    ],
)
def test_settings_that_cannot_work_are_errors(options, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({"algorithm": {"name": "fedmix", **options}})


def test_gates_asked_for_while_release_is_off_are_an_error():
    with pytest.raises(ConfigError, match=r"new_clients='density' .* schedule.release is off"):
        fedmix(FedMixConfig(new_clients="density"), tiny_setup()._replace(input_shape=(FEATURES,)))
    with pytest.raises(ConfigError, match="share_gates is on"):
        FedMixConfig(new_clients="density", share_gates=True)


def test_side_information_that_the_data_do_not_have_is_refused():
    with pytest.raises(ConfigError, match="condition='angle', but these data carry no such side information"):
        fedmix(FedMixConfig(condition="angle"), tiny_setup()).init_server(0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (lambda _rows: {}, "its examples have no 'angle'"),
        (lambda rows: {"angle": rows.y - 1}, "angle=-1 is outside 0 … 2"),
        (lambda rows: {"angle": rows.y + 1}, "angle=3 is outside 0 … 2"),
    ],
)
def test_examples_without_side_information_are_errors(values, words, tmp_path):
    setup = tiny_setup()._replace(side_values={"angle": 3})
    algorithm = fedmix(FedMixConfig(condition="angle"), setup)
    with pytest.raises(DataError, match=words):
        run_algorithm(algorithm, with_side_information(values), tmp_path / "store")


def test_a_label_outside_of_q_is_an_error(tmp_path):
    algorithm = fedmix(FedMixConfig(), tiny_setup()._replace(num_classes=2))
    with pytest.raises(DataError, match="label=2 is outside 0 … 1"):
        run_algorithm(algorithm, tiny_federation(), tmp_path / "store")


def test_a_new_client_without_any_data_needs_gates_of_others(tmp_path):
    """An error before the first round; averaged gates, or a shared one, are enough."""
    federation = with_records(tiny_federation(), {UNSEEN: tiny_records()[EMPTY]})

    def scored(name, release, **options):
        config = tiny_config("fedmix", rounds=1, release=release)
        choice = type(config.algorithm)(name="fedmix", **options)
        parts = {"federation": federation, "expert": make_expert, "gate": make_gate, "directory": tmp_path / name}
        return {score.client for score in fedmoe.run(config.model_copy(update={"algorithm": choice}), **parts).scores}

    with pytest.raises(DataError, match=r"client 6 is new and has no training examples .* schedule.release = true"):
        scored("refused", False)
    assert UNSEEN in scored("released", True) & scored("shared", False, share_gates=True)


def test_experts_that_would_start_alike_are_errors():
    setup = tiny_setup()._replace(expert=Network(mlp((FEATURES,), CLASSES, (5,)), "expert"))
    with pytest.raises(ConfigError, match="all 4 experts start with the same weights"):
        init_server(FedMixConfig(), setup, 0)
    init_server(FedMixConfig(num_experts=1), setup, 0)
