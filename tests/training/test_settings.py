import pytest
from pydantic import ValidationError

from fedmoe.training.group import Schedule
from fedmoe.training.optimizers import Adam, Sgd
from fedmoe.training.settings import LocalTraining


def test_a_plan_makes_the_schedule_and_the_optimizer_it_names():
    assert LocalTraining(epochs=3, batch_size=7).schedule == Schedule(7, 3, None)
    assert LocalTraining(steps=9).schedule.steps == 9
    assert LocalTraining(learning_rate=0.5).make_optimizer() == Adam(0.5)
    assert LocalTraining(optimizer="sgd", learning_rate=0.5, momentum=0.9).make_optimizer() == Sgd(0.5, 0.9)
    assert LocalTraining(optimizer="sgd", weight_decay=0.1).make_optimizer() == Sgd(1e-3, 0.0, 0.1)
    assert LocalTraining(weight_decay=0.1).make_optimizer() == Adam(1e-3, weight_decay=0.1)
    decoupled = LocalTraining(optimizer="adamw", weight_decay=0.1).make_optimizer()
    assert decoupled == Adam(1e-3, weight_decay=0.1, decoupled=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": -1},
        {"learning_rate": 0},
        {"optimizer": "lion"},
        {"patience": 0},
        {"rate": 1},
        {"weight_decay": -0.1},
        {"max_gradient_norm": 0},
        {"max_gradient_norm": float("inf")},
    ],
)
def test_a_plan_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LocalTraining(**wrong)
