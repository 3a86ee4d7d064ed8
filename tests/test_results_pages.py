"""Every generated table of the results pages says what the stored runs say."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import fedmoe
from builders import make_expert, make_gate, tiny_config, tiny_federation
from fedmoe.aggregation.server_optimizer import ServerOptimizer
from fedmoe.algorithms.fedmix.states import FedMixConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # scripts that import each other by name
results_page, stored_runs = map(importlib.import_module, ("results_page", "stored_runs"))
PAGES = results_page.pages()
RUNS = sorted(results_page.RESULTS.glob("*/runs/*.json"))


def test_there_are_pages_with_generated_tables():
    assert PAGES and RUNS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_generated_table_equals_its_stored_runs(page):
    words = "change the runs, or run: python benchmarks/results_page.py write"
    assert page.read_text(encoding="utf-8") == results_page.rendered(page), words


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_a_stored_run_says_what_made_it(path):
    run = json.loads(path.read_text(encoding="utf-8"))
    for key in ("title", "seed", "commit", "backend", "config", "split_digest", "versions"):
        assert run[key] not in (None, ""), key
    names, *rows = run["scores"]
    assert rows and all(len(row) == len(names) for row in rows)
    assert not re.search(r'["\s=]/\w', path.read_text()), "a path of the machine that made it"


@pytest.mark.parametrize("path", RUNS[:1], ids=str)
def test_another_score_makes_another_table(path, tmp_path):
    """The comparison above can fail: one client's accuracy, changed by a point."""
    folder = tmp_path / path.parent.parent.name
    shutil.copytree(path.parent.parent, folder)
    page = folder / "README.md"
    before = results_page.rendered(page)
    copy = folder / "runs" / path.name
    run = json.loads(copy.read_text(encoding="utf-8"))
    names, *rows = run["scores"]
    for row in rows:
        row[names.index("accuracy")] -= 0.01
    copy.write_text(json.dumps(run), encoding="utf-8")
    assert results_page.rendered(page) != before


def test_a_command_is_kept_without_the_folder_of_the_machine():
    given = "fedmoe run a.toml --dir /x --set 'algorithm={name=\"fedavg\"}'"
    assert stored_runs.portable(given) == "fedmoe run a.toml --set 'algorithm={name=\"fedavg\"}'"
    assert stored_runs.portable("fedmoe run a.toml --dir=/x --set seed=1") == "fedmoe run a.toml --set seed=1"


def test_a_finished_run_is_stored_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(results_page, "RESULTS", tmp_path / "results")
    result = fedmoe.run(
        tiny_config("fine_tuned", rounds=1), federation=tiny_federation(), expert=make_expert, gate=make_gate,
        directory=tmp_path / "tiny-seed0",
    )  # fmt: skip
    assert stored_runs.store(tmp_path / "results/tiny/runs", [tmp_path / "tiny-seed0"], "abc1234", "fedmoe.run") == []
    (run,) = results_page.load(tmp_path / "results" / "tiny", "runs/*.json")
    assert (run["commit"], run["command"], run["title"]) == ("abc1234", "fedmoe.run", "Fine-tuned")
    assert run["scores"] == [
        {key: round(value, 5) if isinstance(value, float) else value for key, value in score.as_dict().items()}
        for score in result.scores
    ]
    page = tmp_path / "results" / "tiny" / "README.md"
    page.write_text("<!-- table: methods runs/*.json -->\n<!-- /table -->\n")
    assert "| Fine-tuned | 0 |" in results_page.rendered(page)


