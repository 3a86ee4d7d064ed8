import re
from pathlib import Path
from typing import ClassVar, get_args

import pytest

from fedmoe.aggregation.server_optimizer import ServerOptimizer
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import FedAvgConfig
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.config import ExperimentConfig, parse_config, read_config
from fedmoe.config_errors import OLD_KEYS, OLD_VALUES, known_keys
from fedmoe.config_sections import EngineConfig
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
        ('[engine]\nway = "stacked"', "'engine.way' is now called 'engine.backend'. Write engine.backend = 'batched'"),
        ('[engine]\nway = "auto"', "Write engine.backend = 'auto'"),
        ('[engine]\nbackend = "looped"', "engine.backend='looped' is now called 'sequential'"),
        (
            "[evaluation]\nunion = 9",
            "'evaluation.union' is now called 'evaluation.pooled'. Write evaluation.pooled = 9",
        ),
        ('[algorithm]\nname = "fedmix"\nnewcomers = "density"', "Write algorithm.new_clients = 'density'"),
        (
            '[algorithm]\nname = "fedmix"\nobjective = "bound"',
            "algorithm.objective='bound' is now called 'variational'. Write algorithm.objective = 'variational'",
        ),
        ('[algorithm]\nname = "local_global"', "algorithm.name='local_global' is now called 'lg_fedavg'"),
        ('compare = ["fedavg", "local_global"]', "algorithm.name='local_global' is now called 'lg_fedavg'"),
    ],
)
def test_a_name_of_an_earlier_version_is_refused_and_the_new_one_named(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, text)


def test_every_new_name_is_known():
    keys = known_keys(ExperimentConfig)
    assert set(OLD_KEYS.values()) <= set(keys) and not set(OLD_KEYS) & set(keys)
    assert set(OLD_VALUES["engine.backend"].values()) <= set(get_args(EngineConfig.model_fields["backend"].annotation))
    assert set(OLD_VALUES["algorithm.name"].values()) <= set(CATALOG)


