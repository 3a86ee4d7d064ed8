import numpy as np
import pytest
import torch
from torch import nn

from fedmoe import assembly, federations
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.assembly.algorithms import build_algorithm, build_setup
from fedmoe.assembly.networks import build_networks
from fedmoe.assembly.settings import resolve_backend
from fedmoe.clients.facts import unlabelled_new_clients
from fedmoe.clients.opt_out import OptOut
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.config import parse_config
from fedmoe.data.dataset import Dataset, Table
from fedmoe.errors import ConfigError, DataError
from fedmoe.federations import build_federation
from fedmoe.partition.draw import draw_split
from fedmoe.partition.split import Shards, Split

SIZES = {
    "num_clients": 4,
    "num_unseen": 1,
    "train_size": 10,
    "validation_size": 5,
    "test_size": 5,
    "global_test_size": 8,
}


@pytest.fixture
def dataset(monkeypatch):
    labels = torch.arange(400) % 4
    table = Table(torch.arange(400.0)[:, None], labels, {"writer": torch.arange(400) % 5})
    made = Dataset("numbers", table, table, ("a", "b", "c", "d"))
    monkeypatch.setattr(federations, "load_dataset", lambda _name, _folder: made)
    return made


def config(**sections):
    return parse_config({"split": SIZES, **sections})


def model(**settings):
    return config(model=settings).model


def own(shape=(4,), classes=3):
    x = torch.randn(10, *shape)
    return federation_from_clients({"a": (x, torch.arange(10) % classes), "b": (x, torch.arange(10) % classes)})


def algorithm_of(chosen, federation, networks):
    new_clients = unlabelled_new_clients(federation)
    setup = build_setup(chosen, federation, new_clients, networks, "sequential")
    return build_algorithm(chosen, setup)


def test_a_config_makes_the_federation_it_describes(dataset):
    federation, split, *_ = build_federation(config(seed=3))
    assert split is not None
    assert (federation.num_clients, federation.num_unseen, federation.num_classes) == (4, 1, 4)
    assert federation.participants.tolist() == [0, 1, 2, 3]
    held = federation.load(2)
    assert [len(part.y) for part in (held.train, held.validation, held.test)] == [10, 5, 5]
    assert federation.digest == split.digest == build_federation(config(seed=3))[0].digest
    assert federation.digest != build_federation(config(seed=4))[0].digest


def test_a_split_with_a_seed_of_its_own_gives_runs_of_all_seeds_the_same_clients(dataset):
    fixed = [build_federation(config(seed=run, split={**SIZES, "seed": 3}))[0].digest for run in (0, 1)]
    assert fixed == [build_federation(config(seed=3))[0].digest] * 2


def test_words_are_cut_where_there_are_words(dataset):
    with pytest.raises(ConfigError, match=r"data\.max_words=5, but numbers has no words"):
        build_federation(config(data={"max_words": 5}))


def test_the_kind_of_split_is_the_one_asked_for(dataset):
    sizes = {**SIZES, "kind": "dirichlet", "alpha": 0.05}
    skewed, even = (
        draw_split(parse_config({"split": one}).split, dataset, 0) for one in (sizes, {**sizes, "alpha": 1000.0})
    )
    top = [split.class_counts(dataset.train.y.numpy(), 4).max(1).mean() for split in (skewed, even)]
    assert top[0] > top[1]


def test_the_algorithm_is_given_how_many_values_side_information_has(monkeypatch):
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    federation = federation_from_clients({"a": (x, y, {"site": y % 2})})
    setups = []
    entry = CATALOG["fedavg"]
    spied = entry._replace(factory=lambda options, setup: setups.append(setup) or entry.factory(options, setup))
    monkeypatch.setitem(CATALOG, "fedavg", spied)
    networks = build_networks(model(), federation, None, None)
    algorithm_of(config(algorithm={"name": "fedavg"}), federation, networks)
    assert setups[0].side_values == {"site": 2}


@pytest.mark.parametrize("stage", ["federated", "local", "personal"])
def test_only_images_can_be_cropped_and_mirrored(stage):
    chosen = config(training={stage: {"augment": "crop_flip"}})
    federation = own((4,))
    networks = build_networks(model(), federation, None, None)
    message = rf"training\.{stage}\.augment='crop_flip' changes images .* shape \(4,\)\. Leave it away"
    with pytest.raises(ConfigError, match=message):
        algorithm_of(chosen, federation, networks)
    images = own((1, 8, 8))
    algorithm_of(chosen, images, build_networks(model(), images, None, None))


