import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedmoe
from builders import tiny_federation
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.errors import ConfigError, RunError
from fedmoe.models.images import mlp
from fedmoe.testing.federation import CLASSES, FEATURES, draw_examples, tiny_config

ASKED = draw_examples(5, "asked").x


def config(algorithm="specialist_mixture", **changes):
    return tiny_config(algorithm, rounds=2, **changes).model_dump(mode="json", exclude_none=True)


def run(directory, algorithm="specialist_mixture", federation=None, **modules):
    return fedmoe.run(config(algorithm), federation=federation or tiny_federation(), directory=directory, **modules)


def network():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, and what its clients' models predict."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    result = run(folder)
    return folder, {client: result.personal_model(client)(ASKED) for client in result.delivered}


@pytest.fixture
def folder(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


IN_A_FRESH_PROCESS = """
import sys, torch, fedmoe
from pathlib import Path
from safetensors.torch import load_file
for home in sorted(Path(sys.argv[1]).iterdir()):
    wanted = load_file(home / "wanted.safetensors")
    result = fedmoe.load(home / "run")
    for client in range(7):
        found = result.personal_model(client)(wanted["x"])
        assert torch.equal(found, wanted[str(client)]), f"{home.name}: client {client} predicts otherwise"
print("all the same")
"""


def test_in_a_fresh_process_without_data_every_algorithm_predicts_bit_for_bit_the_same(tmp_path, tmp_path_factory):
    weights = tmp_path_factory.mktemp("common") / "common.safetensors"
    save_file(mlp((FEATURES,), CLASSES, (64,)).state_dict(), weights)
    for name in CATALOG:
        home = tmp_path / name
        table = {**config(name), "common_expert": {"weights": str(weights)}}
        result = fedmoe.run(table, federation=tiny_federation(), directory=home / "run")
        predicted = {str(client): result.personal_model(client)(ASKED) for client in range(7)}
        save_file({"x": ASKED, **predicted}, home / "wanted.safetensors")
    weights.unlink()  # a run's folder has a copy
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "all the same\n", done.stderr


def test_a_loaded_run_has_its_results_and_changes_no_file(finished, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "private" not in path.name}
    result = fedmoe.load(folder)
    for client, wanted in finished[1].items():
        assert torch.equal(result.personal_model(client)(ASKED), wanted)
    assert result.data == json.loads((folder / "results.json").read_text()) and result.scores
    assert all(path.read_bytes() == content for path, content in before.items())


def test_names_and_classes_come_back(tmp_path):
    clients = {name: tuple(draw_examples(12, name)[:2]) for name in ("north", "south")}
    federation = fedmoe.federation_from_clients(clients, opted_out={"south": True})
    done = fedmoe.run(
        {**config(), "schedule": {"rounds": 1, "clients_per_round": "all"}},
        federation=federation,
        directory=tmp_path / "run",
    )
    loaded = fedmoe.load(str(tmp_path / "run"))
    assert torch.equal(loaded.personal_model("south")(ASKED), done.personal_model("south")(ASKED))
    assert loaded.federation.names == ["north", "south"] and loaded.federation.participants.tolist() == [0]
    assert loaded.personal_model("south").facts.class_names == ("0", "1", "2")


class TestModulesOfTheUsersOwn:
    def test_they_are_passed_again_and_must_be_the_same(self, tmp_path):
        done = run(tmp_path / "run", expert=network, gate=lambda: nn.Linear(FEATURES, 1))
        again = fedmoe.load(tmp_path / "run", expert=network, gate=nn.Linear(FEATURES, 1))
        assert torch.equal(again.personal_model(0)(ASKED), done.personal_model(0)(ASKED))

        def other():
            return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))

        with pytest.raises(RunError, match=r"this expert is not the one .* its structure differs .*load\(RUN, expert="):
            fedmoe.load(tmp_path / "run", expert=other, gate=nn.Linear(FEATURES, 1))
        with pytest.raises(RunError, match="this expert is not the one"):
            fedmoe.load(tmp_path / "run")
        with pytest.raises(RunError, match=r"this gate is not the one .*--gate package.module:factory"):
            fedmoe.load(tmp_path / "run", expert=network)

    def test_frozen_weights_must_be_the_same(self, tmp_path):
        backbone = nn.Linear(FEATURES, 6).requires_grad_(False)

        def frozen(layer):
            return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, CLASSES))

        done = run(tmp_path / "run", "fedavg", expert=frozen(backbone))
        again = fedmoe.load(tmp_path / "run", expert=frozen(backbone))
        assert torch.equal(again.personal_model(0)(ASKED), done.personal_model(0)(ASKED))
        with pytest.raises(RunError, match="frozen weights or buffers of this expert are not those"):
            fedmoe.load(tmp_path / "run", expert=frozen(nn.Linear(FEATURES, 6).requires_grad_(False)))

    def test_an_algorithm_is_passed_again(self, tmp_path):
        def mine(setup):
            return CATALOG["fedavg"].factory(CATALOG["fedavg"].config(), setup)

        without = {key: value for key, value in config().items() if key != "algorithm"}
        done = fedmoe.run(without, federation=tiny_federation(), algorithm=mine, directory=tmp_path / "run")
        again = fedmoe.load(tmp_path / "run", algorithm=mine)
        assert torch.equal(again.personal_model(3)(ASKED), done.personal_model(3)(ASKED))
        with pytest.raises(ConfigError, match="was made inside a function"):
            fedmoe.load(tmp_path / "run")


class TestWhatCannotBeLoaded:
    def test_a_folder_without_a_run(self, tmp_path):
        with pytest.raises(RunError, match=r"holds no run \(config.toml is missing\)"):
            fedmoe.load(tmp_path)

    def test_a_run_that_is_not_finished(self, folder):
        (folder / "finished.json").unlink()
        with pytest.raises(RunError, match=r"is not finished\. Run it to its end first"):
            fedmoe.load(folder)

    @pytest.mark.parametrize("name", ["results.json", "federation.json", "metrics.jsonl"])
    def test_a_run_whose_files_changed(self, folder, name):
        (folder / name).write_text((folder / name).read_text() + " ")
        with pytest.raises(RunError, match=f"{name} in .* changed after the run ended"):
            fedmoe.load(folder)

    def test_a_run_without_its_last_checkpoint(self, folder):
        sorted((folder / "checkpoints").iterdir())[-1].unlink()
        with pytest.raises(RunError, match=r"the last checkpoint .* is not there: 1 of 2 steps are"):
            fedmoe.load(folder)

    def test_a_client_whose_private_state_is_not_there(self, folder):
        (folder / "clients" / "private.sqlite").unlink()
        with pytest.raises(RunError, match="lacks the final state of client 0"):
            fedmoe.load(folder).personal_model(0)

    def test_a_client_that_there_is_not(self, folder):
        with pytest.raises(fedmoe.DataError, match="there is no client 7: they are numbered 0 to 6"):
            fedmoe.load(folder).personal_model(7)

    def test_records_are_not_there_to_be_asked_for(self, folder):
        with pytest.raises(RunError, match="the records of client 3 are not here"):
            fedmoe.load(folder).federation.load(3)


def test_a_finished_run_of_an_earlier_version_is_loaded_once_it_was_run_again(folder):
    Path(folder / "federation.json").unlink()
    with pytest.raises(RunError, match="changed after the run ended"):
        fedmoe.load(folder)
    run(folder)
    assert fedmoe.load(folder).personal_model(0)(ASKED).shape == (5, CLASSES)
