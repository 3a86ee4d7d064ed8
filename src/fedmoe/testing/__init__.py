"""The whole contract test, for an algorithm of anybody: `check_algorithm(factory)`. Needs no test framework."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.catalog import find
from fedmoe.algorithms.outside import entry_of
from fedmoe.algorithms.setup import AlgorithmFactory
from fedmoe.models.network import Network
from fedmoe.testing import bad_updates, checks, opt_out, resume, taking_home
from fedmoe.testing.federation import FEATURES, make_expert
from fedmoe.testing.subject import Check, Subject
from fedmoe.training.backends import Backend

__all__ = ["Check", "Subject", "available_backends", "check_algorithm", "contract_checks"]


def _always(_algorithm: Algorithm) -> bool:
    return True


def _computes(algorithm: Algorithm) -> bool:
    """Not so for a model that is given and never trained: no seed could change it."""
    return bool(algorithm.round) or algorithm.personalize is not None


def _sends(algorithm: Algorithm) -> bool:
    return bool(algorithm.round)


def _keeps_state(algorithm: Algorithm) -> bool:
    return algorithm.keeps_client_state


# On each backend: what kernels and batching could break. The rest is about messages and files, whoever computed them.
CHECKS = {
    "only messages can be encoded": Check(checks.only_messages_can_be_encoded, _always, each_backend=False),
    "the seed decides the result": Check(checks.the_seed_decides_the_result, _computes),
    "backends agree": Check(checks.backends_agree, _always),
    "no private tensor leaves a client": Check(checks.no_private_tensor_leaves_a_client, _always),
    "the manifest counts what really passed": Check(
        checks.the_manifest_counts_what_really_passed, _always, each_backend=False
    ),
    "opted-out records change no byte sent": Check(opt_out.opted_out_records_change_no_byte_sent, _sends),
    "opted-in records change bytes sent": Check(opt_out.opted_in_records_change_bytes_sent, _sends, each_backend=False),
    "workers and order change nothing": Check(checks.workers_and_order_change_nothing, _always),
    "small and opted-out clients end with a model": Check(checks.small_and_opted_out_clients_end_with_a_model, _always),
    "a new client without data is scored on pooled examples": Check(
        checks.a_new_client_without_data_is_scored_on_pooled_examples, _always, each_backend=False
    ),
    "one record is enough to take part": Check(checks.one_record_is_enough_to_take_part, _sends),
    "an update with NaN is rejected": Check(
        bad_updates.is_rejected(bad_updates.with_nan, "NaN"), _sends, each_backend=False
    ),
    "an update of another shape is rejected": Check(
        bad_updates.is_rejected(bad_updates.with_other_shape, "not torch"), _sends, each_backend=False
    ),
    "an update with other names is rejected": Check(
        bad_updates.is_rejected(bad_updates.with_other_names, "my_"), _sends, each_backend=False
    ),
    "stop and resume": Check(resume.stop_and_resume(1), _always, each_backend=False),
    "stop and resume with few checkpoints": Check(resume.stop_and_resume(3), _always, each_backend=False),
    "a loaded run predicts the same": Check(taking_home.a_loaded_run_predicts_the_same, _always, each_backend=False),
    "a personal model can be exported": Check(
        taking_home.a_personal_model_can_be_exported, _always, each_backend=False
    ),
    "kill and resume": Check(resume.kill_and_resume, _keeps_state, each_backend=False),
    "a damaged checkpoint costs a round and nothing else": Check(
        resume.a_damaged_checkpoint_costs_a_round_and_nothing_else, _keeps_state, each_backend=False
    ),
}


def contract_checks(algorithm: Algorithm) -> dict[str, Check]:
    """The checks that apply to this algorithm, by name."""
    return {name: check for name, check in CHECKS.items() if check.applies(algorithm)}


def available_backends() -> tuple[Backend, ...]:
    """Of those whose cohorts are compared with clients one by one: native where a C++ compiler is found."""
    compiles = Network(make_expert, "expert", (FEATURES,)).obstacle is None
    return ("batched", "native") if compiles else ("batched",)


def check_algorithm(
    factory: AlgorithmFactory | str, config: Any = None, *, directory: str | Path | None = None
) -> list[str]:
    """Run the whole contract test on an algorithm; returns the names of the checks that it passed.

    A federation of seven tiny clients is trained many times over: backends agree, nothing private is sent, opted-out
    records change no byte, order and workers change nothing, bad updates are rejected, and a run that was stopped or
    killed resumes bit for bit.

    Args:
        factory: factory(setup), factory(config: MyConfig, setup), or a name as in `algorithm.name` of a config.
        config: an instance of MyConfig; default: MyConfig().
        directory: where runs are left, to look at; default: a temporary folder, which is removed.

    Raises:
        AssertionError: which check failed, on which backend, and what does not hold.
    """
    entry = find(factory) if isinstance(factory, str) else entry_of(factory)
    applying = contract_checks(Subject.of(entry, config).make())
    passed = []
    with _folder(directory) as home:
        for number, backend in enumerate(available_backends()):
            subject = Subject.of(entry, config, backend)
            for name, check in applying.items():
                if not check.each_backend and number:
                    continue
                place = home / f"{name.replace(' ', '_')}-{backend}"
                place.mkdir(parents=True)
                try:
                    check.run(subject, place)
                except AssertionError as error:
                    raise AssertionError(f"{name} ({backend}): {error}") from error
                passed.append(f"{name} ({backend})")
    return passed


@contextmanager
def _folder(directory: str | Path | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory)
        return
    with tempfile.TemporaryDirectory(prefix="fedmoe-check-") as made:
        yield Path(made)
