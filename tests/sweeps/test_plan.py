from pathlib import Path

import pytest

from fedmoe.comparison import rounds_key
from fedmoe.errors import ConfigError
from fedmoe.sweeps.outcome import gather
from fedmoe.sweeps.plan import folder_of, is_finished, parse_grid, plan

CONFIG = """
name = "small"
compare = ["fedavg", "fine_tuned", "local_only"]
data = { name = "digits" }
split = { num_clients = 4, train_size = 12, validation_size = 6, test_size = 20, global_test_size = 50 }
model = { hidden = [4] }
training = { federated = { epochs = 1 }, local = { epochs = 2 }, personal = { epochs = 2 } }
schedule = { rounds = 3, clients_per_round = 2 }
engine = { workers = 1 }
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_every_combination_of_settings_algorithms_and_seeds_is_a_cell(config, tmp_path):
    cells = plan(config, {"split.share": [0.3, 0.6], "seed": []} | {"seed": [0]}, [0, 1], tmp_path / "out")
    assert len(cells) == 2 * 3 * 2
    assert {cell.config.split.share for cell in cells} == {0.3, 0.6}
    assert len({cell.directory for cell in cells}) == len(cells)
    assert cells[0].directory == tmp_path / "out/share=0.3+seed=0/fedavg-seed0"
    assert cells[0].point == (("split.share", 0.3), ("seed", 0))


def test_lists_and_tables_may_be_values():
    assert parse_grid(["model.channels=[6,36],[6,75]", "model={name='mlp',hidden=[4]}"]) == {
        "model.channels": ["[6,36]", "[6,75]"], "model": ["{name='mlp',hidden=[4]}"],
    }  # fmt: skip
    assert folder_of((("model", "{name='mlp'}"),)) == "model=_name_mlp_"


@pytest.mark.parametrize("text", ["split.share", "split.share=", "=3", "a=,"])
def test_a_grid_without_values_is_refused(text):
    with pytest.raises(ConfigError, match="names no values"):
        parse_grid([text])


def test_a_setting_twice_no_seeds_and_a_bad_value_are_refused_before_anything_runs(config, tmp_path):
    with pytest.raises(ConfigError, match="twice"):
        parse_grid(["a=1", "a=2"])
    with pytest.raises(ConfigError, match="no seeds"):
        plan(config, {}, [], tmp_path)
    with pytest.raises(ConfigError, match="shares"):
        plan(config, {"split.shares": [0.3]}, [0], tmp_path)


def test_points_that_are_the_same_runs_are_refused(config, tmp_path):
    with pytest.raises(ConfigError, match=r"alpha = 0\.3 and alpha = 0\.1 are the same runs"):
        plan(config, {"algorithm.alpha": [0.1, 0.3]}, [0], tmp_path, ["algorithm.name=apfl"])
    changes = ["algorithm.name=apfl", "compare=['apfl','local_only']"]
    cells = plan(config, {"algorithm.alpha": [0.1, 0.3]}, [0], tmp_path, changes)
    assert [cell.config.algorithm.options().alpha for cell in cells[::2]] == [0.1, 0.3]


def test_a_grid_over_lists_has_points_of_its_own(config, tmp_path):
    cells = plan(config, {"opt_out.clients": [[0], [1]]}, [0], tmp_path / "out", ["compare=['fedavg']"])
    assert [cell.config.opt_out.clients for cell in cells] == [(0,), (1,)]
    assert len(gather(cells)[1]) == 2, "none of them has been run"


def test_cells_share_rounds_where_only_what_follows_them_differs(config, tmp_path):
    grid = {"training.personal.learning_rate": [1e-3, 1e-4], "split.share": [0.3, 0.6]}
    cells = plan(config, grid, [0], tmp_path)
    keys = {cell.label: rounds_key(cell.config) for cell in cells}
    of_one_split = {key for label, key in keys.items() if "share=0.3" in label and "local_only" not in label}
    assert len(of_one_split) == 1 and None not in of_one_split
    assert keys["learning_rate=0.001+share=0.3/fedavg-seed0"] != keys["learning_rate=0.001+share=0.6/fedavg-seed0"]
    assert keys["learning_rate=0.001+share=0.3/local_only-seed0"] is None


def test_a_folder_that_holds_no_finished_run_of_this_config_is_not_finished(config, tmp_path):
    (cell, *_) = plan(config, {}, [0], tmp_path / "out")
    assert not is_finished(cell)
    cell.directory.mkdir(parents=True)
    (cell.directory / "config.toml").write_text("half")
    assert not is_finished(cell)
