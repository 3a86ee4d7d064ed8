import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn

from fedmoe.models.fingerprint import structure_fingerprint
from fedmoe.models.images import LeNet, mlp
from fedmoe.models.network import Network
from fedmoe.models.text import BagOfWords, TextLSTM


class Handwritten(nn.Module):
    def __init__(self, activation=torch.relu, scale=1.0):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.activation, self.scale = activation, scale

    def forward(self, x):
        return self.second(self.activation(self.first(x)) * self.scale)


class WithTanh(Handwritten):
    def forward(self, x):
        return self.second(F.tanh(self.first(x)) * self.scale)


class OtherOrder(Handwritten):
    def forward(self, x):
        return self.first(self.activation(self.second(x)) * self.scale)


class Untraceable(nn.Module):
    def __init__(self, limit=3):
        super().__init__()
        self.layer, self.limit = nn.Linear(4, 4), limit

    def forward(self, x):
        return self.layer(x) if len(x) > self.limit else x


class UntraceableTanh(Untraceable):
    def forward(self, x):
        return self.layer(x).tanh() if len(x) > self.limit else x


def sequential(*layers):
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))


def test_modules_that_compute_other_things_from_weights_of_equal_shapes_differ():
    modules = {
        "relu": sequential(nn.ReLU()), "tanh": sequential(nn.Tanh()), "none": sequential(nn.Identity()),
        "leaky": sequential(nn.LeakyReLU(0.1)), "leakier": sequential(nn.LeakyReLU(0.2)),
        "dropout": sequential(nn.Dropout(0.1)), "more dropout": sequential(nn.Dropout(0.2)),
        "by hand": Handwritten(), "tanh by hand": WithTanh(), "other order": OtherOrder(),
        "tanh given": Handwritten(torch.tanh), "scaled": Handwritten(scale=2.0),
        "untraceable": Untraceable(), "other limit": Untraceable(4), "untraceable tanh": UntraceableTanh(),
        "conv": nn.Conv2d(1, 2, 3), "strided": nn.Conv2d(1, 2, 3, stride=2), "padded": nn.Conv2d(1, 2, 3, padding=1),
        "counts": BagOfWords(5, 2), "raw counts": BagOfWords(5, 2, "raw"),
        "text": TextLSTM(5, 2, 3, 4), "more layers": TextLSTM(5, 2, 3, 4, layers=2),
        "frozen": sequential(nn.ReLU()).requires_grad_(False), "double": sequential(nn.ReLU()).double(),
        "wider": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)),
    }  # fmt: skip
    prints = {name: structure_fingerprint(module) for name, module in modules.items()}
    assert len(set(prints.values())) == len(modules), prints


def test_weights_mode_and_repetition_change_nothing():
    for factory in (Handwritten, Untraceable, lambda: LeNet((1, 16, 16), 3, (2, 4), (5,)), lambda: TextLSTM(5, 2)):
        one, other = factory(), factory().eval()
        assert structure_fingerprint(one) == structure_fingerprint(one) == structure_fingerprint(other)


def test_a_class_without_source_still_has_a_fingerprint():
    space = {"nn": nn, "__name__": "made"}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x if len(x) else -x", space)
    assert structure_fingerprint(space["Made"]()) != structure_fingerprint(nn.Identity())


def test_a_network_has_the_fingerprint_of_its_module_whatever_weights_it_was_called_with():
    network = Network(lambda: mlp((4,), 3, (5,)), "expert", (4,))
    before = Network(mlp((4,), 3, (5,)), "expert", (4,)).fingerprint
    network(network.init(0), torch.zeros(1, 4))
    network.go_native()
    assert network.fingerprint == before


def test_a_class_of_the_running_script_is_the_one_that_others_import_from_it(tmp_path):
    (tmp_path / "my_script.py").write_text(
        "from torch import nn\n"
        "from fedmoe.models.fingerprint import structure_fingerprint\n"
        "class Net(nn.Linear): pass\n"
        "if __name__ == '__main__':\n"
        "    import my_script\n"
        "    assert my_script.Net is not Net\n"
        "    assert structure_fingerprint(my_script.Net(2, 3)) == structure_fingerprint(Net(2, 3))\n"
    )
    subprocess.run([sys.executable, str(tmp_path / "my_script.py")], check=True, timeout=60)
