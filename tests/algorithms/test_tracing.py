"""The fast path is honest: what falls back from whole native epochs is known before a run."""

import pytest

from builders import tiny_federation, tiny_setup
from contract.probes import PROBES
from fedmoe.algorithms.apfl import ApflConfig, apfl
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedmix.algorithm import fedmix
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.algorithms.tracing import native_fallbacks
from fedmoe.clients.per_example_cache import with_cached

STEP_BY_STEP = {
    "domain_experts": ["group 'expert' has a loss of its own"],  # the private expert within the mixture
    "fedmix": ["and one of them is frozen"],  # fitting a new client's gate
}


@pytest.mark.parametrize("name", CATALOG)
def test_rounds_are_whole_native_epochs_and_the_rest_says_why_not(name):
    entry = CATALOG[name]
    algorithm = entry.factory(entry.config(), tiny_setup("native"))
    reasons = native_fallbacks(algorithm, with_cached(tiny_federation(), algorithm.once_of_examples))
    expected = STEP_BY_STEP.get(name, [])
    assert len(reasons) == len(expected), reasons
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True)), reasons


def test_apfl_adapts_alpha_in_a_step_of_its_own():
    reasons = native_fallbacks(apfl(ApflConfig(alpha_rate=0.1), tiny_setup("native")), tiny_federation())
    assert len(reasons) == 1 and "group 'mixing' has a loss of its own" in reasons[0]


def test_an_option_that_the_kernels_do_not_know_is_named():
    reasons = native_fallbacks(fedmix(FedMixConfig(entropy=True), tiny_setup("native")), tiny_federation())
    assert reasons[0].startswith("group 'mixture': ") and "without entropy" in reasons[0]


def test_other_backends_have_nothing_to_fall_back_from():
    for backend in ("batched", "sequential"):
        assert native_fallbacks(fedmix(FedMixConfig(entropy=True), tiny_setup(backend)), tiny_federation()) == []


@pytest.mark.parametrize("name", PROBES)
def test_any_algorithm_on_the_contract_can_be_rehearsed(name):
    native_fallbacks(PROBES[name].factory(PROBES[name].config(), tiny_setup("native")), tiny_federation())
