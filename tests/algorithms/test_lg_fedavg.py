from pathlib import Path

import pytest
import torch
from torch import nn

from builders import EMPTY, OPTED_OUT, PARTICIPANTS, PLAIN, UNSEEN, Outcome, run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.lg_fedavg import LgFedAvgConfig, cut, ensemble, lg_fedavg
from fedmoe.algorithms.partial_personalization import Broadcast, ClientState, PersonalState
from fedmoe.errors import ConfigError
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.models.resnet import resnet
from fedmoe.streams import Streams
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

PRIVATE, SHARED = ("1.weight", "1.bias"), ("3.weight", "3.bias")
EXPERT = tiny_setup().expert


def run(folder: Path, algorithm=None, **options) -> Outcome:
    algorithm = algorithm or lg_fedavg(LgFedAvgConfig(), tiny_setup())
    return run_algorithm(algorithm, tiny_federation(), folder / "store", **options)


def random_private(seed):
    return {name: tensor for name, tensor in EXPERT.init(seed).items() if name in PRIVATE}


def shared_part(seed):
    return {name: tensor for name, tensor in EXPERT.init(seed).items() if name in SHARED}


def first_layer(private, x):
    return (x @ private["1.weight"].T + private["1.bias"]).relu()


def test_the_private_layers_are_no_part_of_any_message(tmp_path):
    manifest = run(tmp_path).manifest
    for table in (manifest["sent_by_clients"], manifest["received_by_clients"]):
        listed = {name.split("/")[-1] for rows in table.values() for name in rows}
        assert set(SHARED) <= listed and not set(PRIVATE) & listed


def test_clients_come_to_differ_in_their_layers_and_share_the_rest(tmp_path):
    outcome = run(tmp_path)
    layers = {
        tuple(tensor.flatten().tolist())
        for name, tensor in outcome.private_tensors().items()
        if name.startswith("client of") and name.endswith("1.weight")
    }
    assert len(layers) >= 3
    assert all(set(kept.model) == set(SHARED) for kept in outcome.delivered.values())


def test_the_first_round_is_that_of_fedavg_without_the_private_layers(tmp_path):
    ours = run(tmp_path / "ours", rounds=1).server.model
    plain = run(tmp_path / "plain", fedavg(FedAvgConfig(), tiny_setup()), rounds=1).server.model
    assert set(ours) == set(SHARED) and all(torch.equal(ours[name], plain[name]) for name in ours)


def test_later_rounds_start_from_the_own_layers(tmp_path):
    """So from the second round on it is another model than FedAvg's."""
    everyone = tiny_setup(clients_per_round=None)
    ours = run(tmp_path / "ours", lg_fedavg(LgFedAvgConfig(), everyone), rounds=2).server.model
    plain = run(tmp_path / "plain", fedavg(FedAvgConfig(), everyone), rounds=2).server.model
    assert not torch.allclose(ours["3.weight"], plain["3.weight"])


class TestTheCut:
    def test_the_first_layers_with_weights_are_private(self):
        deep = Network(lambda: mlp((4,), 3, (5, 6)), "expert")
        assert cut(deep, 1) == ({"1.weight", "1.bias"}, "3")
        assert cut(deep, 2) == ({"1.weight", "1.bias", "3.weight", "3.bias"}, "5")

    def test_of_a_residual_network_whole_blocks_are(self):
        """Stem, its norm and the first block: the split that the paper found best for ResNet-20."""
        names, first_shared = cut(Network(lambda: resnet((3, 8, 8), 10, 20, None), "expert"), 3)
        assert {name.split(".")[0] for name in names} == {"stem", "stages"} and first_shared == "stages.1"

    def test_something_must_be_shared(self):
        with pytest.raises(ConfigError, match=r"algorithm.private_layers=2, but the expert has 2 layers"):
            lg_fedavg(LgFedAvgConfig(private_layers=2), tiny_setup())