def test_opt_out_goes_by_client_rule_chance_and_mask(dataset, tmp_path):
    np.savez(tmp_path / "masks.npz", **{"1": np.array([True, False] * 5)})
    federation, *_ = build_federation(
        config(
            opt_out={
                "clients": [0],
                "rules": [{"field": "label", "values": [2]}],
                "masks": str(tmp_path / "masks.npz"),
            }
        )
    )
    assert federation.participants.tolist() == [1, 2, 3]
    assert not federation.load(0).train_opted_in.any()
    mask = torch.tensor([True, False] * 5)
    assert torch.equal(federation.load(1).train_opted_in, mask & (federation.load(1).train.y != 2))
    assert torch.equal(federation.load(3).validation_opted_in, federation.load(3).validation.y != 2)
    quarter, *_ = build_federation(config(opt_out={"client_fraction": 0.5, "record_fraction": 0.2}))
    assert len(quarter.participants) == 2
    assert all(int(quarter.load(int(client)).train_opted_in.sum()) == 8 for client in quarter.participants)


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"zero": np.ones(10, bool)}, "array 'zero'"),
        ({"0": np.ones(10)}, "array '0' of float64"),
        (None, "cannot be read"),
    ],
)
def test_masks_that_are_none_are_refused(dataset, tmp_path, arrays, complaint):
    path = tmp_path / "masks.npz"
    if arrays is None:
        path.write_bytes(b"rubbish")
    else:
        np.savez(path, **arrays)
    with pytest.raises(DataError, match=rf"opt_out.masks=.*{complaint}.*numpy.savez"):
        build_federation(config(opt_out={"masks": str(path)}))


class TestNetworks:
    def test_the_gate_is_the_expert_with_one_output(self):
        expert, gate = build_networks(model(hidden=[5]), own(), None, None)
        assert expert.num_weights == 4 * 5 + 5 + 5 * 3 + 3 and gate.num_weights == 4 * 5 + 5 + 5 + 1

    def test_the_users_modules_are_taken(self):
        expert, gate = build_networks(model(), own(), lambda: nn.Linear(4, 3), nn.Linear(4, 1))
        assert expert.num_weights == 15 and gate.num_weights == 5

    def test_modules_that_do_not_fit_the_data_are_refused(self):
        with pytest.raises(ConfigError, match=r"the expert returns shape \(2, 7\).*must return \(2, 3\)"):
            build_networks(model(), own(), nn.Linear(4, 7), None)
        with pytest.raises(ConfigError, match=r"the gate returns shape \(2, 3\).*must return \(2, 1\)"):
            build_networks(model(), own(), None, nn.Linear(4, 3))
        with pytest.raises(ConfigError, match="the expert cannot read a batch"):
            build_networks(model(), own(), nn.Linear(9, 3), None)

    def test_the_cnn_needs_images(self):
        expert, _ = build_networks(model(name="small_cnn"), own((1, 28, 28), classes=10), None, None)
        assert expert.num_weights == 44_426
        for shape in ((4,), (1, 8, 8), (3, 32, 15)):
            with pytest.raises(ConfigError, match=r"small_cnn.*16x16.*mlp"):
                build_networks(model(name="small_cnn"), own(shape), None, None)

    def test_the_way_of_training_follows_the_models_unless_it_is_set(self):
        dense = build_networks(model(), own(), None, None)
        image = build_networks(model(name="small_cnn"), own((1, 16, 16)), None, None)
        assert resolve_backend(config(), dense) == resolve_backend(config(), image) == "native"
        assert resolve_backend(config(engine={"backend": "sequential"}), dense) == "sequential"

    def test_the_native_way_is_refused_where_it_cannot_be_gone(self):
        odd = build_networks(model(), own(), nn.Sequential(nn.Linear(4, 3), nn.GELU()), None)
        assert resolve_backend(config(), odd) == "batched"
        with pytest.raises(ConfigError, match=r"engine\.backend='native'.*the expert cannot: it has a GELU.*'auto'"):
            resolve_backend(config(engine={"backend": "native"}), odd)


def test_the_algorithm_gets_the_plans_and_the_sample_of_the_config():
    networks = build_networks(model(), own(), None, None)
    chosen = config(algorithm={"name": "fedavg", "validate_every": 3}, schedule={"clients_per_round": 2})
    algorithm = algorithm_of(chosen, own(), networks)
    pool, rng = np.arange(4), np.random.default_rng(0)
    assert algorithm.validation.every == 3 and len(algorithm.sample(None, 1, pool, rng)) == 2
    everyone = algorithm_of(config(schedule={"clients_per_round": "all"}), own(), networks)
    assert len(everyone.sample(None, 1, pool, rng)) == 4


def test_words_come_from_opted_in_rows_of_training_clients_only():
    shards = Shards(np.array([0, 2, 4, 6]), np.array([10, 11, 20, 21, 30, 31]))
    none = Shards(np.zeros(4, dtype=np.int64), np.zeros(0, dtype=np.int64))
    split = Split(2, 1, shards, none, none, np.zeros(0, dtype=np.int64))
    opted = OptOut(np.ones(3, dtype=bool), np.array([True, False, True, True, True, True]), np.zeros(0, dtype=bool))
    assert federations._shared_rows(split, opted).tolist() == [10, 20, 21]


def test_a_validation_that_is_named_like_an_exchange_of_the_round_is_refused():
    """Who sent an update and who only validated could not be told from the records of a round."""
    plain = CATALOG["fedavg"]

    def factory(setup):
        made = plain.factory(plain.config(), setup)
        return made._replace(validation=made.validation._replace(exchange=made.round[0]))

    with pytest.raises(ConfigError, match="share a name"):
        assembly.build(config(), federation=own(), algorithm=factory)