NUMBERS = [
    "seed", "schedule.rounds", "schedule.clients_per_round", "schedule.min_clients", "schedule.max_update_norm",
    "schedule.server_optimizer.learning_rate", "evaluation.every", "engine.workers", "data.vocabulary_size",
    "opt_out.client_fraction", "split.num_clients", "split.share", "training.federated.epochs",
    "training.personal.learning_rate", "training.local.momentum", "algorithm.validate_every", "algorithm.max_weight",
    "algorithm.server_optimizer.learning_rate", "algorithm.server_optimizer.beta1",
]  # fmt: skip


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["true", "inf", "-inf", "nan"])
def test_neither_a_boolean_nor_infinity_is_a_number(tmp_path, key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        read(tmp_path, "", f"{key}={value}")


def test_a_whole_number_is_a_number(tmp_path):
    config = read(tmp_path, "", "training.local.learning_rate=1", "split.share=1", "opt_out.client_fraction=0")
    assert config.training.local.learning_rate == 1.0 and config.split.share == 1.0


@pytest.mark.parametrize("name", ["../../evil", "..", ".", "", "/x", "a//b", "a/../b", "a/", "a\\b", "a\nb", "~", " "])
def test_a_name_stays_below_runs(name):
    with pytest.raises(ConfigError, match="cannot name a folder below runs/"):
        parse_config({"name": name})


@pytest.mark.parametrize("name", ["digits", "digits/fedavg-seed0", "FedMix_K=2", "my run", "v1.5", "größe"])
def test_a_name_may_have_parts(name):
    assert parse_config({"name": name}).name == name


class TestPaths:
    def test_in_a_file_are_relative_to_the_file(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "configs").mkdir()
        text = '[data]\nname = "npz"\nfolder = "../clients"\n[opt_out]\nmasks = "masks.npz"'
        (tmp_path / "configs/run.toml").write_text(text)
        config = read_config(Path("configs/run.toml"))
        assert config.data.folder.resolve() == tmp_path / "clients"
        assert config.opt_out.masks == tmp_path / "configs/masks.npz"

    def test_on_the_command_line_are_relative_to_the_caller(self, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        assert read(tmp_path, "", "data.folder=sets", "opt_out.masks=m.npz").data.folder == tmp_path / "here/sets"

    @pytest.mark.parametrize("in_file", [True, False])
    def test_know_the_home_folder(self, tmp_path, monkeypatch, in_file):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        text, changes = ('[data]\nfolder = "~/sets"', ()) if in_file else ("", ("data.folder=~/sets",))
        assert read(tmp_path, text, *changes).data.folder == tmp_path / "home/sets"
        with pytest.raises(ConfigError, match="Write it without '~'"):
            read(tmp_path, "", "data.folder=~nobody-here/sets")

    def test_mean_the_same_in_the_config_that_a_run_records(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = read(tmp_path, "", "data.folder=sets")
        (tmp_path / "runs").mkdir()
        recorded = tmp_path / "runs/config.toml"
        recorded.write_text(f"[data]\nfolder = {str(config.model_dump(mode='json')['data']['folder'])!r}")
        assert read_config(recorded).data.folder == config.data.folder


def test_facts_that_a_run_recorded_are_not_read_and_nowhere_else_allowed():
    recorded = {"seed": 3, "recorded": {"split_digest": "ab12", "versions": {"torch": "2.13"}}}
    assert parse_config(recorded) == parse_config({"seed": 3})
    for key, value in (("split_digest", "ab12"), ("versions", {"torch": "2.13"}), ("recorded", 5)):
        with pytest.raises(ConfigError, match=f"'{key}' is not known"):
            parse_config({key: value})


def test_a_split_of_one_file_per_client_is_refused_and_not_recorded():
    own = {"data": {"name": "npz", "folder": "clients"}}
    with pytest.raises(ConfigError, match=r"nothing to split. Remove the section \[split\]"):
        parse_config({**own, "split": {"num_clients": 3}})
    config = parse_config(own)
    assert "split" not in config.model_dump(mode="json")
    assert parse_config(config.model_dump(mode="json")) == config


def test_scores_on_the_way_need_clients_that_are_asked():
    with pytest.raises(ConfigError, match=r"evaluation.every=5 .*clients_asked is 'none'"):
        parse_config({"evaluation": {"every": 5, "clients_asked": "none"}})
    assert parse_config({"evaluation": {"clients_asked": "none"}}).evaluation.clients_asked == "none"


class TestOneServerOptimizerForAll:
    SCHEDULE: ClassVar = {"schedule": {"server_optimizer": {"name": "adam", "learning_rate": 0.01}}}

    def test_reaches_every_algorithm_that_has_one_and_sets_none(self):
        own = {"name": "fedmix", "label": "own", "server_optimizer": {"name": "yogi"}}
        config = parse_config({**self.SCHEDULE, "compare": ["fedavg", "fedmix", "local_only", own]})
        adam = ServerOptimizer("adam", 0.01)
        fedavg, fedmix, local, other = (choice.options() for choice in config.choices())
        assert config.algorithm.options().server_optimizer == fedavg.server_optimizer == adam
        assert fedmix.server_optimizer == adam and other.server_optimizer == ServerOptimizer("yogi")
        assert not hasattr(local, "server_optimizer")

    def test_also_where_the_compared_algorithms_are_the_default(self):
        choices = parse_config(self.SCHEDULE).choices()
        assert [choice.name for choice in choices] == ["fedavg", "local_only", "fine_tuned", "specialist_mixture"]
        assert choices[2].options().server_optimizer == ServerOptimizer("adam", 0.01)

    def test_is_recorded_with_every_default_of_the_algorithm(self):
        config = parse_config({"algorithm": {"name": "fedmix"}})
        recorded = config.model_dump(mode="json")
        assert {"name", "num_experts", "server_optimizer"} <= set(recorded["algorithm"])
        assert config.algorithm.options() == FedMixConfig()
        assert parse_config(recorded) == config


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
        ('[[opt_out.rules]]\nfield = "label"\nvalues = [1.5]', "opt_out.rules.0.values.0=1.5: "),
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


@pytest.mark.parametrize("schedule", [{}, {"server_optimizer": {"name": "adam"}}])
def test_a_compared_name_has_the_settings_of_the_section_that_names_it(schedule):
    section = {"name": "fedmix", "num_experts": 7, "label": "mine"}
    config = parse_config({"algorithm": section, "compare": ["fedavg", "fedmix"], "schedule": schedule})
    _, own = config.choices()
    assert (own.folder, own.options().num_experts) == ("fedmix", 7)
    assert not schedule or own.options().server_optimizer.name == "adam"
    explicit = {"name": "fedmix", "num_experts": 2}
    assert parse_config({"algorithm": section, "compare": [explicit]}).choices()[0].options().num_experts == 2


def test_one_algorithm_is_compared_with_itself_under_labels():
    twice = [{"name": "fedmix", "label": f"FedMix K={count}", "num_experts": count} for count in (2, 4)]
    choices = parse_config({"compare": twice}).choices()
    assert [choice.folder for choice in choices] == ["FedMix_K=2", "FedMix_K=4"]
    assert [choice.options().num_experts for choice in choices] == [2, 4]
    with pytest.raises(ConfigError, match=r"compare has 'fedmix' more than once.*label"):
        parse_config({"compare": ["fedmix", {"name": "fedmix", "num_experts": 2}]})


def test_known_keys_reach_into_every_section():
    keys = known_keys(ExperimentConfig)
    for key in (
        "seed",
        "split.alpha",
        "split.share",
        "training.local.patience",
        "algorithm.max_weight",
        "opt_out.rules",
    ):
        assert key in keys