class TestNewcomers:
    def test_an_ensemble_averages_what_the_private_layers_make_of_x(self):
        parts, model, x = [random_private(seed) for seed in (1, 2, 3)], shared_part(0), torch.randn(6, 4)
        mean = torch.stack([first_layer(part, x) for part in parts]).mean(0)
        prediction = ensemble(EXPERT, "3", Broadcast(model, trees.stack(parts)), x)
        torch.testing.assert_close(prediction, mean @ model["3.weight"].T + model["3.bias"])

    def test_an_ensemble_of_equal_layers_is_the_model_that_has_them(self):
        network = Network(lambda: resnet((3, 8, 8), 10, 8, None), "expert")
        names, first_shared = cut(network, 3)
        whole, x = network.init(1), torch.randn(2, 3, 8, 8)
        private = {name: tensor for name, tensor in whole.items() if name in names}
        rest = {name: tensor for name, tensor in whole.items() if name not in names}
        prediction = ensemble(network, first_shared, Broadcast(rest, trees.stack([private, dict(private)])), x)
        torch.testing.assert_close(prediction, network(whole, x))

    def test_with_a_release_they_answer_with_the_layers_of_those_who_trained(self, tmp_path):
        algorithm = lg_fedavg(LgFedAvgConfig(), tiny_setup())
        outcome = run(tmp_path, algorithm, rounds=1, release=True)
        given = outcome.server.released["1.weight"]
        trained = outcome.records[0].clients
        stored = outcome.private_tensors()
        version = max(int(name.split()[5][:-1]) for name in stored if name.startswith("client of"))
        own = [stored[f"client of client {client} at {version}: private/1.weight"] for client in trained]
        assert len(trained) == 3 < len(PARTICIPANTS) and torch.equal(given, torch.stack(own))
        x = torch.randn(5, 4)
        for client in (UNSEEN, OPTED_OUT, EMPTY):
            kept = outcome.delivered[client]
            prediction = algorithm.predict(kept, algorithm.init_client(kept, client, 0), None, x)
            torch.testing.assert_close(prediction, ensemble(EXPERT, "3", kept, x).log_softmax(1))

    def test_without_a_release_they_answer_with_the_layers_that_everyone_starts_from(self, tmp_path):
        algorithm = lg_fedavg(LgFedAvgConfig(), tiny_setup())
        kept, x = run(tmp_path, algorithm).delivered[UNSEEN], torch.randn(5, 4)
        start = {**EXPERT.init(0, "init", "expert"), **kept.model}
        prediction = algorithm.predict(kept, algorithm.init_client(kept, UNSEEN, 0), None, x)
        assert kept.released == {} and torch.equal(prediction, EXPERT(start, x).log_softmax(1))

    def test_who_trained_or_personalised_answers_with_the_own_layers(self):
        algorithm = lg_fedavg(LgFedAvgConfig(), tiny_setup())
        released = trees.stack([random_private(1), random_private(2)])
        shared, own, x = Broadcast(shared_part(0), released), random_private(3), torch.randn(5, 4)
        expected = EXPERT({**shared.model, **own}, x).log_softmax(1)
        trained, fresh = (ClientState(random_private(seed), torch.tensor(r)) for seed, r in ((3, 1), (4, 0)))
        torch.testing.assert_close(algorithm.predict(shared, trained, None, x), expected)
        torch.testing.assert_close(algorithm.predict(shared, fresh, PersonalState(own, torch.tensor(1)), x), expected)

    def test_who_has_no_data_to_personalise_with_goes_on_with_the_layers_given_away(self, tmp_path):
        algorithm = lg_fedavg(LgFedAvgConfig(), tiny_setup())
        outcome, federation, x = run(tmp_path, algorithm, release=True), tiny_federation(), torch.randn(5, 4)
        for client, has_data in ((EMPTY, False), (UNSEEN, True)):
            kept = outcome.delivered[client]
            fresh, data = algorithm.init_client(kept, client, 0), federation.data([client], opted_in_only=False)
            cohort = trees.stack([kept]), trees.stack([fresh])
            personal = algorithm.personalize(*cohort, None, data, Streams(0, "personalize", 1, (client,)))
            prediction = algorithm.predict(kept, fresh, trees.pick(personal, 0), x)
            given = ensemble(EXPERT, "3", kept, x).log_softmax(1)
            assert torch.allclose(prediction, given) != has_data

    def test_a_way_around_the_cut_is_refused_before_anything_is_given(self, tmp_path):
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

            def forward(self, x):
                inner = self.first(x)
                return self.last(inner + self.second(inner))

        setup = tiny_setup()._replace(expert=Network(Around, "expert"))
        run(tmp_path / "opted_out", lg_fedavg(LgFedAvgConfig(), setup), rounds=1)
        with pytest.raises(ConfigError, match="something leads around layer 'second'"):
            run(tmp_path / "giving", lg_fedavg(LgFedAvgConfig(), setup), rounds=1, release=True)


def test_personalising_fits_the_private_layers_on_all_records(tmp_path):
    algorithm = lg_fedavg(LgFedAvgConfig(), tiny_setup())
    outcome = run(tmp_path, algorithm)
    final = {name.split()[3]: t for name, t in outcome.private_tensors().items() if "final" in name and "1.w" in name}
    start = EXPERT.init(0, "init", "expert")["1.weight"]
    assert not torch.equal(final[str(OPTED_OUT)], start)
    assert torch.equal(final[str(EMPTY)], start)  # nothing to learn from


def test_personalising_keeps_the_best_copy_by_validation_loss(tmp_path):
    """Steps this long only do harm, so who has validation data ends where the rounds left it."""
    fast = LocalTraining(epochs=3, learning_rate=1e4, optimizer="sgd")
    hasty = tiny_setup()._replace(personal=LocalTrainer(fast, "batched"))
    outcome = run(tmp_path, lg_fedavg(LgFedAvgConfig(), hasty))
    stored = outcome.private_tensors()
    (final,) = [t for name, t in stored.items() if name.startswith(f"final of client {PLAIN} ") and "1.weight" in name]
    own = [t for name, t in stored.items() if name.startswith(f"client of client {PLAIN} ") and "1.weight" in name]
    assert torch.equal(final, own[-1])
