import pytest
import torch
from torch import nn

from fedmoe.errors import ConfigError
from fedmoe.models.network import Network


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x):
        return self.up(self.down(x))


class WithTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 2), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) / self.temperature


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_path_gives_the_same_weights_and_another_path_others():
    network = Network(lambda: nn.Linear(3, 2))
    assert same(network.init(0, "expert"), network.init(0, "expert"))
    assert same(network.init(0, "expert"), Network(lambda: nn.Linear(3, 2)).init(0, "expert"))
    assert not same(network.init(0, "expert"), network.init(1, "expert"))
    assert not same(network.init(0, "expert"), network.init(0, "gate"))


def test_a_module_starts_every_copy_with_its_own_weights():
    module = nn.Linear(3, 2)
    network = Network(module)
    assert same(network.init(0), network.init(1)) and same(network.init(0), dict(module.named_parameters()))
    network.init(0)["weight"].zero_()
    before = network.init(0)
    with torch.no_grad():
        module.weight.zero_()
    assert same(network.init(0), before) and before["weight"].any()


def test_the_users_module_is_left_as_it_was():
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    before = module(x)
    network = Network(module)
    network({name: torch.zeros_like(tensor) for name, tensor in network.init(0).items()}, x)
    network.init(0)["weight"].zero_()
    assert torch.equal(module(x), before) and isinstance(module.weight, nn.Parameter)


def test_drawing_weights_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    Network(lambda: nn.Linear(3, 2)).init(5)
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_the_module_at_the_given_weights():
    module, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(4, 3)
    network = Network(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    torch.testing.assert_close(network(dict(module.named_parameters()), x), module(x))
    assert network.num_weights == 3 * 5 + 5 + 5 * 2 + 2


def test_recurrent_layers_use_and_train_the_given_weights():
    network, x = Network(LastState, "expert"), torch.randn(2, 5, 3)
    one, other = network.init(1), network.init(2)
    mixed = {name: (other if name.startswith("lstm") else one)[name] for name in one}
    assert not torch.allclose(network(one, x), network(mixed, x))
    wanted = {name: tensor.clone().requires_grad_() for name, tensor in one.items()}
    grads = torch.autograd.grad(network(wanted, x).sum(), list(wanted.values()))
    assert all(grad.any() for grad in grads)


def test_tied_weights_are_one_tensor_used_twice():
    network, x = Network(Tied), torch.randn(2, 4)
    params = network.init(0)
    assert list(params) == ["down.weight"] and network.num_weights == 16
    torch.testing.assert_close(network(params, x), x @ params["down.weight"].T @ params["down.weight"].T)
    doubled = {"down.weight": 2 * params["down.weight"]}
    torch.testing.assert_close(network(doubled, x), 4 * network(params, x))


def test_dropout_acts_in_training_only():
    network = Network(lambda: nn.Dropout(0.5))
    x = torch.ones(100, 1)
    assert network({}, x, training=True).eq(0).any()
    assert torch.equal(network({}, x), x)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_running_statistics_are_refused_by_layer(layer):
    with pytest.raises(ConfigError, match=rf"layer '1' of the expert is a {type(layer).__name__}.*to_group_norm"):
        Network(nn.Sequential(nn.Linear(4, 4), layer), "expert")


def test_norms_without_running_statistics_are_welcome():
    Network(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)))


def test_the_output_is_one_score_per_class():
    network = Network(lambda: nn.Linear(4, 3), "expert")
    network.check_output(torch.zeros(2, 4), 3)
    with pytest.raises(ConfigError, match=r"the expert returns shape \(2, 3\).*must return \(2, 5\).*class"):
        network.check_output(torch.zeros(2, 4), 5)
    with pytest.raises(ConfigError, match=r"must return \(2, 1\).*per example"):
        network.check_output(torch.zeros(2, 4), 1)
    with pytest.raises(ConfigError, match=r"the expert cannot read a batch of shape \(2, 7\)"):
        network.check_output(torch.zeros(2, 7), 3)


@pytest.mark.parametrize(
    ("module", "pays"),
    [
        (nn.Linear(4, 2), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)), True),
        (nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(4, 2)), True),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(4, 2)), False),
        (nn.LSTM(4, 2), False),
        (nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)), False),  # no randomness inside vmap
        (WithTemperature(), False),  # who knows what it does with its own parameter
    ],
)
def test_batching_pays_for_dense_layers_only(module, pays):
    assert Network(module).batching_pays is pays


def test_features_are_the_input_of_the_output_layer_for_one_client_and_for_a_cohort():
    network = Network(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    params, other, x = network.init(0), network.init(1), torch.randn(4, 3)
    scores, features = network.with_features(params, x)
    assert torch.equal(features, torch.relu(x @ params["0.weight"].T + params["0.bias"]))
    assert torch.equal(scores, network(params, x)) and network.num_features == 5
    both = {name: torch.stack([params[name], other[name]]) for name in params}
    stacked = torch.func.vmap(lambda one: network.with_features(one, x)[1])(both)
    assert torch.allclose(stacked[0], features) and not torch.allclose(stacked[1], features)


def test_a_network_without_a_dense_layer_has_no_features():
    with pytest.raises(ConfigError, match=r"no nn\.Linear"):
        Network(lambda: nn.Conv2d(1, 1, 3)).with_features({}, torch.zeros(1))


def test_the_output_bias_goes_by_its_name_in_the_network():
    assert Network(lambda: nn.Linear(3, 2)).output_bias_name == "bias"
    assert Network(WithTemperature).output_bias_name == "layer.bias"
    deep = Network(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    assert deep.output_bias_name == "2.bias" and deep.init(0)[deep.output_bias_name].shape == (2,)
    with pytest.raises(ConfigError, match="'up' of the model has no bias"):
        _ = Network(Tied).output_bias_name
