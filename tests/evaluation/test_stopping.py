import math

import pytest

from fedmoe.config import parse_config
from fedmoe.errors import ConfigError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.stopping import reason_to_stop, validation_point


def score(client, accuracy, loss, **metrics):
    return Score(client, False, "before", "validation", accuracy, loss, 10, metrics)


def points(*losses):
    return [{"round": 5 * at, "clients": 3, "accuracy": 0.5, "loss": loss} for at, loss in enumerate(losses, 1)]


def test_a_point_has_the_mean_over_clients_of_each_metric():
    found = validation_point([score(0, 0.5, 1.0, auc=0.6), score(1, 1.0, 3.0, auc=math.nan)])
    assert found == {"clients": 2, "accuracy": 0.75, "loss": 2.0, "auc": 0.6}
    assert validation_point([score(0, 0.5, 1.0, auc=math.nan)])["auc"] is None
    diverged = validation_point([score(0, math.nan, math.nan), score(1, math.nan, 1.0)])  # accuracy: of a regression
    assert diverged["accuracy"] is None and math.isnan(diverged["loss"])


def test_every_target_must_be_reached_in_its_own_direction():
    reached = [{"round": 5, "accuracy": 0.8, "loss": 0.7, "ece": 0.1}]
    assert "accuracy 0.8 reached 0.8" in reason_to_stop(reached, {"accuracy": 0.8}, None)
    assert "loss 0.7 reached 0.7 and ece 0.1 reached 0.2" in reason_to_stop(reached, {"loss": 0.7, "ece": 0.2}, None)
    for missed in ({"accuracy": 0.81}, {"loss": 0.69}, {"accuracy": 0.8, "ece": 0.05}, {"auc": 0.1}):
        assert reason_to_stop(reached, missed, None) is None
    assert reason_to_stop([{"round": 5, "accuracy": 0.9, "loss": 0.1, "auc": None}], {"auc": 0.1}, None) is None


def test_patience_counts_validations_since_the_best_loss():
    assert reason_to_stop(points(3.0, 2.0, 2.5), None, 2) is None
    assert "best after round 10 and no better in 2" in reason_to_stop(points(3.0, 2.0, 2.5, 2.0), None, 2)
    assert reason_to_stop(points(3.0, 2.0, 2.5, 1.9), None, 2) is None
    assert reason_to_stop([], None, 1) is None


def test_a_diverged_model_is_no_better_than_any():
    assert "best after round 5" in reason_to_stop(points(2.0, math.nan, math.nan), None, 2)
    assert reason_to_stop(points(math.nan, 2.0), None, 1) is None


@pytest.mark.parametrize(
    ("schedule", "evaluation", "message"),
    [
        ({"stop_at": {"speed": 1.0}}, {}, "'speed', of which it is not known"),
        ({"stop_at": {"recall": 1.0}}, {"metrics": ["recall"]}, "'recall', of which it is not known"),
        ({"stop_at": {"auc": 0.9}}, {}, "'auc', which is not measured.*evaluation.metrics"),
        ({"stop_at": {"accuracy": 0.9}}, {"clients_asked": "none"}, "clients_asked is 'none'"),
        ({"patience": 3}, {"clients_asked": "none"}, "clients_asked is 'none'"),
        ({"patience": 0}, {}, "schedule.patience=0"),
        ({"stop_at": {"accuracy": "high"}}, {}, "schedule.stop_at.accuracy='high'"),
    ],
)
def test_a_target_that_cannot_be_measured_is_refused(schedule, evaluation, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"schedule": schedule, "evaluation": evaluation})
