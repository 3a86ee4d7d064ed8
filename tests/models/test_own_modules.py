import pytest
import torch
from torch import nn

import fedmoe
from builders import make_expert, make_gate, tiny_federation
from fedmoe.errors import ConfigError
from fedmoe.models.network import Network


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.stay = nn.LayerNorm(4)

    def forward(self, x):
        return self.inner(x)


class TestToGroupNorm:
    def test_it_converts_at_every_depth_and_leaves_the_original_alone(self):
        module = Block()
        with torch.no_grad():
            module.inner[1].weight.uniform_()
        converted = fedmoe.models.to_group_norm(module)
        assert isinstance(converted.inner[1], nn.GroupNorm) and isinstance(converted.norm, nn.GroupNorm)
        assert torch.equal(converted.inner[1].weight, module.inner[1].weight) and converted.norm.weight is None
        assert isinstance(module.inner[1], nn.BatchNorm2d) and isinstance(converted.stay, nn.LayerNorm)
        Network(converted)

    @pytest.mark.parametrize(("channels", "groups"), [(64, 8), (12, 6), (7, 1), (2, 1), (1, 1), (16, 8)])
    def test_groups_divide_the_channels_and_hold_two_at_least(self, channels, groups):
        assert fedmoe.models.to_group_norm(nn.BatchNorm2d(channels)).num_groups == groups

    def test_no_input_without_places_is_normalised_away(self):
        norm = fedmoe.models.to_group_norm(nn.BatchNorm1d(16))
        assert norm(torch.randn(5, 16)).abs().max() > 0.1


class TestBatchNorm:
    def module(self):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        module(torch.randn(50, 5) * 3 + 1)  # statistics of data that were seen before
        return module

    def test_in_training_mode_it_gets_the_remedy(self):
        with pytest.raises(
            ConfigError, match=r"'1' of the expert is a BatchNorm1d in training mode.*to_group_norm.*eval"
        ):
            Network(self.module(), "expert")

    def test_without_statistics_it_is_refused_in_any_mode(self):
        with pytest.raises(ConfigError, match="to_group_norm"):
            Network(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval(), "expert")

    def test_in_eval_mode_its_statistics_are_constants_in_training_too(self):
        module = self.module().eval()
        network = Network(module, "expert")
        params, x = network.init(0), torch.randn(20, 5)
        before = network.frozen_digest
        torch.testing.assert_close(network(params, x), module(x))
        network(params, x, training=True)
        assert network(params, x, training=True).eq(network(params, x, training=True)).float().mean() < 1  # dropout
        torch.testing.assert_close(network(params, x), module(x))
        assert network.frozen_digest == before and "1.running_mean" not in params

    @pytest.mark.parametrize("backend", ["batched", "sequential"])
    def test_it_trains(self, tmp_path, backend):
        federation = tiny_federation()
        (features,), outputs = federation.input_shape, federation.num_classes
        module = nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)).eval()
        config = {
            "algorithm": {"name": "fedavg"},
            "schedule": {"rounds": 1, "clients_per_round": 3},
            "engine": {"workers": 1, "backend": backend},
        }
        result = fedmoe.run(config, federation=federation, expert=module, gate=make_gate, directory=tmp_path)
        model = result.personal_model(0)
        x = federation.load(0).test.x
        torch.testing.assert_close(model(x)[:1], model(x[:1]))  # rows are not mixed


class ReturnsTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x), None


class NeedsArguments(nn.Linear):
    pass


class Raises(nn.Linear):
    def forward(self, x):
        return self.no_such_layer(x)


@pytest.mark.parametrize(
    ("expert", "words"),
    [
        (ReturnsTuple, "the expert returns a tuple, not a tensor. Let its forward return the scores alone"),
        (NeedsArguments, r"expert=NeedsArguments cannot be called without arguments.*lambda: NeedsArguments\(\.\.\.\)"),
        (
            lambda size: nn.Linear(5, size),
            r"cannot be called without arguments \(missing a required argument: 'size'\)",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            "'0.weight' of the expert belongs to a lazy layer, which has no weights yet. Say the",
        ),
        (lambda: "a module", "the factory of the expert returned a str"),
        ({"hidden": 3}, "expert= is a dict. Give an nn.Module"),
        (lambda: Raises(5, 3), "the expert cannot read a batch.*AttributeError: .*no_such_layer"),
    ],
)
def test_what_is_no_expert_is_refused_with_a_sentence(expert, words):
    with pytest.raises(ConfigError, match=words):
        fedmoe.build({}, federation=tiny_federation(), expert=expert, gate=make_gate)


def test_whole_numbers_for_a_dense_layer_are_said():
    network = Network(lambda: nn.Linear(4, 2), "expert")
    with pytest.raises(ConfigError, match=r"x holds whole numbers \(torch.int64\): give floats \(x.float\(\)\)"):
        network.check_output(torch.zeros(2, 4, dtype=torch.int64), 2)


@pytest.mark.parametrize(("config", "words"), [(None, "config= is None. Give the path"), (7, "config= is a int")])
def test_a_config_that_is_none(config, words):
    with pytest.raises(ConfigError, match=words):
        fedmoe.run(config, federation=tiny_federation(), expert=make_expert, gate=make_gate)


def test_clients_that_are_no_federation_yet():
    clients = {"north": (torch.zeros(4, 5), torch.zeros(4))}
    with pytest.raises(ConfigError, match=r"federation= is a dict. .*federation_from_clients\("):
        fedmoe.run({}, federation=clients, expert=make_expert, gate=make_gate)
