import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from builders import tiny_setup
from fedmoe import trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.catalog import find
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.algorithms.local_global_mixture import PersonalState as LocalGlobal
from fedmoe.algorithms.specialist_mixture import PersonalState as Specialist
from fedmoe.core_types import Tensors
from fedmoe.errors import DataError, RunError
from fedmoe.evaluation.personal_model import ModelFacts, PersonalModel, Predictor
from fedmoe.models.network import Network
from fedmoe.testing.federation import CLASSES, FEATURES

FACTS = ModelFacts("north", "A method", (FEATURES,), tuple("abc"))
NAMES = ["fedavg", "specialist_mixture", "local_global_mixture"]


def predictor(name, expert=None):
    setup, entry = tiny_setup("sequential"), find(name)
    setup = setup._replace(expert=expert or setup.expert)
    return Predictor(entry.factory(entry.config(), setup), (setup.expert, setup.gate))


def model(name, seed, expert=None):
    made = predictor(name, expert)
    expert, gate = made.networks
    personal = {
        "fedavg": None,
        "specialist_mixture": Specialist(expert.init(seed, "special"), gate.init(seed)),
        "local_global_mixture": LocalGlobal(expert.init(seed, "copy"), expert.init(seed, "local"), gate.init(seed)),
    }[name]
    states = {"broadcast": Broadcast(expert.init(seed, "general")), "client": Nothing(), "personal": personal}
    return PersonalModel(made, states, FACTS)


@pytest.mark.parametrize("name", NAMES)
class TestPersonalModel:
    def test_it_gives_probabilities(self, name):
        prediction = model(name, 0)(torch.randn(6, FEATURES) * 20)
        assert prediction.shape == (6, CLASSES) and (prediction >= 0).all()
        torch.testing.assert_close(prediction.sum(1), torch.ones(6))

    def test_its_state_dict_carries_everything(self, name, tmp_path):
        one, other, x = model(name, 0), model(name, 1), torch.randn(6, FEATURES)
        assert not torch.allclose(one(x), other(x))
        torch.save(one.state_dict(), tmp_path / "client.pt")
        other.load_state_dict(torch.load(tmp_path / "client.pt", weights_only=True))
        assert torch.equal(one(x), other(x))

    def test_it_is_an_ordinary_module_that_moves_to_other_types(self, name):
        double = model(name, 0).double()
        assert double(torch.randn(2, FEATURES, dtype=torch.float64)).dtype == torch.float64
        assert {p.device.type for p in model(name, 0).to("meta").parameters()} == {"meta"}

    def test_its_parameters_can_be_trained(self, name):
        made, x = model(name, 0), torch.randn(8, FEATURES)
        before = made(x)
        assert not before.requires_grad
        made.requires_grad_()
        optimizer = torch.optim.SGD(made.parameters(), 0.5)
        made(x)[:, 0].log().mean().neg().backward()
        optimizer.step()
        assert (made(x)[:, 0].mean() > before[:, 0].mean()).item()

    def test_numpy_arrays_and_single_rows(self, name):
        made, x = model(name, 0), torch.randn(5, FEATURES)
        expected = made(x)
        assert torch.equal(made(x.double().numpy()), expected)
        assert torch.equal(made(x[2]), made(x[2:3])[0])
        assert made(x[2].numpy()).numpy().shape == (CLASSES,)

    def test_a_batch_of_another_shape_is_explained(self, name):
        with pytest.raises(DataError, match=r"x has shape \(5, 7\); this model reads \(B, 4\), or one row of shape"):
            model(name, 0)(torch.zeros(5, 7))
        with pytest.raises(DataError, match=r"x has shape \(3,\)"):
            model(name, 0)(np.zeros(3))


def test_it_can_be_copied_after_it_was_traced():
    made, x = model("specialist_mixture", 0), torch.randn(3, FEATURES)
    expected = made(x)
    torch.export.export(made, (x,))
    assert torch.equal(copy.deepcopy(made)(x), expected)


def test_it_is_not_pickled_and_says_what_to_store_instead(tmp_path):
    with pytest.raises(RunError, match=r"torch.save\(model.state_dict\(\), FILE\), or .* fedmoe export"):
        torch.save(model("fedavg", 0), tmp_path / "model.pt")


