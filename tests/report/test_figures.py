"""What a figure shows, as the data that the page draws."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.report import figures
from fedmoe.report.methods import client_scores, group, thin
from fedmoe.report.runs import StoredRun


def point(number, own, pooled=None):
    sent = {"bytes_up": 10**9 * number, "bytes_down": 2 * 10**9 * number}
    return {"round": number, **sent, "own": own, "global": own, "unseen": None, "pooled": pooled}


def with_curves(make_results):
    first, second = make_results(("fedavg",), seeds=2)
    return [
        {**first, "curve": [point(10, 0.4, 0.3), point(20, 0.6, 0.5)]},
        {**second, "curve": [point(10, 0.6, 0.5), point(15, 0.9, 0.9), point(20, 0.8, 0.7)]},
    ]


@pytest.mark.parametrize(("seeds", "half"), [(1, False), (3, True)])
def test_the_trade_off_has_a_point_per_method_and_an_interval_from_two_seeds_on(make_results, seeds, half):
    points = figures.trade_off(make_results(seeds=seeds)).data["points"]
    assert [p["name"] for p in points] == [
        "FedAvg",
        "Local",
        "Fine-tuned",
        "Specialist mixture",
        "Local-global mixture",
    ]
    assert all((p["x_half"] > 0) == (p["y_half"] > 0) == half for p in points)


@pytest.mark.parametrize(("name", "own"), [("fedavg", 0.25), ("fine_tuned", 0.75)])
def test_the_headline_score_is_after_personalisation_if_there_is_any(make_results, name, own):
    (result,) = make_results((name,))
    for score in result["scores"]:
        score["accuracy"] = 0.75 if score["model"] == "after" else 0.25
    figure = figures.trade_off([result])
    assert figure.data["points"][0]["y"] == own and f"own {own:.1%}" in figure.alt
    assert {scores.own for scores in client_scores(result).values()} == {own}


def test_a_curve_is_the_mean_over_seeds_where_all_of_them_were_evaluated(make_results):
    figure = figures.learning_curves(group(with_curves(make_results)))
    lines = {view["label"]: view["series"][0]["points"] for view in figure.data["views"]}
    assert lines["on clients' own test data, over rounds"] == [[10, 0.5], [20, 0.7]]
    assert lines["on the pooled data, for a new client, over bytes"] == [[30.0, 0.4], [60.0, 0.6]]
    assert not any("unseen" in label for label in lines)
    assert "FedAvg: from 50.0% to 70.0%" in figure.alt


def test_methods_with_the_same_rounds_share_a_line(make_results):
    results = make_results()
    (shared,) = figures.training_loss(results).data["views"][0]["series"]
    assert shared["name"] == "FedAvg, Fine-tuned, Specialist mixture, Local-global mixture"
    results[0]["history"][3]["reports"]["training_loss"] += 1
    assert len(figures.training_loss(results).data["views"][0]["series"]) == 2


def test_a_round_without_a_loss_is_skipped_and_long_histories_are_thinned(make_results):
    (result,) = make_results(("fedavg",), rounds=3)
    result["history"][1]["reports"] = {}
    assert [x for x, _ in figures.training_loss([result]).data["views"][0]["series"][0]["points"]] == [1, 3]
    long = figures.training_loss(make_results(("fedavg",), rounds=5000))
    assert len(long.data["views"][0]["series"][0]["points"]) == 400


@settings(deadline=None)
@given(length=st.integers(1, 2000), most=st.integers(2, 400))
def test_thinning_keeps_order_and_both_ends(length, most):
    kept = thin(range(length), most)
    assert len(kept) == min(length, most) and kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, length - 1)


@pytest.mark.parametrize(
    "figure", [figures.trade_off, lambda results: figures.learning_curves(group(results)), figures.training_loss]
)
def test_no_scores_and_no_rounds_no_figure(figure, make_results):
    assert figure([]) is None
    assert figure([make_results(("fedavg",))[0] | {"scores": [], "history": []}]) is None


def test_the_split_names_clients_and_classes(make_results):
    (result,) = make_results(("fedavg",), clients=3, classes=4)
    figure = figures.split_map(result | {"client_names": {"1": "coast"}})
    assert figure.data["rows"] == ["0", "coast", "2"] and figure.data["columns"] == ["0", "1", "2", "3"]
    assert figure.data["frames"][0]["values"] == result["class_counts"]
    assert figures.split_map(result | {"class_counts": []}) is None


def test_what_left_the_clients_is_shown_by_tensor_largest_first(make_results):
    (result,) = make_results(("fedavg",))
    tensors = {f"layer{n}": {"bytes": 100 * n} for n in range(1, 20)}
    run = StoredRun(result, {"sent_by_clients": {"train": tensors}})
    method = group([result])[0]
    bars = figures.bytes_sent([(method, run)]).data["views"][0]["bars"]
    assert bars[0] == {"name": "train: layer19", "value": 1900}
    assert bars[-1] == {"name": "7 smaller tensors", "value": sum(100 * n for n in range(1, 8))}
    assert figures.bytes_sent([(method, StoredRun(result))]) is None
