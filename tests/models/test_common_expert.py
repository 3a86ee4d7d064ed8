import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedmoe
from builders import CLASSES, FEATURES, make_common_expert, tiny_config, tiny_federation
from fedmoe import assembly
from fedmoe.errors import ConfigError
from fedmoe.models.common_expert import CommonExpert, temperature_in
from fedmoe.models.images import mlp

X = torch.randn(7, FEATURES, generator=torch.Generator().manual_seed(0))


def common(**options):
    module = make_common_expert()
    return CommonExpert(module, module.state_dict(), X, CLASSES, **options), module


def test_it_embeds_by_the_input_of_its_output_layer_and_answers_by_the_layer_itself():
    expert, module = common()
    hidden = module[:-1](X)
    torch.testing.assert_close(expert.embed(X), hidden)
    torch.testing.assert_close(expert.log_probs(X), module(X).log_softmax(-1))
    assert expert.num_features == hidden.shape[1] and not expert.embed(X).requires_grad


def test_the_temperature_of_its_file_calibrates_it():
    expert, module = common(temperature=2.0)
    torch.testing.assert_close(expert.log_probs(X), (module(X) / 2).log_softmax(-1))


@pytest.mark.parametrize("noted", ["warm", "0", "-1", "nan", "inf"])
def test_a_temperature_that_is_none_is_refused(noted):
    with pytest.raises(ConfigError, match="no positive number"):
        temperature_in({"temperature": noted})


def test_one_whose_output_is_the_embedding_predicts_nothing():
    module = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 9), nn.Tanh())
    expert = CommonExpert(module, module.state_dict(), X, CLASSES, embedding="output")
    torch.testing.assert_close(expert.embed(X), module(X))
    assert expert.num_features == 9 and not expert.can_predict
    with pytest.raises(ConfigError, match="has no output layer"):
        expert.log_probs(X)


def test_native_kernels_and_pytorch_agree():
    expert, _ = common()
    plain = expert.plain_copy()
    expert.network.go_native()
    torch.testing.assert_close(expert.embed(X), plain.embed(X))
    torch.testing.assert_close(expert.log_probs(X), plain.log_probs(X))


def test_one_for_other_inputs_is_refused():
    module = mlp((FEATURES + 1,), CLASSES, (3,))
    with pytest.raises(ConfigError, match=r"the common expert cannot read a batch of shape \(7, 4\)"):
        CommonExpert(module, module.state_dict(), X, CLASSES)
    with pytest.raises(ConfigError, match="the common expert cannot read a batch"):
        CommonExpert(module, module.state_dict(), X, CLASSES, embedding="output")
    flat = nn.Linear(FEATURES, CLASSES + 1)
    with pytest.raises(ConfigError, match="the common expert returns shape"):
        CommonExpert(flat, flat.state_dict(), X, CLASSES)


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "common.safetensors"
    save_file(mlp((FEATURES,), CLASSES, (3,)).state_dict(), path)
    config = tiny_config("fedjets").model_dump(mode="json", exclude_none=True)
    with pytest.raises(ConfigError, match=r"common_expert\.weights=.*'1\.bias' has shape \(3,\)"):
        fedmoe.build({**config, "common_expert": {"weights": str(path)}}, federation=tiny_federation())


def test_its_network_may_be_another_than_that_of_the_experts(tmp_path):
    path = tmp_path / "common.safetensors"
    save_file(mlp((FEATURES,), CLASSES, (3,)).state_dict(), path)
    config = tiny_config("fedjets").model_dump(mode="json", exclude_none=True)
    table = {"weights": str(path), "model": {"name": "mlp", "hidden": [3]}}
    parts = fedmoe.build({**config, "common_expert": table}, federation=tiny_federation())
    assert parts.setup.common is not None and parts.setup.common.num_features == 3


def test_a_module_is_passed_from_python():
    parts = assembly.build(
        tiny_config("common_expert"), federation=tiny_federation(), common_expert=make_common_expert()
    )
    torch.testing.assert_close(
        parts.algorithm.predict(None, None, None, X), make_common_expert()(X).log_softmax(-1), atol=1e-6, rtol=1e-6
    )
