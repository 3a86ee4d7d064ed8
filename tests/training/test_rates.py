"""Learning rates over rounds and steps are those of `torch.optim.lr_scheduler`, and reach every algorithm."""

from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from builders import make_common_expert, make_expert, make_gate, tiny_config, tiny_federation, tiny_plan, tiny_setup
from fedmoe import assembly, trees
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.scaffold import ScaffoldConfig, scaffold
from fedmoe.config import parse_config
from fedmoe.engines.catalog import open_transport
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError, Stopped
from fedmoe.experiment import run_events
from fedmoe.streams import Streams
from fedmoe.testing.outcome import RUN_ID, read_private
from fedmoe.testing.resume import end_state
from fedmoe.training.local import LocalTrainer
from fedmoe.training.rates import Rates, RateSchedule
from fedmoe.training.settings import LocalTraining

TOTAL = 23
THEIRS = {
    "step": (
        RateSchedule("step", every=4, factor=0.5),
        lambda o: lr_scheduler.StepLR(o, step_size=4, gamma=0.5),
    ),
    "cosine": (
        RateSchedule("cosine", final=0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.1),
    ),
    "cosine over less": (
        RateSchedule("cosine", over=TOTAL - 1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL - 1),
    ),
    "warm-up": (
        RateSchedule("constant", warm_up=5),
        lambda o: lr_scheduler.LinearLR(o, start_factor=1 / 5, total_iters=4),
    ),
    "warm-up, then step": (
        RateSchedule("step", warm_up=5, every=3, factor=0.3),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, start_factor=1 / 5, total_iters=4), lr_scheduler.StepLR(o, 3, 0.3)],
            milestones=[5],
        ),
    ),
    "warm-up, then cosine": (
        RateSchedule("cosine", warm_up=5),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, start_factor=1 / 5, total_iters=4),
                lr_scheduler.CosineAnnealingLR(o, TOTAL - 5),
            ],
            milestones=[5],
        ),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_shares_are_those_of_torch(name):
    ours, make = THEIRS[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, expected = make(optimizer), []
    for _ in range(TOTAL):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [ours.share(index, TOTAL) for index in range(TOTAL)] == pytest.approx(expected, abs=1e-9)
    of_steps = Rates(None, ours, rounds=1).shares(None, TOTAL)
    assert of_steps.tolist() == pytest.approx(expected, abs=1e-9)
    of_rounds = [Rates(ours, None, TOTAL).shares(number, 1).item() for number in range(1, TOTAL + 1)]
    assert of_rounds == pytest.approx(expected, abs=1e-9)


def test_a_cosine_stays_at_its_end():
    assert RateSchedule("cosine", over=4, final=0.2).share(9, 20) == pytest.approx(0.2)


def test_both_schedules_multiply_and_outside_of_rounds_only_steps_count():
    rates = Rates(RateSchedule("step", every=1, factor=0.5), RateSchedule("step", every=2, factor=0.1), rounds=9)
    assert rates.shares(3, 4).tolist() == pytest.approx([0.25, 0.25, 0.025, 0.025])
    assert rates.shares(None, 4).tolist() == pytest.approx([1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "step"}, "how often it is cut"),
        ({"kind": "cosine", "every": 3}, "'cosine' has no 'every'.*'step'"),
        ({"over": 3}, "'constant' has no 'over'"),
        ({"kind": "exponential"}, "training.federated.rate_over_rounds.kind='exponential'"),
        ({"kind": "step", "every": 3, "factor": 1.5}, "rate_over_rounds.factor=1.5"),
        ({"kind": "cosine", "finall": 0.1}, "Did you mean 'training.federated.rate_over_rounds.final'"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_by_its_key(wrong, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"training": {"federated": {"rate_over_rounds": wrong}}})


@pytest.mark.parametrize("stage", ["local", "personal"])
def test_stages_outside_of_the_rounds_have_no_schedule_over_them(stage):
    with pytest.raises(ConfigError, match=rf"training\.{stage}\.rate_over_rounds.*rate_over_steps"):
        parse_config({"training": {stage: {"rate_over_rounds": {"warm_up": 3}}}})


def config(name, rounds=1, **federated):
    made = tiny_config(name, rounds=rounds)
    plan = replace(made.training.federated, **federated)
    return made.model_copy(update={"training": made.training.model_copy(update={"federated": plan})})


def after_the_rounds(config, store):
    """The server's and the clients' states, to the last bit."""
    own = {"expert": make_expert, "gate": make_gate, "common_expert": make_common_expert()}
    parts = assembly.build(config, federation=tiny_federation(), **own)
    store.parent.mkdir()
    with open_transport(parts, store, RUN_ID) as transport:
        session = Session(parts, transport)
        while not session.is_trained:
            session.next_round()
    return trees.to_bytes(session.server), read_private(store)


QUICK = ("fedavg", "ditto", "apfl", "scaffold", "fedrep", "fedmix")
IN_ROUNDS = [name for name in CATALOG if name not in ("local_only", "centralized", "common_expert")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in IN_ROUNDS]
)
def test_a_schedule_over_rounds_reaches_every_algorithm(name, tmp_path):
    """Half of the rate in the first of two rounds to warm up is half of the rate."""
    warming = config(name, learning_rate=0.2, rate_over_rounds=RateSchedule(warm_up=2))
    halved, whole = (config(name, learning_rate=rate) for rate in (0.1, 0.2))
    found = [after_the_rounds(one, tmp_path / str(i) / "store") for i, one in enumerate((warming, halved, whole))]
    assert found[0] == found[1] != found[2]


