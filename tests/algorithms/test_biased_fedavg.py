from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from builders import (
    CLASSES,
    EMPTY,
    OPTED_OUT,
    PARTICIPANTS,
    SOME_OPTED_OUT,
    UNSEEN,
    Outcome,
    draw_examples,
    run_algorithm,
    tiny_federation,
    tiny_plan,
    tiny_records,
    tiny_setup,
    with_records,
)
from fedmoe import trees
from fedmoe.algorithms.biased_fedavg import bias_of, biased_fedavg, mean_of_clients
from fedmoe.algorithms.catalog import find
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.partial_personalization import (
    Broadcast,
    ClientState,
    PartialPersonalizationConfig,
    PersonalState,
    ReleasedState,
    pool_released,
)
from fedmoe.clients.federation import examples
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.streams import Streams, torch_stream
from fedmoe.training.local import LocalTrainer

BIAS = "3.bias"
INITIAL = tiny_setup().expert.init(0, "init", "expert")[BIAS]


def run(folder: Path, algorithm=None, **options) -> Outcome:
    algorithm = algorithm or biased_fedavg(PartialPersonalizationConfig(), tiny_setup())
    return run_algorithm(algorithm, tiny_federation(), folder / "store", **options)


def private_biases(outcome: Outcome, kind="client"):
    """Each client's newest bias."""
    newest = {}
    for name, tensor in sorted(outcome.private_tensors().items(), key=lambda item: int(item[0].split()[5][:-1])):
        if name.startswith(f"{kind} of") and name.endswith(BIAS):
            newest[int(name.split()[3])] = tensor
    return newest


def test_the_bias_is_no_part_of_any_message(tmp_path):
    manifest = run(tmp_path).manifest
    for table in (manifest["sent_by_clients"], manifest["received_by_clients"]):
        listed = {name for rows in table.values() for name in rows}
        assert "model/3.weight" in listed and not any("bias" in name and "3." in name for name in listed)


def test_clients_come_to_differ_in_their_bias(tmp_path):
    biases = private_biases(run(tmp_path))
    assert len(biases) >= 3
    values = [tuple(bias.tolist()) for bias in biases.values()]
    assert len(set(values)) == len(values) and tuple(INITIAL.tolist()) not in values


def test_the_first_round_is_that_of_fedavg_without_the_bias(tmp_path):
    """All start from the same weights, so the rest of the model is averaged as FedAvg does, to the bit."""
    biased = run(tmp_path / "biased", rounds=1).server.model
    plain = run(tmp_path / "plain", fedavg(FedAvgConfig(), tiny_setup()), rounds=1).server.model
    assert biased.keys() | {BIAS} == plain.keys() and BIAS not in biased
    assert all(torch.equal(biased[name], plain[name]) for name in biased)


def test_a_bias_lives_on_from_round_to_round():
    algorithm = biased_fedavg(PartialPersonalizationConfig(), tiny_setup())
    (train,) = algorithm.round
    shared = train.broadcast(algorithm.init_server(0), SOME_OPTED_OUT, ())
    data = tiny_federation().data([SOME_OPTED_OUT], opted_in_only=True)
    states = [ClientState({BIAS: torch.full((1, CLASSES), value)}, torch.tensor([2])) for value in (0.0, 5.0)]
    rng = Streams(0, "round:train", 1, (SOME_OPTED_OUT,))
    (low, low_update, _), (high, high_update, _) = (
        train.local_update(trees.stack([shared]), state, data, rng) for state in states
    )
    assert low.rounds.tolist() == [3]
    torch.testing.assert_close(high.private[BIAS] - 5, low.private[BIAS])  # the softmax sees differences only
    assert BIAS not in low_update.model and torch.allclose(
        low_update.model["3.weight"], high_update.model["3.weight"], atol=1e-5
    )


def test_it_follows_label_skew_where_one_model_for_all_cannot(tmp_path):
    """Inputs say nothing here; each client sees one class most of the time."""
    records = {}
    for client in PARTICIPANTS:
        plain = tiny_records()[client]
        x = torch.randn(40, 4, generator=torch_stream("noise", client))
        y = torch.full((40,), client % CLASSES)
        y[:4] = torch.tensor([0, 1, 2, 0])
        rows = plain.train._replace(x=x, y=y, counts=torch.tensor(40))
        records[client] = plain._replace(train=rows, test=rows, train_opted_in=torch.ones(40, dtype=torch.bool))
    federation = with_records(tiny_federation(), records)
    setup = tiny_setup(clients_per_round=None)
    scores = {}
    for name, algorithm in {
        "biased": biased_fedavg(PartialPersonalizationConfig(), setup),
        "plain": fedavg(FedAvgConfig(), setup),
    }.items():
        outcome = run_algorithm(algorithm, federation, tmp_path / name, rounds=6)
        own = [
            s.accuracy for s in outcome.scores if s.client in PARTICIPANTS and (s.model, s.data) == ("before", "own")
        ]
        scores[name] = sum(own) / len(own)
    assert scores["biased"] > 0.85 and scores["plain"] < 0.6


