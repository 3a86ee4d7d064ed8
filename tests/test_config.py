from pathlib import Path

import pytest

from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import FedAvgConfig
from fedmoe.config import known_keys, parse_config, read_config
from fedmoe.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def read(tmp_path, text, *changes):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return read_config(path, changes)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_published_config_is_valid(path):
    config = read_config(path)
    assert config.name == path.stem
    assert config.algorithm.name in {choice.name for choice in config.choices()} <= set(CATALOG)


def test_an_empty_file_is_a_run(tmp_path):
    config = read(tmp_path, "")
    assert config.data.name == "digits" and config.split.kind == "majority"
    assert config == parse_config({})


def test_the_settings_of_an_algorithm_stand_beside_its_name(tmp_path):
    config = read(tmp_path, '[algorithm]\nname = "fine_tuned"\nvalidate_every = 7\nmax_weight = 30')
    assert config.algorithm.options() == FedAvgConfig(validate_every=7, max_weight=30.0)


def test_a_split_names_its_kind_or_is_the_papers(tmp_path):
    split = read(tmp_path, '[split]\nkind = "dirichlet"\nalpha = 0.1').split
    assert (split.kind, split.alpha) == ("dirichlet", 0.1)
    split = read(tmp_path, "[split]\nshare = 0.3").split
    assert (split.kind, split.share) == ("majority", 0.3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[schedule]\nround = 5", "'schedule.round' is not known. Did you mean 'schedule.rounds'"),
        ("[shedule]\nrounds = 5", "'shedule' is not known. Did you mean 'schedule'"),
        ("[split]\nshar = 0.5", "'split.shar' is not known.* Did you mean 'split.share'"),
        ("[training.federated]\nepoch = 5", "'training.federated.epoch' .* mean 'training.federated.epochs'"),
        (
            "[algorithm]\nvalidate_evry = 5",
            "algorithm.validate_evry is not a setting of specialist_mixture.*'validate_every'",
        ),
        ('[algorithm]\nname = "fedavgg"', "algorithm.name='fedavgg' is not known. Did you mean 'fedavg'"),
        ('[algorithm]\nname = "local_only"\nvalidate_every = 5', "not a setting of local_only. Known keys: none"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("seed = -1", "seed=-1: input should be greater than or equal to 0"),
        ("[schedule]\nrounds = 0", "schedule.rounds=0: "),
        ('[schedule]\nrounds = "many"', "schedule.rounds='many': "),
        ("[opt_out]\nclient_fraction = 1.5", "opt_out.client_fraction=1.5: input should be less than or equal to 1"),
        ("[training.personal]\nlearning_rate = -0.1", "training.personal.learning_rate=-0.1: "),
        ('[split]\nkind = "sorted"', "split"),
        ("[algorithm]\nvalidate_every = 0", "algorithm.validate_every=0: "),
        ('[engine]\nbackend = "fast"', "engine.backend='fast': .*'batched' or 'sequential'"),
        ('[[opt_out.rules]]\nfield = "label"\nvalues = ["x"]', "opt_out.rules.0.values.0='x': "),
    ],
)
def test_a_bad_value_is_named_with_its_key(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, text)


class TestChangesOnTheCommandLine:
    def test_values_are_toml_or_plain_text(self, tmp_path):
        config = read(
            tmp_path, "[schedule]\nrounds = 3",
            "schedule.rounds=9", "training.personal.learning_rate=1e-5", "split.kind=dirichlet", "split.alpha=0.1",
            "schedule.clients_per_round=all", "schedule.release=true", "model.hidden=[8, 4]", 'name="my run"',
        )  # fmt: skip
        assert config.schedule.rounds == 9 and config.training.personal.learning_rate == 1e-5
        assert config.split.kind == "dirichlet" and config.split.alpha == 0.1
        assert config.schedule.clients_per_round == "all" and config.schedule.release is True
        assert config.model.hidden == (8, 4) and config.name == "my run"

    def test_the_last_change_wins(self, tmp_path):
        assert read(tmp_path, "", "seed=1", "seed=2").seed == 2

    def test_a_change_is_checked_like_the_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"Did you mean 'schedule.rounds'"):
            read(tmp_path, "", "schedule.rouns=5")
        with pytest.raises(ConfigError, match=r"--set 'seed' has no '='"):
            read(tmp_path, "", "seed")
        with pytest.raises(ConfigError, match="'seed' is a value, not a section"):
            read(tmp_path, "seed = 1", "seed.deep=2")

    def test_false_is_false(self, tmp_path):
        assert read(tmp_path, "[schedule]\nrelease = true", "schedule.release=false").schedule.release is False


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.toml cannot be read: No such file"):
        read_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read(tmp_path, "rounds == 5")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_config(tmp_path / "binary.toml")


def test_a_config_survives_being_written_down():
    config = parse_config({"algorithm": {"name": "fedavg", "validate_every": 9}, "model": {"hidden": [3]}, "seed": 4})
    assert parse_config(config.model_dump(mode="json")) == config


def test_a_comparison_may_set_an_algorithm_of_its_own():
    config = parse_config({"compare": ["fedavg", {"name": "fine_tuned", "validate_every": 3}]})
    assert [choice.name for choice in config.choices()] == ["fedavg", "fine_tuned"]
    assert config.choices()[1].options().validate_every == 3


def test_one_algorithm_is_compared_with_itself_under_labels():
    twice = [{"name": "fedmix", "label": f"FedMix K={count}", "num_experts": count} for count in (2, 4)]
    choices = parse_config({"compare": twice}).choices()
    assert [choice.folder for choice in choices] == ["FedMix_K=2", "FedMix_K=4"]
    assert [choice.options().num_experts for choice in choices] == [2, 4]
    with pytest.raises(ConfigError, match=r"compare has 'fedmix' more than once.*label"):
        parse_config({"compare": ["fedmix", {"name": "fedmix", "num_experts": 2}]})


def test_known_keys_reach_into_every_section():
    keys = known_keys()
    for key in (
        "seed",
        "split.alpha",
        "split.share",
        "training.local.patience",
        "algorithm.max_weight",
        "opt_out.rules",
    ):
        assert key in keys
