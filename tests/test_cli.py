"""The command line as a user meets it: results, resuming, and errors that say what to do (exit code 2)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedmoe import cli

SMALL = """
name = "small"
compare = ["fedavg", "fine_tuned"]
[split]
num_clients = 4
num_unseen = 1
train_size = 12
validation_size = 6
test_size = 20
global_test_size = 50
[model]
hidden = [8]
[training.local]
epochs = 3
[training.personal]
epochs = 3
[schedule]
rounds = 3
clients_per_round = 2
[engine]
workers = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


class Outcome:
    def __init__(self, code: int, out: str) -> None:
        self.code, self.out = code, re.sub(r"\s+", " ", out)


def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    monkeypatch.setattr(sys, "argv", ["fedmoe", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capfd.readouterr()
    return Outcome(int(stop.value.code or 0), captured.out + captured.err)


@pytest.fixture
def fedmoe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(monkeypatch, capfd, *arguments)


def test_a_run_prints_scores_and_writes_everything(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config)
    assert outcome.code == 0
    assert "Specialist mixture" in outcome.out
    written = {path.name for path in (tmp_path / "runs" / "small").iterdir()}
    assert {
        "config.toml",
        "split.safetensors",
        "metrics.jsonl",
        "manifest.json",
        "results.json",
        "report.html",
    } <= written


def test_a_new_client_is_scored_on_pooled_data_where_it_is_asked_for(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config, "--set", "evaluation.pooled=10")
    assert outcome.code == 0 and "pooled" in outcome.out
    scores = json.loads((tmp_path / "runs/small/results.json").read_bytes())["scores"]
    assert [(s["client"], s["model"], s["examples"]) for s in scores if s["data"] == "pooled"] == [
        (5, "after", 10),
        (5, "before", 10),
    ]
    page = (tmp_path / "runs/small/report.html").read_text()
    assert "New client, pooled data" in page and "4, and 1 unseen" in page


def test_running_again_shows_the_same_numbers(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("run", config)
    first = json.loads((tmp_path / "runs/small/results.json").read_bytes())
    assert fedmoe("run", config).code == 0
    again = json.loads((tmp_path / "runs/small/results.json").read_bytes())
    assert again["scores"] == first["scores"]


def test_a_finished_run_goes_on_with_more_rounds(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("run", config)
    rounds = json.loads((tmp_path / "runs/small/results.json").read_bytes())["rounds"]
    outcome = fedmoe("run", config, "--rounds", str(rounds + 2))
    assert outcome.code == 0 and f"resuming after round {rounds - 1} of {rounds + 2}" in outcome.out
    assert json.loads((tmp_path / "runs/small/results.json").read_bytes())["rounds"] == rounds + 2
    fewer = fedmoe("run", config)
    assert fewer.code == 2 and f"schedule.rounds is {rounds + 2} there and {rounds} here" in fewer.out


def test_a_finished_run_is_shown_and_its_own_config_is_taken_again(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("run", config)
    home = tmp_path / "runs/small"
    before = {path.name: path.read_bytes() for path in home.iterdir() if path.is_file() and path.name != ".lock"}
    outcome = fedmoe("run", home / "config.toml")
    assert outcome.code == 0 and "finished before, showing its results" in outcome.out
    assert "Specialist mixture" in outcome.out and "resuming" not in outcome.out
    assert {name: (home / name).read_bytes() for name in before} == before


def test_updates_that_are_all_rejected_are_said_in_every_table(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config, "--set", "algorithm.name=fedavg", "--set", "schedule.max_update_norm=1e-9")
    words = "3 of 3 rounds had no accepted update"
    assert outcome.code == 0 and words in outcome.out
    for name in ("table.md", "report.html"):
        assert words in (tmp_path / "runs/small" / name).read_text()


def test_nobody_need_be_asked_for_scores(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config, "--set", "evaluation.clients_asked=none")
    assert outcome.code == 0 and "No client was asked for scores" in outcome.out
    assert json.loads((tmp_path / "runs/small/results.json").read_bytes())["scores"] == []


def test_compare_trains_shared_rounds_once_and_gives_the_numbers_of_separate_runs(  # type: ignore[no-untyped-def]
    fedmoe, config: Path, tmp_path: Path
) -> None:
    outcome = fedmoe("compare", config, "--seeds", "0,1")
    assert outcome.code == 0 and "± " in outcome.out
    shared = json.loads((tmp_path / "runs/small-comparison/fine_tuned-seed1/results.json").read_bytes())
    fedmoe("run", config, "--set", "algorithm.name=fine_tuned", "--set", "seed=1", "--dir", tmp_path / "alone")
    alone = json.loads((tmp_path / "alone/results.json").read_bytes())
    assert shared["scores"] == alone["scores"]
    assert shared["traffic"] == alone["traffic"]


def test_compare_names_a_run_that_fails_and_reports_the_others(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    loud = "{name='fedavg',label='Loud',server_optimizer={name='sgd',learning_rate=1e38}}"
    changes = ["--set", f"compare=[{loud},'fedavg']", "--set", "schedule.max_abandoned_rounds=1"]
    outcome = fedmoe("compare", config, *changes)
    assert outcome.code == 2 and "Loud-seed0: the last 1 rounds were abandoned" in outcome.out
    page = (tmp_path / "runs/small-comparison/report.html").read_text(encoding="utf-8")
    assert "Loud-seed0: the last 1 rounds were abandoned" in page and "FedAvg" in page
    nothing = fedmoe("compare", config, *changes, "--set", f"compare=[{loud}]", "--dir", "alone")
    assert nothing.code == 2 and "no run is left to report" in nothing.out


def test_data_list_names_what_is_missing(fedmoe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("data", "list", "--folder", tmp_path)
    assert outcome.code == 0
    assert "digits" in outcome.out and "cifar10" in outcome.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("schedule.round=3", "'schedule.round' is not known. Did you mean 'schedule.rounds'"),
        ("algorithm.validate_evry=3", "algorithm.validate_evry is not a setting of specialist_mixture"),
        ("algorithm.name=fedavgg", "Did you mean 'fedavg'"),
        ("training.federated.learning_rte=1", "'training.federated.learning_rate'"),
        ("training.federated.learning_rate=-1", "learning_rate=-1"),
        ("split.num_clients=5000", "split.num_clients=5000"),
        ("split.share=0.1", "split.share=0.1"),
        ("schedule.clients_per_round=9", "only 4 clients opted in"),
        ("opt_out.clients=[0,1,2,3]", "opt_out.clients"),
        ("opt_out.rules=[{field='colour',values=[1]}]", "label"),
        ("data.name=mnst", "mnist"),
        ("model={name='small_cnn'}", "model.name='mlp'"),
        ("model.name=small_cnn", "'model.hidden' is not known beside model.name='small_cnn'"),
        ("schedule=3", "schedule"),
    ],
)
def test_a_bad_setting_is_explained(fedmoe, config: Path, change: str, words: str) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config, "--set", change)
    assert outcome.code == 2
    assert words in outcome.out
    assert "Traceback" not in outcome.out


def test_alpha_must_be_positive(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    config.write_text(SMALL.replace("[split]", '[split]\nkind = "dirichlet"\nalpha = 0.0'))
    outcome = fedmoe("run", config)
    assert outcome.code == 2 and "split.alpha=0" in outcome.out


@pytest.mark.parametrize("text", ["name = ", "\x00", "[split\n"])
def test_a_file_that_is_no_toml_is_explained(fedmoe, config: Path, text: str) -> None:  # type: ignore[no-untyped-def]
    config.write_text(text)
    outcome = fedmoe("run", config)
    assert outcome.code == 2 and "is not valid TOML" in outcome.out


def test_a_missing_data_set_names_the_folder_and_the_variable(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config, "--set", "data.name=cifar10", "--set", f"data.folder='{tmp_path}'")
    assert outcome.code == 2
    assert "data_batch_1.bin" in outcome.out and "FEDMOE_DATA" in outcome.out


def test_a_directory_of_another_run_is_refused_and_left_alone(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("run", config)
    kept = ("results.json", "split.safetensors", "config.toml", "metrics.jsonl")
    before = [(tmp_path / "runs/small" / name).read_bytes() for name in kept]
    outcome = fedmoe("run", config, "--set", "seed=7")
    assert outcome.code == 2 and "seed is 0 there and 7 here" in outcome.out
    assert [(tmp_path / "runs/small" / name).read_bytes() for name in kept] == before


def test_a_cut_checkpoint_is_passed_over_and_said(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("run", config)
    first = json.loads((tmp_path / "runs/small/results.json").read_bytes())
    newest = sorted((tmp_path / "runs/small/checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    outcome = fedmoe("run", config)
    assert outcome.code == 0
    assert f"{newest.name} is damaged or cut short" in outcome.out
    assert json.loads((tmp_path / "runs/small/results.json").read_bytes())["scores"] == first["scores"]


def test_a_full_disk_keeps_the_last_checkpoint(  # type: ignore[no-untyped-def]
    fedmoe, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedmoe("run", config)
    whole = json.loads((tmp_path / "runs/small/results.json").read_bytes())
    real, calls = os.fsync, []

    def full_after_a_while(descriptor: int) -> None:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if "round-00000003" in name:
            calls.append(name)
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after_a_while)
        outcome = fedmoe("run", config, "--dir", tmp_path / "full")
    assert calls and outcome.code == 2
    assert "the disk is full" in outcome.out
    assert [p.name for p in sorted((tmp_path / "full/checkpoints").iterdir())] == [
        "round-00000001.safetensors",
        "round-00000002.safetensors",
    ]
    assert "resuming after round 2" in fedmoe("run", config, "--dir", tmp_path / "full").out
    assert json.loads((tmp_path / "full/results.json").read_bytes())["scores"] == whole["scores"]


def checkpoints(home: Path) -> set[str]:
    return {path.name for path in home.glob("checkpoints/*.safetensors")}


def test_a_signal_leaves_a_run_that_resumes_to_the_same_numbers(config: Path, tmp_path: Path) -> None:
    many = [
        sys.executable,
        "-c",
        "from fedmoe.cli import main; main()",
        "run",
        str(config),
        "--set",
        "schedule.rounds=200",
    ]
    home = tmp_path / "stopped"
    reached: set[str] = set()
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([*many, "--workers", "2", "--dir", str(home)], stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while reached >= checkpoints(home) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130, out
        assert "Run the same command again to resume" in out
        reached = checkpoints(home)
    for directory in (home, tmp_path / "whole"):
        subprocess.run([*many, "--dir", str(directory)], check=True, timeout=120, stdout=subprocess.DEVNULL)
    resumed, whole = (json.loads((d / "results.json").read_bytes()) for d in (home, tmp_path / "whole"))
    assert resumed["scores"] == whole["scores"]
    assert json.loads((home / "manifest.json").read_bytes()) == json.loads(
        (tmp_path / "whole/manifest.json").read_bytes()
    )


def test_record_masks_from_a_file_opt_records_out(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    np.savez(tmp_path / "masks.npz", **{"0": np.zeros(12, dtype=bool)})
    outcome = fedmoe("run", config, "--set", f"opt_out.masks='{tmp_path / 'masks.npz'}'")
    assert outcome.code == 0
    manifest = json.loads((tmp_path / "runs/small/manifest.json").read_bytes())
    assert manifest["opted_out_clients"] == [0] and "0" not in manifest["messages_of_client"]


def test_an_audit_shows_how_near_the_server_comes_to_the_labels(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("run", config)
    outcome = fedmoe("audit", "labels", "runs/small", "--clients", "3")
    assert outcome.code == 0
    assert "3 clients' labels" in outcome.out and "a uniform guess" in outcome.out and "normalised" in outcome.out
    assert (tmp_path / "runs/small/audit_labels.json").exists()
    missing = fedmoe("audit", "labels", "runs/none")
    assert missing.code == 2 and "runs/none holds no run" in missing.out


def test_an_audit_of_a_folder_of_runs_names_them(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    assert fedmoe("compare", config).code == 0
    outcome = fedmoe("audit", "labels", "runs/small-comparison")
    assert outcome.code == 2
    assert "holds 2: runs/small-comparison/fedavg-seed0, runs/small-comparison/fine_tuned-seed0." in outcome.out


def test_run_and_compare_of_one_config_do_not_share_a_folder(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert [fedmoe(command, config).code for command in ("run", "compare", "run")] == [0, 0, 0]
    assert (tmp_path / "runs/small-comparison/report.html").exists()
    stored = json.loads((tmp_path / "runs/small-comparison/fedavg-seed0/results.json").read_bytes())
    assert stored["name"] == "small-comparison/fedavg-seed0"  # where it is, below runs/


@pytest.mark.parametrize(
    ("seeds", "words"),
    [("0,0", "seed 0 is there twice"), ("-1", "seed -1 is negative"), ("0,x", "is no list of whole numbers")],
)
def test_seeds_are_different_whole_numbers(fedmoe, config: Path, seeds: str, words: str) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("compare", config, f"--seeds={seeds}")
    assert outcome.code == 2 and words in outcome.out


def test_a_tilde_is_the_home_folder(fedmoe, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    config.rename(home / "mine.toml")
    assert fedmoe("run", "~/mine.toml", "--dir", "~/run").code == 0
    assert fedmoe("report", "~/run", "--dir", "~/page").code == 0
    assert (home / "page/report.html").exists() and not (tmp_path / "~").exists()
    assert str(home / "data") in fedmoe("data", "list", "--folder", "~/data").out.replace(" ", "")
    missing = fedmoe("run", "~/mine.toml", "--set", "data.name=mnist", "--set", "data.folder=~/data")
    assert missing.code == 2 and str(home / "data/mnist") in missing.out


def test_a_name_that_leads_out_of_runs_is_refused(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("run", config, "--set", "name=../../evil")
    assert outcome.code == 2 and "cannot name a folder below runs/" in outcome.out
    assert not (tmp_path / "runs").exists() and not (tmp_path.parent / "evil").exists()


def test_explain_names_the_backend_the_reason_and_the_time(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    explained = fedmoe("explain", config)
    assert explained.code == 0
    for words in (
        "native: the native kernels know every layer",
        "dense + relu -> 8",
        "dense -> 10",
        "3 of about",
        "personalisation",
    ):
        assert words in explained.out
    chosen = fedmoe("explain", config, "--set", "engine.backend=sequential")
    assert "sequential: engine.backend='sequential' asks for it" in chosen.out
    alone = fedmoe("explain", config, "--set", "algorithm.name=local_only")
    assert "clients send nothing" in alone.out


def test_explain_says_that_residual_networks_are_native(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    config.write_text(SMALL.replace("hidden = [8]", 'name = "resnet"\ndepth = 8'))
    explained = fedmoe("explain", config)
    assert explained.code == 0, explained.out
    for words in ("native: the native kernels", "convolution 3x3 -> 16x", "group norm of 8 + shortcut + relu"):
        assert words in explained.out


def test_a_machine_without_a_compiler_trains_all_the_same_and_says_so_once(  # type: ignore[no-untyped-def]
    fedmoe, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = fedmoe("run", config, "--dir", tmp_path / "run")
    assert run.code == 0 and run.out.count("Training runs at PyTorch's speed") == 1
    assert 'backend = "batched"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_run_that_was_begun_natively_is_not_finished_otherwise(  # type: ignore[no-untyped-def]
    fedmoe, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fedmoe("run", config, "--dir", tmp_path / "run").code == 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    again = fedmoe("run", config, "--dir", tmp_path / "run")
    assert again.code == 2 and "a run must end the way it began" in again.out


def test_a_config_that_no_algorithm_takes_leaves_no_folder_behind(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    odd = ("--set", "algorithm.name=fedmix", "--set", "algorithm.condition=angle")
    refused = fedmoe("run", config, "--dir", tmp_path / "run", *odd)
    assert refused.code == 2 and "carry no such side information" in refused.out
    assert fedmoe("run", config, "--dir", tmp_path / "run").code == 0


def test_data_show_draws_the_split(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("data", "show", config, "--picture", tmp_path / "split.html")
    assert outcome.code == 0
    assert "4 unseen" in outcome.out and "overlap of clients" in outcome.out
    assert 'data-figure="split"' in (tmp_path / "split.html").read_text()


def test_data_get_of_a_set_without_an_address_says_where_to_put_it(fedmoe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = fedmoe("data", "get", "spam", "--folder", tmp_path)
    assert outcome.code == 2
    assert "task_b_u00_eval_lab.tf" in outcome.out and "ecml2006" in outcome.out


OWN_FOLDER = """
[data]
name = "npz"
folder = "{folder}"
[algorithm]
name = "fine_tuned"
[schedule]
rounds = 2
clients_per_round = "all"
[engine]
workers = 1
"""


def test_a_folder_of_one_file_per_client_is_a_federation(fedmoe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    (tmp_path / "clients").mkdir()
    for name in ("ann", "bob", "eve"):
        np.savez(tmp_path / "clients" / f"{name}.npz", x=rng.normal(size=(30, 4)), y=rng.integers(0, 3, 30))
    (tmp_path / "own.toml").write_text(OWN_FOLDER.format(folder=tmp_path / "clients"))
    outcome = fedmoe("run", tmp_path / "own.toml", "--set", "opt_out.clients=[1]")
    assert outcome.code == 0
    assert "Lowest on own data, Fine-tuned: " in outcome.out
    page = (tmp_path / "runs/run/report.html").read_text()
    assert "Who holds what" in page and all(f'"{name}"' in page for name in ("ann", "bob", "eve"))
    manifest = json.loads((tmp_path / "runs/run/manifest.json").read_bytes())
    assert manifest["opted_out_clients"] == [1] and set(manifest["messages_of_client"]) == {"0", "2"}


def test_the_classes_of_a_folder_can_be_declared(fedmoe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    (tmp_path / "clients").mkdir()
    for name, label in (("ann", 1), ("bob", 4)):
        np.savez(tmp_path / "clients" / f"{name}.npz", x=rng.normal(size=(30, 4)), y=np.full(30, label))
    (tmp_path / "own.toml").write_text(OWN_FOLDER.format(folder="clients"))
    out = ("--set", "opt_out.clients=[1]")
    refused = fedmoe("run", tmp_path / "own.toml", *out)
    assert refused.code == 2 and "Declare num_classes=5" in refused.out
    assert fedmoe("run", tmp_path / "own.toml", *out, "--set", "data.num_classes=5").code == 0
    elsewhere = fedmoe("run", tmp_path / "own.toml", "--set", "data.name=digits", "--set", "data.num_classes=5")
    assert elsewhere.code == 2 and "data.num_classes is for data.name='npz'" in elsewhere.out


def test_other_data_in_the_same_directory_are_another_run(fedmoe, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "clients").mkdir()
    (tmp_path / "own.toml").write_text(OWN_FOLDER.format(folder=tmp_path / "clients"))
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / "clients" / "ann.npz", x=rng.normal(size=(30, 4)), y=rng.integers(0, 3, 30))
        outcome = fedmoe("run", tmp_path / "own.toml")
    assert outcome.code == 2 and "split_digest" in outcome.out


def test_clients_that_are_made_by_id_train(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    few = ["--set", "evaluation.clients=5", "--set", "algorithm.name=fedavg", "--set", "schedule.rounds=2"]
    outcome = fedmoe("run", config, "--set", "data.name=generated", "--set", "split.num_clients=100000", *few)
    assert outcome.code == 0 and "FedAvg" in outcome.out


def test_a_regression_is_refused_where_the_algorithm_needs_classes(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    changes = ["data.name=synthetic_regression", "split={kind='natural',field='user'}", "algorithm.name=fedrod"]
    outcome = fedmoe("run", config, *(word for change in changes for word in ("--set", change)))
    assert outcome.code == 2 and "regression" in outcome.out


def test_a_regression_is_trained_and_told_by_its_errors(fedmoe, config: Path) -> None:  # type: ignore[no-untyped-def]
    changes = ["data.name=synthetic_regression", "split={kind='natural',field='user',train_size=50}"]
    few = ["algorithm.name=fedavg", "schedule={rounds=2,clients_per_round=2}"]
    outcome = fedmoe("run", config, *(word for change in [*changes, *few] for word in ("--set", change)))
    assert outcome.code == 0 and "RMSE" in outcome.out


def test_runs_that_were_made_one_by_one_share_a_report(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for seed in (0, 1):
        options = ("--set", f"seed={seed}", "--set", "evaluation.every=1", "--set", "algorithm.label=mix q(z|y)")
        assert fedmoe("run", config, *options, "--dir", f"own{seed}").code == 0
    outcome = fedmoe("report", "own0", "own1", "--dir", "both/page", "--title", "Two seeds")
    assert outcome.code == 0 and "±" in outcome.out
    assert {path.name for path in (tmp_path / "both/page").iterdir()} == {"report.html", "table.md"}
    assert r"| mix q(z\|y) |" in (tmp_path / "both/page/table.md").read_text()
    refused = fedmoe("report", "own0", "own0", "--dir", "both")
    assert refused.code == 2 and "own0 is left out: it is the same as own0" in refused.out
    missing = fedmoe("report", "own0", "nowhere", "--dir", "both", "--title", "What is left")
    assert missing.code == 2 and "nowhere holds no finished run" in missing.out
    page = (tmp_path / "both/report.html").read_text()
    assert "What is left" in page and "nowhere holds no finished run" in page
    assert "none for the report" in fedmoe("report", "own0", "own1").out
    assert "no run is left" in fedmoe("report", "nowhere").out


def test_a_report_of_a_folder_equals_the_one_at_its_end(fedmoe, config: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    fedmoe("compare", config, "--seeds", "0,1", "--algorithms", "local_only,fedmix", "--dir", "both")
    for folder in ("both/fedmix-seed1", "both"):
        page = tmp_path / folder / "report.html"
        at_the_end = page.read_bytes()
        page.unlink()
        assert fedmoe("report", folder).code == 0
        assert page.read_bytes() == at_the_end, folder
