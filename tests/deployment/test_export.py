import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from math import nan

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedmoe
from builders import tiny_federation
from deployment.wards import CONFIG, trained, ward_rows
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.deployment import export as exporting
from fedmoe.deployment.export import export
from fedmoe.deployment.model_card import model_card
from fedmoe.deployment.programs import Untraceable
from fedmoe.testing.federation import CLASSES, FEATURES, make_common_expert, make_expert, make_gate, tiny_config

WITHOUT_FEDMOE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fedmoe":
            raise ImportError("fedmoe is not installed here")
sys.meta_path.insert(0, Blocked())
import torch
from pathlib import Path
from safetensors.torch import load_file
for folder in sys.argv[1:]:
    wanted = load_file(Path(folder) / "wanted.safetensors")
    program = torch.export.load(Path(folder) / "model.pt2").module()
    for rows in (1, 2, len(wanted["x"])):
        difference = (program(wanted["x"][:rows]) - wanted["probabilities"][:rows]).abs().max()
        assert difference < 1e-5, f"{folder}: off by {difference}"
assert not [name for name in sys.modules if name.startswith("fedmoe")]
print("the same without fedmoe")
"""


def tiny_run(directory, algorithm, backend="native", **modules):
    config = tiny_config(algorithm, rounds=2, backend=backend)
    return fedmoe.run(config, federation=tiny_federation(), directory=directory, **modules)


def onnx_probabilities(folder, x):
    return onnxruntime.InferenceSession(str(folder / "model.onnx")).run(None, {"x": x.numpy()})[0]


@pytest.fixture(scope="module")
def north(wards, tmp_path_factory):
    return export(wards, "north", tmp_path_factory.mktemp("north"))


@pytest.fixture(scope="module")
def coast(wards, tmp_path_factory):
    """Of a client that opted out, from what is on disk."""
    return export(fedmoe.load(wards.directory), "coast", tmp_path_factory.mktemp("coast"))


@pytest.mark.slow
def test_programs_give_the_runs_probabilities_where_fedmoe_is_not_installed(wards, tmp_path):
    table = wards.federation.table.encode(ward_rows(9, seed=3))
    numbers = torch.randn(9, FEATURES)
    cases = {"wards": (wards, "north", table)}
    for name in ("fedmix", "knn_per"):  # what branches and what votes; on native kernels
        cases[name] = (tiny_run(tmp_path / "runs" / name, name), 3, numbers)
    for name, (result, client, x) in cases.items():
        made = export(result, client, tmp_path / name, x)
        probabilities = result.personal_model(client)(x)
        assert not made.left_out and made.checked_on == "9 rows that were given"
        np.testing.assert_allclose(onnx_probabilities(tmp_path / name, x), probabilities.numpy(), atol=1e-5)
        save_file({"x": x, "probabilities": probabilities}, tmp_path / name / "wanted.safetensors")
    command = [sys.executable, "-c", WITHOUT_FEDMOE, *(str(tmp_path / name) for name in cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "the same without fedmoe\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_every_algorithm_is_exported_to_everything_from_a_native_run(name, tmp_path):
    result = tiny_run(tmp_path / "run", name, expert=make_expert, gate=make_gate, common_expert=make_common_expert())
    for client in (0, 5, 6):
        assert not export(result, client, tmp_path / str(client)).left_out


def test_what_is_in_the_files(wards, north, coast):
    assert north.checked_on == "4 of the client's own test rows" and coast.checked_on == "64 random rows"
    tensors, model = load_file(coast.folder / "model.safetensors"), wards.personal_model("coast").state_dict()
    assert tensors.keys() == model.keys() and all(torch.equal(tensors[name], model[name]) for name in model)
    facts = json.loads((coast.folder / "model.json").read_text())
    assert facts["input"]["shape"] == ["rows", 4] and facts["output"]["classes"] == ["ill", "well"]
    assert facts["table"]["input_names"] == ["age", "pressure", "smoker=no", "smoker=yes"]


def test_files_name_no_folder_of_the_machine_that_made_them(north):
    home = str(exporting.__file__).rsplit("/fedmoe/", 1)[0].encode()
    for path in north.folder.iterdir():
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += map(archive.read, archive.namelist())
        assert not any(home in content for content in contents)
        assert path.stat().st_mode & 0o077 == 0


class TestModelCard:
    def test_what_it_says(self, wards, north):
        card = (north.folder / "README.md").read_text()
        own = next(s for s in wards.scores if (s.client, s.model, s.data) == (0, "after", "own"))
        for words in (
            "2 rounds of Specialist mixture with 3 clients, of which 2 sent updates",
            "rows of a table, by its column 'ward'; 'outcome' from age, pressure, smoker",
            f"| after personalisation | own | {own.accuracy:.3f} | {own.loss:.3f} |",
            "This client took part",
            "- train: 2 messages",
            "| `specialist.1.weight` | 6×4 | float32 | own |",
            "8 of the tensors in this folder are the client's own",
            'torch.export.load("model.pt2")',
            f"Run id {wards.data['run_id']}",
        ):
            assert words in card, words

    def test_it_has_every_metric_and_every_answer(self, wards):
        score = next(s for s in wards.scores if (s.client, s.model, s.data) == (0, "after", "own"))
        named = {"metrics": {"macro_f1": 0.5, "auc": nan, "recall_0": 1.0}}
        told = [{**score.as_dict(), **named, "answer": answer} for answer in ("mixture", "general")]
        result = replace(wards, data={**wards.data, "scores": told})
        card = model_card(result, result.personal_model("north"), [], {}, "")
        assert "| model | data | accuracy | log loss | Macro-F1 | AUC |\n|---|---|---|---|---|---|" in card
        assert f"| after personalisation, mixture | own | {score.accuracy:.3f} | {score.loss:.3f} | 0.500 | – |" in card

    def test_a_client_that_opted_out(self, coast):
        card = (coast.folder / "README.md").read_text()
        assert "This client opted out: it received the model and sent nothing in training." in card
        assert "- train" not in card and "- scores after training: 1 message" in card

    def test_a_client_that_keeps_its_scores(self, tmp_path):
        result = trained(tmp_path / "run", evaluation={"clients_asked": "none"})
        card = model_card(result, result.personal_model("coast"), [], {}, "")
        assert "was not asked for its scores" in card and "Nothing left the client." in card


def test_a_regression(tmp_path):
    x = torch.randn(40, 3)
    clients = {"a": (x, x[:, :2] + 2), "b": (x, x[:, :2] - 2)}
    federation = fedmoe.federation_from_clients(clients, task="regression")
    config = {**CONFIG, "algorithm": {"name": "fine_tuned"}}
    result = fedmoe.run(config, federation=federation, directory=tmp_path / "run")
    made = export(fedmoe.load(tmp_path / "run"), "a", tmp_path / "out", x[:5])
    assert not made.left_out
    difference = np.abs(onnx_probabilities(tmp_path / "out", x[:5]) - result.personal_model("a")(x[:5]).numpy())
    assert difference.max() < 1e-5
    output = json.loads((tmp_path / "out" / "model.json").read_text())["output"]
    assert output == {"name": "numbers", "shape": ["rows", 2], "classes": []}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| model | data | loss | RMSE | MAE | R² |" in card and "the 2 numbers that are predicted" in card
    assert "numbers = model(x)" in card and "probabilities" not in card and "classes" not in card


def without_onnx(*_):
    raise Untraceable("there is none here")


class BranchesOnItsInput(nn.Linear):
    def forward(self, x):
        return super().forward(x) if bool((x > 0).all()) else super().forward(x) * 0.5


class TestWhatCannotBeExported:
    def test_a_module_that_branches_on_its_input_is_left_as_tensors(self, tmp_path):
        expert = BranchesOnItsInput(FEATURES, CLASSES)
        result = tiny_run(tmp_path / "run", "fedavg", "sequential", expert=expert, gate=make_gate)
        made = export(result, 0, tmp_path / "model")
        assert made.files == ["model.safetensors", "model.json", "README.md"]
        assert "branches on the values of its inputs" in made.left_out["model.pt2"]
        assert "model.onnx is not here: it cannot be" in (made.folder / "README.md").read_text()

    def test_without_onnx_the_rest_is_exported(self, wards, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        monkeypatch.setattr(exporting, "to_onnx", lambda _program, path, *_: path.write_bytes(b""))
        made = export(wards, "north", tmp_path)
        assert made.left_out == {"model.onnx": "onnxruntime is not installed: pip install 'fedmoe[export]'"}
        assert {path.name for path in tmp_path.iterdir()} == {*made.files} and "model.pt2" in made.files

    def test_a_program_that_is_off_is_not_left_there(self, wards, tmp_path, monkeypatch):
        (tmp_path / "model.pt2").write_bytes(b"of another model")
        monkeypatch.setattr(exporting, "CLOSE", -1.0)
        monkeypatch.setattr(exporting, "to_onnx", without_onnx)
        made = export(wards, "north", tmp_path)
        assert "its probabilities are off by" in made.left_out["model.pt2"]
        assert made.left_out["model.onnx"] == "there is none here"
        assert {path.name for path in tmp_path.iterdir()} == {*made.files}

    def test_a_folder_that_cannot_be_made(self, wards, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(fedmoe.RunError, match="cannot be made: a file is where a folder should be"):
            export(wards, "north", tmp_path / "file" / "model")


def test_on_the_command_line(wards, tmp_path, monkeypatch, capfd):
    from test_cli import invoke

    monkeypatch.setattr(exporting, "to_onnx", without_onnx)
    done = invoke(monkeypatch, capfd, "export", wards.directory, "--client", "south", "--to", tmp_path / "model")
    assert done.code == 0 and "agree with the run's own model on 64 random rows" in done.out
    assert "model.onnx is left out: there is none here." in done.out
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert written == {"README.md", "model.json", "model.pt2", "model.safetensors"}
