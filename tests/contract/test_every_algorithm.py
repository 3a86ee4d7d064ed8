"""One contract for every algorithm, present and future: those of the catalog, and probes of what is to come.

The checks are those of `fedmoe.testing.check_algorithm`, which authors of other algorithms run on theirs.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from builders import CLASSES, FEATURES, run_spied, tiny_federation, tiny_setup
from contract.probes import PROBES
from fedmoe.algorithms.algorithm import Algorithm, Exchange
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import Update
from fedmoe.algorithms.label_priors.calibration import CalibrationConfig
from fedmoe.algorithms.prior_mixture.algorithm import PriorMixtureConfig
from fedmoe.clients.federation import Federation
from fedmoe.contract import AlgorithmSetup, NoReport
from fedmoe.core_types import Examples
from fedmoe.models.text import TextLSTM
from fedmoe.testing import CHECKS, Subject, check_algorithm, contract_checks, federation, outcome, resume, taking_home
from fedmoe.testing.checks import leaked
from fedmoe.testing.federation import draw_examples
from fedmoe.testing.opt_out import TOUCHED, OptedOut, bytes_sent, bytes_sent_with
from fedmoe.training.backends import Backend

ENTRIES = CATALOG | PROBES
BACKENDS: tuple[Backend, ...] = ("batched", "native")
# Many exchanges of one kind are checked by a few: the tests are to be fast.
SETTINGS = {"prior_mixture": PriorMixtureConfig(calibration=CalibrationConfig(exchanges=3))}


def subject(name: str, backend: Backend = "batched") -> Subject:
    return Subject.of(ENTRIES[name], SETTINGS.get(name), backend)


APPLYING = [(name, check) for name in ENTRIES for check in contract_checks(subject(name).make())]
CASES = [
    (name, check, backend)
    for name, check in APPLYING
    for backend in (BACKENDS if CHECKS[check].each_backend else BACKENDS[:1])
]
# `make test` has every algorithm of the catalog and every check; what takes long in it is for one algorithm of a kind,
# `make slow` has the rest.
LONG = ("kill and resume", "stop and resume with few checkpoints", "a personal model can be exported")
ONE_OF_A_KIND = ("fedavg", "specialist_mixture", "prior_mixture", "fedmix", "fedjets", "domain_experts")


def in_its_tier(name: str, check: str, *others: Any) -> Any:
    long = name in PROBES or (check in LONG and name not in ONE_OF_A_KIND)
    return pytest.param(name, check, *others, marks=pytest.mark.slow if long else ())


@pytest.mark.parametrize(("name", "check", "backend"), [in_its_tier(*case) for case in CASES])
def test_contract(name: str, check: str, backend: Backend, tmp_path: Path) -> None:
    CHECKS[check].run(subject(name, backend), tmp_path)


class Residual(nn.Module):
    """Dense layers with norms beside a shortcut; the tiny federation has vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 6), nn.Linear(6, FEATURES)
        self.first_norm, self.second_norm = nn.GroupNorm(2, 6), nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        scores: torch.Tensor = self.head(torch.relu(self.second_norm(self.second(inner)) + x))
        return scores


@pytest.mark.parametrize(
    ("name", "check"), [(name, check) for name, check in APPLYING if name in ("fedavg", "specialist_mixture")]
)
def test_contract_of_residual_networks(name: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "make_expert", Residual)
    assert isinstance(tiny_setup("native").expert.module, Residual)
    CHECKS[check].run(subject(name, "native"), tmp_path)


def words_of(count: int, *path: int | str) -> Examples:
    """The tiny federation's examples as texts of up to four words: a number's size is a word, and around zero none."""
    drawn = draw_examples(count, *path)
    return drawn._replace(x=(2 * drawn.x).round().clamp(-4, 5).long() % 10)


OF_NUMBERS = ("opted-out records change no byte sent", "opted-in records change bytes sent")  # records of their own
ALWAYS = ("backends agree", "workers and order change nothing")
OF_TEXTS = [
    pytest.param(name, check, marks=() if check in ALWAYS else pytest.mark.slow)
    for name, check in APPLYING
    if name in ("fedavg", "specialist_mixture") and check not in OF_NUMBERS
]


@pytest.mark.parametrize(("name", "check"), OF_TEXTS)
def test_contract_of_recurrent_networks(name: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        "make_expert": lambda: TextLSTM(10, CLASSES, 3, 4),
        "make_gate": lambda: TextLSTM(10, 1, 3, 2),
        "draw_examples": words_of,
        "ASKED": words_of(5, "asked").x,
    }
    for module in (federation, outcome, resume, taking_home):
        for attribute, text_version in changed.items():
            monkeypatch.setattr(module, attribute, text_version, raising=False)
    CHECKS[check].run(subject(name, "native"), tmp_path)


