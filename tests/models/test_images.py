import pytest
import torch

from fedmoe.config import parse_config
from fedmoe.errors import ConfigError
from fedmoe.models.catalog import build_model
from fedmoe.models.images import LeNet, SmallCNN, mlp
from fedmoe.models.network import Network

CIFAR = (3, 32, 32)


def num_weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def from_config(table: dict, shape: tuple[int, ...], outputs: int = 10, words: int | None = None) -> torch.nn.Module:
    return build_model(parse_config({"model": table}).model, shape, outputs, words)


def test_the_small_cnn_has_the_weights_of_the_paper():
    assert num_weights(SmallCNN(CIFAR, 10)) == 62_006


def test_a_lenet_with_its_channels_is_the_small_cnn():
    torch.manual_seed(0)
    small = SmallCNN(CIFAR, 10)
    torch.manual_seed(0)
    lenet = LeNet(CIFAR, 10, (6, 16), (120, 84))
    assert small.state_dict().keys() == lenet.state_dict().keys()
    x = torch.randn(2, *CIFAR)
    assert torch.equal(small(x), lenet(x))


def test_the_large_lenet_has_the_weights_of_the_paper_and_wider_ones_double_and_quadruple_them():
    standard = num_weights(from_config({"name": "lenet"}, CIFAR))
    assert standard == 878_538
    for channels, times in (([61, 122], 2), ([113, 226], 4)):
        wide = num_weights(from_config({"name": "lenet", "channels": channels}, CIFAR))
        assert wide / standard == pytest.approx(times, rel=0.02)


def test_the_small_lenet_doubles_and_quadruples_by_its_second_layer():
    for second, times in ((36, 2), (75, 4)):
        assert num_weights(LeNet(CIFAR, 10, (6, second), (120, 84))) / 62_006 == pytest.approx(times, rel=0.02)


def test_two_layers_of_200():
    assert num_weights(from_config({"hidden": [200, 200]}, (1, 28, 28))) == 785 * 200 + 201 * 200 + 201 * 10


@pytest.mark.parametrize(
    ("table", "shape"),
    [
        ({"hidden": [200, 200]}, (1, 28, 28)),
        ({"name": "small_cnn"}, (1, 28, 28)),
        ({"name": "lenet", "channels": [4, 5], "dense": [7, 6]}, CIFAR),
        ({"name": "lenet", "channels": [4, 5], "dense": []}, (3, 20, 16)),
    ],
)
@pytest.mark.parametrize("outputs", [1, 10])
def test_every_weight_of_experts_and_gates_learns(table, shape, outputs):
    torch.manual_seed(0)
    model = from_config(table, shape, outputs)
    scores = model(torch.randn(8, *shape))
    assert scores.shape == (8, outputs)
    scores.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_convolutions_are_trained_sequentially_and_dense_layers_batched():
    assert not Network(lambda: LeNet((1, 16, 16), 2, (2, 2), (4,))).batching_pays
    assert Network(lambda: mlp((4,), 2, (3, 3))).batching_pays


@pytest.mark.parametrize("name", ["small_cnn", "lenet", "resnet"])
@pytest.mark.parametrize("shape", [(64,), (1, 7, 28)])
def test_what_is_no_image_is_refused_with_the_way_out(name, shape):
    with pytest.raises(ConfigError, match=rf"model\.name='{name}' needs images of at least .*Use model\.name='mlp'"):
        from_config({"name": name}, shape)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "lenett"}, r"model\.name='lenett' is not known\. Did you mean 'lenet'"),
        ({"name": "lenet", "hidden": [3]}, r"'model\.hidden' is not known beside model\.name='lenet'"),
        ({"name": "lenet", "channels": [3]}, r"model\.channels"),
        ({"name": "lenet", "dense": [0]}, r"model\.dense\.0=0: "),
    ],
)
def test_settings_that_do_not_go_with_the_model_are_explained(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": table})
