from torch import nn

from fedmoe.models.images import SmallCNN, mlp
from fedmoe.models.network import Network
from fedmoe.training.ways import choose_way


def test_dense_models_are_stacked_and_a_single_convolution_makes_the_loop():
    dense, image = Network(lambda: mlp((4,), 2, (3,))), Network(lambda: SmallCNN((1, 28, 28), 2))
    assert choose_way([dense, dense]) == "stacked"
    assert choose_way([dense, image]) == choose_way([image, dense]) == "looped"
    assert choose_way([Network(lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)))]) == "looped"
