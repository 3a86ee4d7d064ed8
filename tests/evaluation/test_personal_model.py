from typing import NamedTuple

import pytest
import torch
from torch import nn

from fedmoe import trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.catalog import find
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.algorithms.local_global_mixture import PersonalState as LocalGlobal
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.algorithms.specialist_mixture import PersonalState as Specialist
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

EXPERT, GATE = Network(lambda: mlp((3,), 4, (5,))), Network(lambda: mlp((3,), 1, (5,)))
SETTING = AlgorithmSetup(EXPERT, GATE, *[LocalTrainer(LocalTraining(), "sequential")] * 3, None)


def model(name, seed):
    entry = find(name)
    sent = Broadcast(EXPERT.init(seed, "general"))
    personal = {
        "fedavg": None,
        "specialist_mixture": Specialist(EXPERT.init(seed, "special"), GATE.init(seed)),
        "local_global_mixture": LocalGlobal(EXPERT.init(seed, "copy"), EXPERT.init(seed, "local"), GATE.init(seed)),
    }[name]
    return PersonalModel(
        entry.factory(entry.config(), SETTING).predict,
        {"broadcast": sent, "client": Nothing(), "personal": personal},
    )


@pytest.mark.parametrize("name", ["fedavg", "specialist_mixture", "local_global_mixture"])
class TestPersonalModel:
    def test_it_gives_probabilities(self, name):
        prediction = model(name, 0)(torch.randn(6, 3) * 20)
        assert prediction.shape == (6, 4) and (prediction >= 0).all()
        torch.testing.assert_close(prediction.sum(1), torch.ones(6))

    def test_its_state_dict_carries_everything(self, name, tmp_path):
        one, other, x = model(name, 0), model(name, 1), torch.randn(6, 3)
        assert not torch.allclose(one(x), other(x))
        torch.save(one.state_dict(), tmp_path / "client.pt")
        other.load_state_dict(torch.load(tmp_path / "client.pt", weights_only=True))
        assert torch.equal(one(x), other(x))

    def test_it_is_an_ordinary_module_that_moves_to_other_types(self, name):
        double = model(name, 0).double()
        assert double(torch.randn(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_it_holds_copies():
    class State(NamedTuple):
        w: torch.Tensor

    state = State(torch.ones(2))
    made = PersonalModel(lambda b, c, p, x: (x * p.w).log(), {"broadcast": None, "client": None, "personal": state})
    state.w.zero_()
    assert made(torch.tensor([[0.25, 0.75]])).tolist() == [[0.25, 0.75]]
    assert isinstance(made, nn.Module) and len(trees.leaves(made.state_dict())) == 1