def test_every_check_is_used_and_only_algorithms_that_send_nothing_are_spared_some() -> None:
    assert {check for _, check in APPLYING} == {*CHECKS}
    spared = {name for name in ENTRIES if "an update with NaN is rejected" not in contract_checks(subject(name).make())}
    assert spared == {name for name in ENTRIES if not subject(name).make().round} and "local_only" in spared


# Opt-out is non-interference, on examples that nobody thought of

VALUES = st.floats(width=32) | st.sampled_from([0.0, 1e30, float("nan"), float("inf")])
RECORDS_OUT = st.lists(
    st.tuples(st.integers(0, 9), st.tuples(*[VALUES] * FEATURES), st.integers(0, CLASSES - 1)), max_size=4
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in PROBES else ())
        for name in ENTRIES
        if subject(name).make().round
    ],
)
def test_opted_out_records_change_no_byte_sent(name: str, backend: Backend, tmp_path: Path) -> None:
    algorithm, numbers = subject(name, backend).make(), count()
    before = bytes_sent(algorithm, tiny_federation(), tmp_path / "before")

    @settings(max_examples=3 if settings.default.derandomize else 10, deadline=None, database=None)
    @given(st.tuples(*[st.tuples(RECORDS_OUT, RECORDS_OUT)] * len(TOUCHED)))
    def changes_no_byte(others: tuple[tuple[OptedOut, OptedOut], ...]) -> None:
        changed = dict(zip(TOUCHED, others, strict=True))
        assert bytes_sent_with(algorithm, changed, tmp_path / str(next(numbers))) == before

    changes_no_byte()


# The checks can fail: FedAvg with a defect


def fedavg(setup: AlgorithmSetup) -> Algorithm:
    return CATALOG["fedavg"].factory(CATALOG["fedavg"].config(), setup)


def with_round(algorithm: Algorithm, **changes: Any) -> Algorithm:
    return algorithm._replace(round=(algorithm.round[0]._replace(**changes),))


def that_sends_its_personal_model(setup: AlgorithmSetup) -> Algorithm:
    algorithm = fedavg(setup)
    return with_round(algorithm, private_update=same_as_sent(algorithm.round[0]))._replace(
        personal_type=algorithm.round[0].update_type,
        init_personal=lambda broadcast, *_: algorithm.round[0].update_like(broadcast),
    )


def same_as_sent(exchange: Exchange) -> Callable[..., Any]:
    def private_update(broadcast: Any, client: Any, _personal: Any, data: Any, rng: Any) -> Any:
        opted_in = tiny_federation().data(rng.clients, opted_in_only=True)
        return exchange.local_update(broadcast, client, opted_in, rng._replace(scope="round:train"))[1]

    return private_update


def that_draws_from_a_global_generator(setup: AlgorithmSetup) -> Algorithm:
    def noisy(update: Update) -> Update:
        return update._replace(model={name: leaf + 0.1 * torch.randn_like(leaf) for name, leaf in update.model.items()})

    return with_local_update(fedavg(setup), noisy)


def that_predicts_by_what_no_file_holds(setup: AlgorithmSetup) -> Algorithm:
    algorithm, drawn = fedavg(setup), torch.randn(CLASSES)
    return algorithm._replace(
        predict=lambda broadcast, client, personal, x: (
            algorithm.predict(broadcast, client, personal, x) + drawn
        ).log_softmax(-1)
    )


def that_branches_on_x(setup: AlgorithmSetup) -> Algorithm:
    algorithm = fedavg(setup)
    return algorithm._replace(
        predict=lambda broadcast, client, personal, x: algorithm.predict(
            broadcast, client, personal, x if bool(x.sum() > 0) else -x
        )
    )


def that_gives_its_experts_too_much(setup: AlgorithmSetup) -> Algorithm:
    return fedavg(setup)._replace(expert_weights=lambda *_states_and_x: {"one": torch.ones(5), "other": torch.ones(5)})


def that_ignores_its_data(setup: AlgorithmSetup) -> Algorithm:
    return with_round(
        fedavg(setup)._replace(validation=None),
        report_type=NoReport,
        local_update=lambda broadcast, client, data, _rng: (
            client,
            Update(broadcast.model, torch.ones(len(data.train.counts))),
            NoReport(),
        ),
    )