def test_names_are_those_of_the_users_own_modules():
    names = {name for name, _ in model("specialist_mixture", 0).named_parameters()}
    own = {name for name, _ in tiny_setup().expert.module.named_parameters()}
    gate = {name for name, _ in tiny_setup().gate.module.named_parameters()}
    wanted = {f"{part}.{name}" for part in ("model", "specialist") for name in own} | {f"gate.{name}" for name in gate}
    assert names == wanted and "specialist.1.weight" in names


def test_its_representation_fits_a_screen_and_shows_no_weight():
    text = repr(model("specialist_mixture", 0))
    assert text.startswith("PersonalModel of client 'north' by A method: x (B, 4) -> probabilities (B, 3)")
    assert "(specialist): 4 tensors, 43 numbers, own" in text and "(model): 4 tensors, 43 numbers, received" in text
    assert "Linear(in_features=4, out_features=5" in text and len(text.splitlines()) < 25 and "tensor(" not in text


class WithConstants(nn.Module):
    """A frozen layer and a buffer, as of a pretrained backbone."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(FEATURES, 6).requires_grad_(False)
        self.register_buffer("shift", torch.ones(6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head((self.backbone(x) + self.shift).relu())


class TestFrozenParts:
    def expert(self):
        return Network(WithConstants, "expert", (FEATURES,))

    def test_they_are_in_its_state_dict(self):
        made, x = model("fedavg", 0, self.expert()), torch.randn(3, FEATURES)
        assert "constants.expert.backbone.weight" in made.state_dict()
        assert "constants.expert.shift" in made.state_dict()
        assert {name for name, _ in made.named_parameters()} == {"model.head.weight", "model.head.bias"}
        expected = made(x)
        made.load_state_dict({**made.state_dict(), "constants.expert.shift": torch.full((6,), 5.0)})
        assert not torch.allclose(made(x), expected)

    def test_they_move_with_it(self):
        made, x = model("fedavg", 0, self.expert()), torch.randn(3, FEATURES)
        expected = made(x).double()
        torch.testing.assert_close(made.double()(x.double()), expected, atol=1e-6, rtol=1e-6)

    def test_they_move_with_a_copy_of_it(self):
        made, x = model("fedavg", 0, self.expert()), torch.randn(3, FEATURES)
        expected = made(x)
        twice = copy.deepcopy(made).double()
        torch.testing.assert_close(twice(x.double()), expected.double(), atol=1e-6, rtol=1e-6)
        assert torch.equal(made(x), expected)

    def test_two_models_share_none(self):
        one, other = model("fedavg", 0, self.expert()), model("fedavg", 0, self.expert())
        one.get_buffer("constants.expert.shift").zero_()
        assert other.get_buffer("constants.expert.shift").sum() == 6


class State(NamedTuple):
    model: Tensors
    share: torch.Tensor


class TestStates:
    def made(self, broadcast, personal):
        algorithm = find("fedavg").factory(find("fedavg").config(), tiny_setup("sequential"))
        algorithm = algorithm._replace(predict=lambda b, _c, p, x: (x * p.share + p.model["w"] - b.model["w"]).log())
        states = {"broadcast": broadcast, "client": None, "personal": personal}
        return PersonalModel(Predictor(algorithm, ()), states, FACTS)

    def test_it_holds_copies(self):
        state = State({"w": torch.zeros(FEATURES)}, torch.ones(()))
        made = self.made(Broadcast({"w": torch.zeros(FEATURES)}), state)
        state.share.zero_()
        x = torch.rand(2, FEATURES)
        torch.testing.assert_close(made(x), x)

    def test_fields_of_one_name_are_told_apart_and_numbers_that_are_no_weights_are_buffers(self):
        made = self.made(Broadcast({"w": torch.ones(FEATURES)}), State({"w": torch.zeros(FEATURES)}, torch.ones(())))
        assert {name for name, _ in made.named_parameters()} == {"shared_model.w", "personal_model.w"}
        assert [name for name, _ in made.named_buffers()] == ["share"]
        assert len(trees.leaves(dict(made.state_dict()))) == 3


def test_a_mixture_says_how_much_each_expert_has_to_say():
    made, x = model("specialist_mixture", 0), torch.randn(6, FEATURES)
    weights = made.expert_weights(x.numpy())
    general, specialist = (made.expert_weights(x)[name] for name in ("general", "specialist"))
    assert list(weights) == ["specialist", "general"] and torch.equal(weights["general"], general)
    torch.testing.assert_close(general + specialist, torch.ones(6))
    assert made.expert_weights(x[0])["general"] == general[0]
    assert model("fedavg", 0).expert_weights(x) is None
