"""Every algorithm may start from given weights; a file that does not fit is refused with a sentence."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedmoe
from builders import CLASSES, FEATURES, make_common_expert, make_expert, make_gate, tiny_config, tiny_federation
from fedmoe import assembly, trees
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.config import read_config
from fedmoe.errors import ConfigError, RunError
from fedmoe.models.images import mlp
from fedmoe.models.start_weights import read_weights, starting_from, write_weights

NEED_NO_START = {"common_expert"}  # has no model of its own
MUST_START_APART = {"fedmix", "ifca", "fedem"}  # alike, their experts would stay alike


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "start.safetensors"
    save_file({name: torch.full_like(t, 0.25) for name, t in make_expert().state_dict().items()}, path)
    return path


def build(name, weights, **changes):
    config = tiny_config(name)
    model = config.model.model_copy(update={"start_from": weights, **changes})
    own = {"federation": tiny_federation(), "expert": make_expert, "gate": make_gate}
    return assembly.build(config.model_copy(update={"model": model}), **own, common_expert=make_common_expert())


@pytest.mark.parametrize("name", sorted(CATALOG.keys() - NEED_NO_START - MUST_START_APART))
def test_every_algorithm_starts_from_them(name, weights):
    parts = build(name, weights)
    server = trees.to_named(parts.algorithm.init_server(0))
    models = {key: t for key, t in server.items() if "moments" not in key and "control" not in key}
    started = [tensor for key, tensor in models.items() if key.split("/")[-1] in make_expert().state_dict()]
    assert all((tensor == 0.25).all() for tensor in started)
    assert started or name in ("local_only", "lg_fedavg", "biased_fedavg", "fedrep", "fedrod")
    assert all((tensor == 0.25).all() for tensor in parts.expert.init("any").values())


@pytest.mark.parametrize("name", sorted(MUST_START_APART))
def test_experts_that_would_stay_alike_start_apart_by_noise(name, weights):
    with pytest.raises(ConfigError, match="start_noise"):
        build(name, weights).algorithm.init_server(0)
    varied = {n: torch.randn(t.shape) for n, t in make_expert().state_dict().items()}
    save_file(varied, weights)
    server = build(name, weights, start_noise=0.01).algorithm.init_server(0)
    first, second = (trees.pick(server.experts, k)["1.weight"] for k in (0, 1))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, varied["1.weight"], atol=0.2, rtol=0)


def test_noise_needs_weights_to_move():
    with pytest.raises(ConfigError, match=r"model\.start_noise=0\.1 .* model\.start_from names none"):
        fedmoe.build({"model": {"name": "mlp", "start_noise": 0.1}})


def test_a_gate_starts_afresh(weights):
    first, second = (build("specialist_mixture", weights).gate.init(seed) for seed in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "3.bias"}, "has no '3.bias'"),
        (lambda t: {**t, "more": torch.zeros(1)}, "has a tensor that the model lacks, 'more'"),
        (lambda t: {**t, "1.bias": torch.zeros(6)}, r"'1\.bias' has shape \(6,\), but the model needs \(5,\)"),
        (lambda t: {**t, "1.bias": torch.full((5,), torch.nan)}, "holds values that are no numbers"),
    ],
)
def test_weights_of_another_model_are_refused(change, sentence, weights):
    save_file(change(make_expert().state_dict()), weights)
    with pytest.raises(ConfigError, match=f"model.start_from=.*{sentence}"):
        build("fedavg", weights)


def test_a_file_that_is_none_is_refused(tmp_path, weights):
    with pytest.raises(ConfigError, match=r"model\.start_from=.* cannot be read as safetensors"):
        build("fedavg", tmp_path / "absent.safetensors")
    weights.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        build("fedavg", weights)


def test_a_path_in_a_config_file_is_relative_to_it(tmp_path, weights):
    (tmp_path / "c.toml").write_text("[model]\nname = 'mlp'\nhidden = [5]\nstart_from = 'start.safetensors'\n")
    assert read_config(tmp_path / "c.toml").model.start_from == weights.absolute()


def test_a_run_does_not_go_on_with_other_weights(tmp_path):
    path = tmp_path / "start.safetensors"
    config = {**tiny_config("fedavg", rounds=1).model_dump(mode="json", exclude_none=True)}
    config["model"] = {"name": "mlp", "hidden": [5], "start_from": str(path)}
    save_file(mlp((FEATURES,), CLASSES, (5,)).state_dict(), path)
    fedmoe.run(config, federation=tiny_federation(), directory=tmp_path / "run")
    save_file(mlp((FEATURES,), CLASSES, (5,)).state_dict(), path)
    with pytest.raises(RunError, match="start_weights"):
        fedmoe.run(config, federation=tiny_federation(), directory=tmp_path / "run")


def test_what_is_written_is_read_back_with_its_notes(tmp_path):
    write_weights(tmp_path / "w.safetensors", {"a": torch.arange(6.0).view(2, 3).T}, {"accuracy": "0.7"})
    tensors, notes = read_weights(tmp_path / "w.safetensors", "key")
    assert torch.equal(tensors["a"], torch.arange(6.0).view(2, 3).T) and notes == {"accuracy": "0.7"}


def test_a_module_of_the_users_own_is_filled_in_a_copy():
    module = nn.Linear(2, 2)
    before = module.weight.clone()
    made = starting_from(module, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "the file")
    assert isinstance(made, nn.Module) and bool((made.weight == 1).all()) and torch.equal(module.weight, before)
