import pytest
from torch import nn

from fedmoe.models.images import SmallCNN, mlp
from fedmoe.models.network import Network
from fedmoe.models.resnet import resnet
from fedmoe.training import backends
from fedmoe.training.backends import choose_backend, cohort_size, kernel_notes, missing_kernels, reason


def dense():
    return Network(lambda: mlp((4,), 2, (3,)), "expert", (4,))


def image():
    return Network(lambda: SmallCNN((1, 28, 28), 2), "gate", (1, 28, 28))


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_chains_of_common_layers_run_natively():
    networks = [dense(), image()]
    assert choose_backend(networks) == "native" and "know every layer" in reason(networks, "native")
    assert missing_kernels(networks, "native") is None


def test_without_a_compiler_dense_models_are_batched_and_a_convolution_makes_all_sequential(no_compiler):
    assert choose_backend([dense(), dense()]) == "batched"
    assert choose_backend([dense(), image()]) == choose_backend([image(), dense()]) == "sequential"
    assert "no-such-compiler" in missing_kernels([dense()], "batched")
    assert "PyTorch's speed" in missing_kernels([dense()], "batched")


def test_kernels_that_are_missing_or_not_from_the_cache_are_noted(no_compiler, monkeypatch):
    assert kernel_notes([dense()], "batched") == [missing_kernels([dense()], "batched")]
    monkeypatch.setattr(backends, "library_note", lambda: "compiled for this process alone")
    assert kernel_notes([dense()], "native") == ["compiled for this process alone"]
    assert kernel_notes([image()], "sequential") == [missing_kernels([image()], "sequential")]


def test_one_network_that_the_kernels_do_not_know_takes_all_to_pytorch():
    odd = Network(lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)), "expert", (4,))
    assert choose_backend([odd, dense()]) == "sequential" and "Dropout" in reason([odd, dense()], "sequential")
    assert missing_kernels([odd], "sequential") is None  # a compiler would not help
    smooth = Network(lambda: nn.Sequential(nn.Linear(4, 2), nn.GELU()), "expert", (4,))
    assert choose_backend([smooth]) == "batched" and "batch well" in reason([smooth], "batched")


def test_residual_networks_and_norms_are_native():
    residual = Network(lambda: resnet((3, 8, 8), 2, 8, 4), "expert", (3, 8, 8))
    normed = Network(lambda: nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)), "expert", (4,))
    assert choose_backend([dense(), residual]) == choose_backend([normed]) == "native"


def test_native_cohorts_grow_as_networks_get_lighter():
    heavy = Network(lambda: mlp((784,), 10, (200,)), "expert", (784,))
    assert [cohort_size([dense(), dense()], "native")(clients) for clients in (1, 10, 16, 100)] == [1, 10, 16, 16]
    assert [cohort_size([heavy, dense()], "native")(clients) for clients in (1, 10, 100)] == [1, 5, 16]
    large = Network(lambda: mlp((1000,), 10, (2000,)), "expert", (1000,))  # few at a time: they fill the memory
    assert [cohort_size([large], "native")(clients) for clients in (1, 100)] == [1, 1]
    assert [cohort_size([image(), dense()], "native")(clients) for clients in (1, 10, 100)] == [1, 1, 12]
    assert cohort_size([dense()], "batched")(10) == 16 and cohort_size([image()], "sequential")(10) == 1
