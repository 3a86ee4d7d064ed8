import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmoe.evaluation.figure_of_merit import ACCURACY, RMSE
from fedmoe.evaluation.summary import interval, summarise


def score(client, accuracy, *, model="after", data="own", unseen=False):
    return {"client": client, "accuracy": accuracy, "model": model, "data": data, "unseen": unseen}


def result(title, scores):
    return {"title": title, "algorithm": title.lower(), "scores": scores}


def run(own, *, title="Mixture", before=(), everyone=(), unseen=()):
    return result(
        title,
        [score(c, a) for c, a in enumerate(own)]
        + [score(c, a, model="before") for c, a in enumerate(before)]
        + [score(c, a, data="global") for c, a in enumerate(everyone)]
        + [score(9 + c, a, unseen=True) for c, a in enumerate(unseen)],
    )


def test_one_run_by_hand():
    (row,) = summarise([run([0.5, 0.7, 0.9], before=[0.4, 0.4, 0.1], everyone=[0.2, 0.4, 0.6], unseen=[0.8])])
    assert (row["title"], row["algorithm"], row["seeds"]) == ("Mixture", "mixture", 1)
    assert row["own"]["mean"] == pytest.approx(0.7) and row["own"]["before"] == pytest.approx(0.3)
    assert row["own"]["spread"] == pytest.approx(np.sqrt(2 * 0.2**2 / 3))
    assert row["own"]["worst_decile"] == pytest.approx(0.5)
    assert row["own"]["interval"] is None  # one seed gives none
    assert row["global"]["mean"] == pytest.approx(0.4) and row["unseen"]["mean"] == pytest.approx(0.8)


def test_the_new_client_on_pooled_data_is_a_cell_of_its_own():
    scored = run([0.5], unseen=[0.8])
    scored["scores"].append(score(20, 0.3, data="pooled", unseen=True))
    (row,) = summarise([scored])
    assert row["pooled"]["mean"] == pytest.approx(0.3) and row["unseen"]["mean"] == pytest.approx(0.8)
    assert summarise([run([0.5])])[0]["pooled"] is None


def test_seeds_are_averaged_and_the_interval_is_over_their_means():
    (row,) = summarise([run([0.5, 0.7]), run([0.8, 0.8]), run([0.4, 0.8])])
    assert row["seeds"] == 3 and row["own"]["mean"] == pytest.approx((0.6 + 0.8 + 0.6) / 3)
    assert row["own"]["interval"] == pytest.approx(4.302653 * np.std([0.6, 0.8, 0.6], ddof=1) / np.sqrt(3), rel=1e-5)


def test_methods_keep_the_order_of_their_first_run():
    rows = summarise([run([0.5], title="B"), run([0.6], title="A"), run([0.7], title="B")])
    assert [(row["title"], row["seeds"]) for row in rows] == [("B", 2), ("A", 1)]


def test_a_method_without_personalisation_is_judged_by_its_global_model():
    (row,) = summarise([result("FedAvg", [score(0, 0.3, model="before"), score(1, 0.5, model="before")])])
    assert row["own"]["mean"] == pytest.approx(0.4) and row["own"]["before"] is None


def test_what_was_not_measured_is_left_out():
    (row,) = summarise([run([0.5])])
    assert row["global"] is None and row["unseen"] is None and row["own"]["before"] is None


@pytest.mark.parametrize(("size", "tenth"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10)])
def test_the_worst_decile_is_a_tenth_of_the_clients_and_at_least_one(size, tenth):
    values = np.arange(size, dtype=float)
    np.random.default_rng(0).shuffle(values)
    assert ACCURACY.worst_decile(values) == pytest.approx(np.arange(tenth).mean())


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(-5, 5))
def test_the_interval_does_not_depend_on_where_the_mean_lies(means, shift):
    assert interval(means) >= 0
    assert interval([mean + shift for mean in means]) == pytest.approx(interval(means), abs=1e-9)


def test_the_worst_clients_of_a_regression_are_those_with_the_largest_errors():
    assert RMSE.worst_decile(np.array([3.0, 9.0, 1.0])) == 9.0


def test_a_regression_is_summarised_by_its_errors_and_the_other_metrics_stand_beside_them():
    scores = [
        {"client": client, "unseen": False, "model": "before", "data": "own", "metrics": {"rmse": rmse, "r2": 0.5}}
        for client, rmse in enumerate((2.0, 4.0))
    ]
    record = {"title": "A", "algorithm": "a", "seed": 0, "task": "regression", "scores": scores}
    (row,) = summarise([record])
    assert (row["own"]["mean"], row["own"]["worst_decile"]) == (3.0, 4.0)
    assert [*row["metrics"]] == ["r2"]
