import pytest
import torch
from torch import nn

from fedmoe.models.images import LeNet, mlp
from fedmoe.models.layers import all_passes_through, layers_of, output_from, representation
from fedmoe.models.network import Network
from fedmoe.models.resnet import resnet
from fedmoe.models.text import TextLSTM


def names(network):
    return [layer.name for layer in layers_of(network)]


def test_rows_of_layers_are_opened_and_layers_without_weights_left_out():
    lenet = Network(lambda: LeNet((1, 16, 16), 3, (2, 4), (5,)))
    assert names(lenet) == ["features.0", "features.3", "head.0", "head.2"]
    assert layers_of(lenet)[1].weights == ("features.3.bias", "features.3.weight")


def test_a_residual_block_is_one_layer():
    network = Network(lambda: resnet((3, 8, 8), 10, 8, None))
    assert names(network) == ["stem.0", "stem.1", "stages.0", "stages.1", "stages.2", "head"]
    assert len(layers_of(network)[2].weights) == 6


def test_layers_hold_all_weights_of_a_chain_and_no_other_names():
    for network in (Network(lambda: mlp((4,), 3, (5, 6))), Network(lambda: resnet((3, 8, 8), 10, 8, None))):
        held = [name for layer in layers_of(network) for name in layer.weights]
        assert sorted(held) == sorted(network.init(0))


def test_tied_weights_go_by_the_name_that_the_network_gives_them():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    first, second = layers_of(Network(Tied))
    assert first.weights == ("first.bias", "first.weight") and second.weights == ("first.weight", "second.bias")


def test_a_representation_is_what_the_next_layer_reads():
    network, x = Network(lambda: mlp((4,), 3, (5,))), torch.randn(6, 4)
    params = network.init(0)
    seen = representation(network, "3", params, x)
    torch.testing.assert_close(seen, (x @ params["1.weight"].T + params["1.bias"]).relu())
    torch.testing.assert_close(representation(network, "1", params, x), x)


def test_an_output_from_a_representation_reads_it_instead_of_x_and_leaves_no_trace():
    network, x = Network(lambda: mlp((4,), 3, (5,))), torch.randn(6, 4)
    params, given = network.init(0), torch.randn(6, 5)
    prediction = output_from(network, "3", params, x, given)
    torch.testing.assert_close(prediction, given @ params["3.weight"].T + params["3.bias"])
    torch.testing.assert_close(network(params, x), output_from(network, "3", params, x, given=reads(params, x)))


def reads(params, x):
    return (x @ params["1.weight"].T + params["1.bias"]).relu()


class Around(nn.Module):
    """A shortcut leads around the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        inner = self.first(x)
        return inner + self.second(inner)


@pytest.mark.parametrize("layer", ["stages.0", "stages.1", "head"])
def test_all_passes_through_a_residual_block(layer):
    network = Network(lambda: resnet((3, 8, 8), 10, 8, None))
    assert all_passes_through(network, layer, network.init(0), torch.randn(2, 3, 8, 8))


def test_a_way_around_is_seen():
    around = Network(Around)
    assert not all_passes_through(around, "second", around.init(0), torch.randn(2, 4))
    both_ways = Network(lambda: TextLSTM(9, 3, 4, 5))
    texts = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    assert not all_passes_through(both_ways, "forwards", both_ways.init(0), texts)
