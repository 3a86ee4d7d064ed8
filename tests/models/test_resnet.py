import pytest
import torch
import torch.nn.functional as F

from fedmoe.config import parse_config
from fedmoe.errors import ConfigError
from fedmoe.models.catalog import build_model
from fedmoe.models.network import Network
from fedmoe.models.resnet import Block, resnet

CIFAR = (3, 32, 32)


@pytest.mark.parametrize(("depth", "weights"), [(8, 75_290), (20, 269_722), (34, 21_282_122)])
def test_weights_are_those_of_the_published_networks(depth, weights):
    with torch.device("meta"):
        model = resnet(CIFAR, 10, depth, None)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights


def test_the_padding_shortcut_keeps_every_other_pixel_and_adds_empty_channels():
    block = Block(2, 4, 2, 1, "pad")
    torch.nn.init.zeros_(block.second_norm.weight)
    x = torch.rand(1, 2, 4, 4)
    y = block(x)
    assert torch.equal(y[:, :2], x[:, :, ::2, ::2]) and not y[:, 2:].any()


@pytest.mark.parametrize("outputs", [1, 10])
def test_every_weight_of_a_small_one_learns(outputs):
    torch.manual_seed(0)
    model = resnet((1, 9, 12), outputs, 8, None)
    scores = model(torch.randn(4, 1, 9, 12))
    assert scores.shape == (4, outputs)
    scores.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_full_resnet_34_trains_a_step():
    torch.manual_seed(0)
    model = resnet(CIFAR, 10, 34, None)
    x, y = torch.randn(2, *CIFAR), torch.tensor([3, 7])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = F.cross_entropy(model(x), y)
    before.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    optimizer.step()
    with torch.no_grad():
        assert F.cross_entropy(model(x), y) < before


def test_an_example_does_not_depend_on_the_others_of_its_batch():
    torch.manual_seed(0)
    model = resnet((1, 8, 8), 3, 8, None)
    x = torch.randn(5, 1, 8, 8)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)


def test_it_is_trained_sequentially_and_has_no_running_statistics():
    assert not Network(lambda: resnet((1, 8, 8), 3, 8, None)).batching_pays


@pytest.mark.parametrize(("depth", "groups"), [(20, 3), (34, 48)])
def test_groups_must_divide_the_channels(depth, groups):
    config = parse_config({"model": {"name": "resnet", "depth": depth, "groups": groups}}).model
    with pytest.raises(ConfigError, match=rf"model\.groups={groups} does not divide"):
        build_model(config, CIFAR, 10)
