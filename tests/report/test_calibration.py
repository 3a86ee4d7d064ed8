from fedmoe.report.calibration import calibration_table, reliability


def bins(counts, sure, right):
    return {"answer": "", "data": "own", "model": "after", "bins": [counts, sure, right]}


def test_reliability_pools_bins_over_seeds_and_leaves_empty_ones_out(make_results):
    first, second = make_results(("fine_tuned",), seeds=2)
    first["reliability"] = [bins([10, 0, 2], [5.0, 0.0, 1.8], [4, 0, 2])]
    second["reliability"] = [bins([10, 0, 0], [6.0, 0.0, 0.0], [8, 0, 0])]
    figure = reliability([first, second])
    assert figure.data["views"][0]["series"][0]["points"] == [[0.55, 0.6], [0.9, 1.0]]
    assert "0.60 at 0.55" in figure.alt
    assert reliability(make_results(("fedavg",))) is None


def test_log_loss_is_always_shown_and_other_metrics_where_they_are_measured(make_results):
    (result,) = make_results(("fine_tuned",))
    assert calibration_table([result]) == {
        "columns": ["Log loss, own", "Log loss, global"], "lines": [("Fine-tuned", ["1", "1"])],
    }  # fmt: skip
    measured = result | {"scores": [score | {"metrics": {"ece": 0.25}} for score in result["scores"]]}
    assert calibration_table([measured])["lines"] == [("Fine-tuned", ["1", "1", "0.25"])]


def test_a_regression_has_no_probabilities(make_results):
    (result,) = make_results(("fine_tuned",))
    error = result | {"task": "regression", "scores": [s | {"metrics": {"rmse": 2.0}} for s in result["scores"]]}
    assert calibration_table([error])["lines"] == []