def test_a_rate_of_zero_ends_the_training_in_the_rounds_and_not_the_personalisation(tmp_path):
    """The second round and all that follow have no rate."""
    rates = RateSchedule("step", every=1, factor=0.0)
    one, four = (
        run(config("fine_tuned", rounds=rounds, rate_over_rounds=rates), tmp_path / str(rounds)) for rounds in (1, 4)
    )
    for name, tensor in one.delivered[0].model.items():
        torch.testing.assert_close(four.delivered[0].model[name], tensor, atol=1e-6, rtol=1e-6)
    before, after = ([s.loss for s in four.scores if s.model == which] for which in ("before", "after"))
    assert before != after


def run(config, directory, **options):
    *_, result = run_events(
        config, directory, federation=tiny_federation(), expert=make_expert, gate=make_gate, **options
    )
    return result


def test_a_run_that_was_stopped_goes_on_at_its_rate(tmp_path):
    rates = {"rate_over_rounds": RateSchedule("cosine"), "rate_over_steps": RateSchedule("step", every=2, factor=0.5)}
    whole = run(config("ditto", rounds=4, **rates), tmp_path / "whole")
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        run(config("ditto", rounds=4, **rates), tmp_path / "parts", should_stop=lambda: next(asked))
    resumed = run(config("ditto", rounds=4, **rates), tmp_path / "parts")
    assert end_state(resumed) == end_state(whole)


@pytest.mark.parametrize("in_rounds", [True, False])
def test_summed_rates_are_what_plain_sgd_moves_by(in_rounds):
    schedules = {
        "rate_over_rounds": RateSchedule("step", every=1, factor=0.5),
        "rate_over_steps": RateSchedule("step", every=2, factor=0.1),
    }
    trainer = LocalTrainer(LocalTraining(learning_rate=0.4, **schedules), "batched", rounds=5)
    rng = Streams(0, "test", 2, (0, 1), in_rounds=in_rounds)
    of_round = 0.5 if in_rounds else 1.0
    expected = [0.0, of_round * 0.4 * (1 + 1 + 0.1)]
    assert trainer.summed_rates(torch.tensor([0, 3]), rng).tolist() == pytest.approx(expected)


def test_control_variates_of_scaffold_are_mean_gradients_at_changing_rates(tmp_path):
    """With a rate that falls so fast that the client hardly moves after its first step, c_i is its first gradient."""
    plan = replace(tiny_plan(1), batch_size=99, rate_over_steps=None)
    settings = [plan, replace(plan, epochs=3, rate_over_steps=RateSchedule("step", every=1, factor=0.0))]
    controls = []
    for one in settings:
        setup = tiny_setup()._replace(federated=LocalTrainer(one, "batched"))
        algorithm = scaffold(ScaffoldConfig(), setup)
        shared = trees.stack([algorithm.round[0].broadcast(algorithm.init_server(0), 0, [])])
        client = trees.stack([algorithm.init_client(trees.pick(shared, 0), 0, 0)])
        data = tiny_federation().data([0], opted_in_only=True)
        state, _, _ = algorithm.round[0].local_update(shared, client, data, Streams(0, "test", 1, (0,)))
        controls.append(state.control)
    for name, tensor in controls[0].items():
        torch.testing.assert_close(controls[1][name], tensor, atol=1e-6, rtol=1e-5)