class TestNewClients:
    def test_without_a_release_they_have_the_bias_that_everyone_starts_from(self, tmp_path):
        algorithm = biased_fedavg(PartialPersonalizationConfig(), tiny_setup())
        outcome = run(tmp_path, algorithm)
        kept = outcome.delivered[UNSEEN]
        assert kept.released == {}
        state = algorithm.init_client(kept, UNSEEN, 0)
        assert torch.equal(bias_of(kept, state)[BIAS], INITIAL)

    def test_with_a_release_they_have_the_mean_of_the_biases_of_those_who_trained(self, tmp_path):
        algorithm = biased_fedavg(PartialPersonalizationConfig(), tiny_setup())
        outcome = run(tmp_path, algorithm, rounds=1, release=True)
        trained = outcome.records[0].clients
        biases = private_biases(outcome)
        assert len(trained) == 3 and set(biases) == set(trained)  # the fourth released what it started from
        mean = torch.stack([biases[client] for client in trained]).mean(0)
        x = torch.randn(5, 4)
        for client in (UNSEEN, OPTED_OUT, EMPTY):
            kept = outcome.delivered[client]
            state = algorithm.init_client(kept, client, 0)
            expected = tiny_setup().expert({**kept.model, BIAS: mean}, x).log_softmax(1)
            torch.testing.assert_close(algorithm.predict(kept, state, None, x), expected)
        assert "private/3.bias" in outcome.manifest["sent_by_clients"]["release"]

    def test_who_trained_keeps_the_own_bias_beside_a_released_one(self):
        own, released = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
        shared = Broadcast({}, {BIAS: released})
        assert torch.equal(bias_of(shared, ClientState({BIAS: own}, torch.tensor(1)))[BIAS], own)
        assert torch.equal(bias_of(shared, ClientState({BIAS: own}, torch.tensor(0)))[BIAS], released)
        cohort = ClientState({BIAS: torch.stack([own, own])}, torch.tensor([0, 4]))
        mixed = bias_of(Broadcast({}, {BIAS: torch.stack([released, released])}), cohort)[BIAS]
        assert torch.equal(mixed, torch.stack([released, own]))

    def test_released_parts_of_those_who_never_trained_do_not_count(self):
        states = {
            4: ReleasedState({BIAS: torch.tensor([4.0])}, torch.tensor(2)),
            1: ReleasedState({BIAS: torch.ones(1)}, torch.tensor(0)),
        }
        assert pool_released(mean_of_clients, states)[BIAS] == 4
        assert pool_released(mean_of_clients, {1: states[1]}) == {}


def test_personalising_fits_the_bias_alone_on_all_records(tmp_path):
    algorithm = biased_fedavg(PartialPersonalizationConfig(), tiny_setup())
    opted_out = tiny_records()[OPTED_OUT]._replace(
        validation=draw_examples(0), validation_opted_in=torch.ones(0).bool()
    )
    federation = with_records(
        tiny_federation(), {OPTED_OUT: opted_out}
    )  # without validation data it cannot stop at once
    outcome = run_algorithm(algorithm, federation, tmp_path / "store")
    final = private_biases(outcome, "final")
    assert OPTED_OUT in final and not torch.equal(final[OPTED_OUT], INITIAL)
    kept, x = outcome.delivered[OPTED_OUT], torch.randn(5, 4)
    predicted = algorithm.predict(
        kept, algorithm.init_client(kept, OPTED_OUT, 0), PersonalState({BIAS: final[OPTED_OUT]}, torch.tensor(1)), x
    )
    expected = tiny_setup().expert({**kept.model, BIAS: final[OPTED_OUT]}, x).log_softmax(1)
    torch.testing.assert_close(predicted, expected)


def test_the_server_may_have_an_optimizer(tmp_path):
    config = PartialPersonalizationConfig(server_optimizer={"name": "adam", "learning_rate": 0.05})
    outcome = run(tmp_path, biased_fedavg(config, tiny_setup()), rounds=2)
    assert outcome.server.moments.step == 2 and BIAS not in outcome.server.moments.mean


def test_an_expert_without_an_output_bias_is_rejected():
    for module, words in ((nn.Linear(4, 3, bias=False), "has no bias"), (nn.Identity(), "no nn.Linear")):
        with pytest.raises(ConfigError, match=words):
            biased_fedavg(PartialPersonalizationConfig(), tiny_setup()._replace(expert=Network(module, "expert")))


@pytest.mark.parametrize("method", ["biased_fedavg", "lg_fedavg"])
@pytest.mark.parametrize("backend", ["batched", "sequential"])
def test_training_images_are_augmented_for_the_private_part_too(method, backend):
    network = Network(lambda: mlp((1, 6, 6), CLASSES, (5,)), "expert")
    images = examples(torch.randn(8, 1, 6, 6, generator=torch_stream("images")), torch.arange(8) % CLASSES)
    data = ClientData(trees.stack([images]), trees.stack([draw_images(0)]))  # no validation: all epochs are trained
    private = []
    for augment in (None, "crop_flip"):
        setup = tiny_setup(backend)._replace(
            expert=network, personal=LocalTrainer(replace(tiny_plan(3), augment=augment), backend)
        )
        entry = find(method)
        algorithm = entry.factory(entry.config(), setup)
        shared = algorithm.round[0].broadcast(algorithm.init_server(0), 0, ())
        states = [trees.stack([tree]) for tree in (shared, algorithm.init_client(shared, 0, 0))]
        personal = algorithm.personalize(*states, None, data, Streams(0, "personalize", 1, (0,)))
        private.append(torch.cat([leaf.flatten() for leaf in trees.leaves(personal.private)]))
    assert not torch.equal(*private)


def draw_images(count):
    return examples(torch.randn(count, 1, 6, 6, generator=torch_stream("none")), torch.arange(count))