def test_a_sweep_is_stored_as_a_whole_and_its_points_keep_apart(tmp_path):
    for share in ("share=0.3", "share=0.6"):
        fedmoe.run(
            tiny_config("local_only"), federation=tiny_federation(), expert=make_expert, gate=make_gate,
            directory=tmp_path / "sweep" / share / "local_only-seed0",
        )  # fmt: skip
    unfinished = tmp_path / "sweep" / "share=0.9" / "local_only-seed0"
    unfinished.mkdir(parents=True)
    (unfinished / "config.toml").write_text("")
    (left_out,) = stored_runs.store(tmp_path / "stored", [tmp_path / "sweep"], "abc1234")
    assert str(unfinished) in left_out
    names = sorted(path.name for path in (tmp_path / "stored").iterdir())
    assert names == ["share=0.3+local_only-seed0.json", "share=0.6+local_only-seed0.json"]
    (twice,) = stored_runs.store(tmp_path / "other", [tmp_path / "sweep/share=0.3"] * 2, "abc1234")
    assert "stored already" in twice


def test_a_stored_config_names_files_without_their_folders():
    config = {"common_expert": {"weights": "/home/me/common-seed0.safetensors"}, "seed": 0, "model": {"name": "mlp"}}
    assert stored_runs.without_folders(config)["common_expert"] == {"weights": "common-seed0.safetensors"}


def test_groups_are_recovered_where_each_has_an_expert_of_its_own():
    groups, own_expert = [0, 0, 1, 1], [[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.3, 0.7]]
    crossed = [own_expert[0], own_expert[2], own_expert[1], own_expert[3]]
    by_expert, by_likeness = results_page.recovered(groups, [crossed, own_expert])
    assert by_expert[1] == by_likeness[1] == 1 and max(by_expert[0], by_likeness[0]) <= 0


def test_fedmix_has_the_server_optimizer_by_default_that_came_out_best():
    folder, pattern = results_page.RESULTS / "fedmix_defaults", "runs/*.json"
    header, *rows = results_page.KINDS["choice"](folder, pattern)
    ahead = {row[0]: float(row[header.index("ahead of FedAvg, mean")]) for row in rows if row[0].startswith("FedMix")}
    best = max(ahead, key=ahead.get)
    chosen = {run["title"]: run["config"]["algorithm"] for run in results_page.load(folder, pattern)}[best]
    assert FedMixConfig().server_optimizer == ServerOptimizer(**chosen["server_optimizer"])


def stored(folder, title, seed, scores, headline="", chosen=None, **more):
    """`scores`: (data, answer) -> accuracy; the loss is its complement."""
    names = ["client", "unseen", "model", "data", "accuracy", "loss", "examples", "metrics", "answer", "chosen"]
    rows = [
        [0, False, "after", data, share, 1 - share, 10, {}, answer, answer == chosen or None]
        for (data, answer), share in scores.items()
    ]
    run = {
        "title": title, "seed": seed, "algorithm": "fedavg", "scores": [names, *rows],
        "answers": {"headline": headline}, "traffic": {"bytes_up": 1e9, "bytes_down": 1e9}, "config": {}, **more,
    }  # fmt: skip
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "runs" / f"{title}-seed{seed}.json").write_text(json.dumps(run))


def test_methods_are_compared_by_the_seeds_that_both_have_and_told_answers_stand_apart(tmp_path):
    for seed, (own, other) in enumerate([(0.5, 0.6), (0.6, 0.8)]):
        stored(tmp_path, "Base", seed, {("own", ""): own, ("own", "own prior"): 0.9})
        stored(tmp_path, "Other", seed, {("own", "estimated prior"): other, ("own", ""): 0.1}, "estimated prior")
    stored(tmp_path, "Other", 2, {("own", "estimated prior"): 0.0, ("own", ""): 0.0}, "estimated prior")
    header, *rows = results_page.KINDS["less"](tmp_path, "runs/*.json", "Base")
    assert header == ["less Base", "own, accuracy", "own, loss"]
    assert [row[0] for row in rows] == ["Other", "Other, as it is"]
    assert rows[0][1] == "+15.0 ± 63.5" and rows[0][2].startswith("-0.150")  # t(1) = 12.7, differences 0.1 and 0.2
    methods = {row[0]: row[2] for row in results_page.KINDS["methods"](tmp_path, "runs/*.json")}
    assert methods.keys() == {"method", "Base", "Other"} and methods["Base"].startswith("55.0")
    answers = {row[0]: row[2] for row in results_page.KINDS["answers"](tmp_path, "runs/*.json")}
    assert answers.keys() == {"method", "Base, own prior", "Other, as it is"}
    assert answers["Base, own prior"] == "90.0 ± 0.0"