def that_remembers_outside_of_its_states(setup: AlgorithmSetup) -> Algorithm:
    calls = count()

    def drifting(update: Update) -> Update:
        drift = 0.01 * next(calls)
        return update._replace(model={name: leaf + drift for name, leaf in update.model.items()})

    return with_local_update(fedavg(setup), drifting)


def that_depends_on_its_company(setup: AlgorithmSetup) -> Algorithm:
    def by_cohort(update: Update) -> Update:
        size = len(update.num_examples)
        return update._replace(model={name: leaf + 0.01 * size for name, leaf in update.model.items()})

    return with_local_update(fedavg(setup), by_cohort)


def that_accepts_nothing(setup: AlgorithmSetup) -> Algorithm:
    return with_round(fedavg(setup), rejection=lambda _update, _sent: "no update is good enough")


def with_local_update(algorithm: Algorithm, change: Callable[[Update], Update]) -> Algorithm:
    train = algorithm.round[0]

    def local_update(*arguments: Any) -> Any:
        client, update, report = train.local_update(*arguments)
        return client, change(update), report

    return with_round(algorithm, local_update=local_update)


@pytest.mark.parametrize(
    ("factory", "check", "sentence"),
    [
        (that_sends_its_personal_model, "no private tensor leaves a client", "are in what clients sent"),
        (that_sends_its_personal_model, "only messages can be encoded", "Update is a state, but declared"),
        (that_draws_from_a_global_generator, "the seed decides the result", "global generator"),
        (that_ignores_its_data, "opted-in records change bytes sent", "whatever their opted-in records are"),
        (that_depends_on_its_company, "backends agree", "differs between backends"),
        (that_remembers_outside_of_its_states, "stop and resume", "resumed ends otherwise: these differ: .*server"),
        (that_predicts_by_what_no_file_holds, "a loaded run predicts the same", "predicts otherwise once the run is"),
        (that_gives_its_experts_too_much, "a loaded run predicts the same", "are not one share of each row"),
        (that_branches_on_x, "a personal model can be exported", "branches on the values of its inputs"),
        (that_accepts_nothing, "one record is enough to take part", "honest clients were rejected"),
    ],
)
def test_a_check_finds_the_defect(factory: Any, check: str, sentence: str, tmp_path: Path) -> None:
    assert check in contract_checks(Subject(factory).make())
    with pytest.raises(AssertionError, match=sentence):
        CHECKS[check].run(Subject(factory), tmp_path)


def test_opted_out_records_that_are_sent_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No algorithm is handed such records, so this defect is one of the federation."""
    data = Federation.data
    monkeypatch.setattr(Federation, "data", lambda self, clients, **_: data(self, clients, opted_in_only=False))
    with pytest.raises(AssertionError, match="depends on opted-out records"):
        CHECKS["opted-out records change no byte sent"].run(Subject(fedavg), tmp_path)


def test_a_private_tensor_that_leaves_is_named(tmp_path: Path) -> None:
    outcome, spy = run_spied(Subject(that_sends_its_personal_model).make(), tiny_federation(), tmp_path / "store")
    found = leaked(outcome, spy)
    assert found and all(name.startswith("personal of client") for name in found)


def test_what_is_declared_as_known_to_the_server_is_all_that_is_left_out(tmp_path: Path) -> None:
    """SCAFFOLD sends the change of its control variates: in a client's first round, these themselves."""
    scaffold = CATALOG["scaffold"]
    algorithm = scaffold.factory(scaffold.config(), tiny_setup())
    outcome, spy = run_spied(algorithm, tiny_federation(), tmp_path / "store")
    found = leaked(outcome, spy)
    assert found and all(name.startswith("client of") and ": control/" in name for name in found)
    assert sorted(leaked(outcome, spy, ["other"])) == sorted(found)
    assert leaked(outcome, spy, algorithm.known_to_server) == []


def test_check_algorithm_says_which_check_failed_and_where() -> None:
    with pytest.raises(AssertionError, match=r"the seed decides the result \(batched\): .*global generator"):
        check_algorithm(that_draws_from_a_global_generator)


def test_check_algorithm_runs_every_check_that_applies(tmp_path: Path) -> None:
    passed = check_algorithm("local_only", directory=tmp_path / "checks")
    expected = [(check, backend) for name, check, backend in CASES if name == "local_only"]
    assert sorted(passed) == sorted(f"{check} ({backend})" for check, backend in expected)
    assert len([*(tmp_path / "checks").iterdir()]) == len(passed)
