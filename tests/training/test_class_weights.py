import pytest
import torch

import fedmoe
from builders import make_expert, make_gate, tiny_federation
from fedmoe.assembly.settings import class_weights
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.config import parse_config
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network
from fedmoe.training.batch import Batch
from fedmoe.training.class_weights import ClassWeightedLoss
from fedmoe.training.classifier import ClassifierLoss


def weights_of(setting, **federation):
    x = torch.randn(40, 2)
    y = torch.tensor([0] * 30 + [1] * 10)
    made = federation_from_clients(
        {"ada": (x, y), "bob": (x, 1 - y)}, **{"test_share": 0, "validation_share": 0, **federation}
    )
    return class_weights(parse_config({"training": {"class_weights": setting}}), made)


def test_a_loss_is_multiplied_by_the_weight_of_its_class():
    network = Network(lambda: torch.nn.Linear(2, 2))
    plain = ClassifierLoss(network)
    batch = Batch(torch.randn(6, 2), torch.tensor([0, 1, 1, 0, 1, 0]), {})
    losses = [loss({"model": network.init(0)}, {}, batch) for loss in (plain, ClassWeightedLoss(plain, [1.0, 3.0]))]
    torch.testing.assert_close(losses[1], losses[0] * torch.tensor([1.0, 3, 3, 1, 3, 1]))


def test_balanced_ones_come_from_opted_in_rows_of_clients_that_take_part():
    assert weights_of("balanced") == (1.0, 1.0)
    assert weights_of("balanced", opted_out=["bob"]) == pytest.approx((2 / 3, 2.0))
    assert weights_of("balanced", unseen=["bob"]) == pytest.approx((2 / 3, 2.0))
    assert weights_of("balanced", opted_out=["bob"], num_classes=3) == pytest.approx((2 / 3, 2.0, 1.0))


def test_explicit_ones_go_by_number_or_name():
    assert weights_of([1, 2.5]) == (1.0, 2.5)
    assert weights_of({"ill": 4.0}, class_names=["well", "ill"]) == (1.0, 4.0)
    assert weights_of({"1": 4.0}) == (1.0, 4.0)
    assert weights_of(None) is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ([1.0, 2.0, 3.0], "has 3 weights, but there are 2 classes"),
        ({"dead": 1.0}, "names the class 'dead', which is not there. Known: '0', '1'"),
        ([1.0, -1.0], r"training.class_weights.1=-1.0: input should be greater than 0\."),
        ("even", "training.class_weights='even': input should be 'balanced'"),
    ],
)
def test_wrong_ones_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        weights_of(setting)


@pytest.mark.parametrize("algorithm", ["fedavg", "specialist_mixture", "local_global_mixture", "fedmix"])
def test_every_backend_means_the_same_by_them(tmp_path, algorithm):
    losses = {}
    for backend in ("native", "batched", "sequential"):
        config = {
            "algorithm": {"name": algorithm},
            "schedule": {"rounds": 2, "clients_per_round": 3},
            "training": {"class_weights": [1.0, 5.0, 0.2], "personal": {"epochs": 2}, "local": {"epochs": 2}},
            "engine": {"workers": 1, "backend": backend},
        }
        if backend == "native":
            parts = fedmoe.build(config, federation=tiny_federation(), expert=make_expert, gate=make_gate)
            noted = any("class_weights" in note for note in parts.fallback_notes())
            assert noted == (algorithm == "fedmix")  # whose objective the kernels do not weight
        result = fedmoe.run(
            config, federation=tiny_federation(), expert=make_expert, gate=make_gate, directory=tmp_path / backend
        )
        losses[backend] = [score.loss for score in result.scores]
    assert losses["native"] == pytest.approx(losses["sequential"], abs=1e-4)
    assert losses["batched"] == pytest.approx(losses["sequential"], abs=1e-4)


def test_they_move_a_model_towards_the_heavy_class(tmp_path):
    shares = []
    for weights in (None, [1.0, 10.0, 1.0]):
        config = {
            "algorithm": {"name": "fedavg"},
            "schedule": {"rounds": 10, "clients_per_round": 3},
            "training": {
                "federated": {"optimizer": "sgd", "learning_rate": 0.02},
                **({"class_weights": weights} if weights else {}),
            },
            "engine": {"workers": 1, "backend": "sequential"},
        }
        federation = tiny_federation()
        result = fedmoe.run(
            config, federation=federation, expert=make_expert, gate=make_gate, directory=tmp_path / str(bool(weights))
        )
        shares.append(float(result.personal_model(0)(federation.global_test.x)[:, 1].mean()))
    assert shares[1] > shares[0] + 0.05