def label_skew(share, server_rate=None):
    server = server_rate and {"name": "adam", "learning_rate": server_rate}
    return {
        "data": {"name": "digits"},
        "split": {"kind": "majority", "share": share},
        "training": {"federated": {"optimizer": "sgd", "learning_rate": 0.05}},
        "algorithm": {"server_optimizer": server},
    }


def test_prior_mixture_is_set_beside_the_best_rival_with_the_same_optimizers(tmp_path):
    ours, config = {"headline": "estimated prior", "algorithm": "prior_mixture"}, {"config": label_skew(0.6)}
    stored(tmp_path, "Ours", 0, {("own", "estimated prior"): 0.8, ("global", "estimated prior"): 0.5}, **ours, **config)
    stored(tmp_path, "FedAvg", 0, {("own", ""): 0.6, ("own", "own prior"): 0.9, ("global", ""): 0.4}, **config)
    stored(tmp_path, "Ditto", 0, {("own", ""): 0.7, ("global", ""): 0.3}, algorithm="ditto", **config)
    better = {"algorithm": "ditto", "config": label_skew(0.6, 0.01)}  # alone with its server optimizer
    stored(tmp_path, "Ditto, server Adam", 0, {("own", ""): 0.99, ("global", ""): 0.99}, **better)
    _, *rows = results_page.KINDS["expected"](tmp_path, "runs/*.json")
    assert rows == [
        ["digits, p = 0.6", "sgd 0.05, server averages", "0", "80.0", "Ditto", "70.0", "+10.0", "50.0", "40.0", "+10.0"]
    ]
    stored(tmp_path, "Ours", 1, {("own", "estimated prior"): 0.8, ("global", "estimated prior"): 0.5}, **ours, **config)
    stored(tmp_path, "FedAvg", 1, {("own", ""): 0.6, ("global", ""): 0.4}, **config)
    _, row = results_page.KINDS["expected"](tmp_path, "runs/*.json")
    assert row[2:5] == ["0, 1", "80.0 ± 0.0", "FedAvg"]  # Ditto lacks a seed


def test_the_table_of_candidates_counts_choices_and_what_they_cost(tmp_path):
    answers = {"headline": "estimated prior", "candidates": ["shared", "local"]}
    for seed, (chosen, local) in enumerate([("shared", 0.9), ("local", 0.7)]):
        stored(
            tmp_path, "Ours", seed, {("own", "shared"): 0.8, ("own", "local"): local}, chosen=chosen,
            algorithm="prior_mixture", answers=answers, config=label_skew(1.0),
        )  # fmt: skip
    header, row = results_page.KINDS["candidates"](tmp_path, "runs/*.json")
    assert header[2:] == ["shared", "local", "mean regret", "better off alone"]
    assert row == ["digits, p = 1.0", "sgd 0.05, server averages", "80.0 (1)", "80.0 (1)", "10.0", "1 of 2"]


def test_a_line_beside_a_paper_says_the_fewest_and_the_most_seeds(tmp_path):
    for seed in (0, 1):
        stored(tmp_path, "FedAvg", seed, {("own", ""): 0.4}, config=label_skew(0.6))
    stored(tmp_path, "Fine-tuned", 0, {("own", ""): 0.6}, config=label_skew(0.6))
    stored(tmp_path, "FedAvg", 7, {("global", ""): 0.3}, config=label_skew(1.0))
    header, *rows = results_page.KINDS["beside"](tmp_path, "runs/*.json", "000/table1-cifar10")
    assert header == ["scored on", "split.share", "FedAvg", "Fine-tuned", "seeds"]
    assert rows == [  # no line where nothing was scored
        ["own data", "0.6", "40.0 ± 0.0 (30.13)", "60.0 (50.97)", "1 to 2"],
        ["global test", "1.0", "30.0 (15.08)", "– (14.55)", "1"],
    ]
