"""Calibration and priors as an option of every algorithm: what it learns and answers itself stays as it was."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from algorithms.digits import run_digits
from builders import CLASSES, FEATURES, PLAIN, run_algorithm, tiny_config, tiny_federation, tiny_setup
from fedmoe import assembly, trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fine_tuned import fine_tuned
from fedmoe.algorithms.label_priors import any_algorithm
from fedmoe.algorithms.label_priors.answers import BALANCED, ESTIMATED, OWN
from fedmoe.algorithms.label_priors.any_algorithm import with_priors
from fedmoe.algorithms.label_priors.calibration import CalibrationConfig
from fedmoe.algorithms.label_priors.frequencies import label_counts, log_frequencies, shrunk_frequencies
from fedmoe.config import parse_config
from fedmoe.errors import ConfigError
from fedmoe.streams import Streams

POOL = {"fedavg", "fedprox", "scaffold", "centralized", "average_ensembles", "fedmix_common", "common_expert"}
PRIORS = (OWN, BALANCED, ESTIMATED)


@pytest.fixture(autouse=True)
def _few_exchanges(monkeypatch):
    monkeypatch.setattr(any_algorithm, "CalibrationConfig", lambda: CalibrationConfig(exchanges=2))


def made(name, setup=None):
    setup = setup or tiny_setup()
    entry = CATALOG[name]
    return entry.factory(entry.config(), setup), setup


@pytest.mark.parametrize("name", CATALOG)
def test_every_algorithm_says_which_frequencies_its_answers_hold(name):
    algorithm, _ = made(name)
    assert algorithm.frequencies == ("pool" if name in POOL else "own")
    assert (algorithm.personalize is None) == (name in POOL)


@pytest.mark.parametrize("name", [name for name in CATALOG if name != "prior_mixture"])
def test_its_own_answers_stay_bit_for_bit_and_three_more_are_scored(name, tmp_path: Path):
    algorithm, setup = made(name)
    plain = run_algorithm(algorithm, tiny_federation(), tmp_path / "plain")
    more = run_algorithm(with_priors(algorithm, setup, name), tiny_federation(), tmp_path / "more")
    published = [score for score in more.scores if score.answer == ""]
    assert published == plain.scores
    others = [score for score in more.scores if score.answer]
    assert {score.answer for score in others} == {*PRIORS} and {score.model for score in others} == {"after"}
    assert all(torch.tensor(score.loss).isfinite() for score in others)
    assert not more.manifest["rejected"]


def test_from_a_personal_model_the_clients_own_frequencies_are_subtracted():
    algorithm, setup = made("fine_tuned")
    ours = with_priors(algorithm, setup, "fine_tuned")
    data, rng = tiny_federation().data([PLAIN], opted_in_only=False), Streams(0, "personalize", 0, (PLAIN,))
    sent = algorithm.delivery[-1].broadcast(algorithm.init_server(1), PLAIN, [])
    (state,) = ours.personalize(trees.stack([sent]), Nothing(), None, data, rng)
    x = torch.randn(5, FEATURES)
    held = log_frequencies(label_counts(data.train, CLASSES)[0])
    expected = state.calibration.log_scale.exp() * (ours.predict(sent, Nothing(), state, x) - held)
    torch.testing.assert_close(ours.priors.prior_free(sent, Nothing(), state, x), expected + state.calibration.biases)
    counts = label_counts(data.train, CLASSES) + label_counts(data.validation, CLASSES)
    torch.testing.assert_close(ours.priors.own(sent, Nothing(), state), shrunk_frequencies(counts[0]))


def test_from_a_shared_model_shared_biases_take_the_pools_frequencies(monkeypatch, tmp_path: Path):
    """On digits, where every client has one label far more often: told nothing, its answers get better at home."""
    monkeypatch.undo()
    scores = run_digits(lambda s: with_priors(fedavg(FedAvgConfig(), s), s, "fedavg"), tmp_path / "shared")

    def mean(data, answer):
        found = [score.accuracy for score in scores if (score.data, score.answer) == (data, answer)]
        return sum(found) / len(found)

    assert mean("own", OWN) > mean("own", "") + 0.02
    assert mean("own", ESTIMATED) > mean("own", "") + 0.02
    assert mean("global", ESTIMATED) > mean("global", "") - 0.02


def test_a_fine_tuned_model_gets_better_elsewhere_without_being_told(monkeypatch, tmp_path: Path):
    monkeypatch.undo()
    scores = run_digits(lambda s: with_priors(fine_tuned(FedAvgConfig(), s), s, "fine_tuned"), tmp_path / "own")

    def mean(data, answer):
        wanted = (data, "after", answer)
        found = [score.accuracy for score in scores if (score.data, score.model, score.answer) == wanted]
        return sum(found) / len(found)

    assert mean("global", ESTIMATED) > mean("global", "") + 0.02
    assert mean("own", ESTIMATED) > mean("own", "") - 0.02


def test_the_config_turns_it_on_and_prior_mixture_has_it_anyway():
    table = {"evaluation": {"priors": True}, "engine": {"backend": "batched", "workers": 1}}
    options = {"federation": tiny_federation(), "expert": None}
    for name in ("fedavg", "prior_mixture"):
        config = parse_config({**table, "algorithm": {"name": name}, "model": {"name": "mlp", "hidden": [4]}})
        assert assembly.build(config, **options).algorithm.priors is not None
    assert assembly.build(tiny_config("fedavg"), **options).algorithm.priors is None


def test_an_algorithm_that_does_not_say_is_refused():
    algorithm, setup = made("fine_tuned")
    with pytest.raises(ConfigError, match="mine does not say which label frequencies"):
        with_priors(algorithm._replace(frequencies=None), setup, "mine")


def test_a_regression_has_no_labels_to_count():
    algorithm, setup = made("fine_tuned")
    with pytest.raises(ConfigError, match=r"evaluation\.priors is about frequencies of labels"):
        with_priors(algorithm, setup._replace(num_classes=0), "fine_tuned")


def test_answers_are_a_softmax_of_scores_and_prior():
    algorithm, setup = made("local_only")
    ours = with_priors(algorithm, setup, "local_only")
    data, rng = tiny_federation().data([PLAIN], opted_in_only=False), Streams(0, "personalize", 0, (PLAIN,))
    sent = algorithm.delivery[-1].broadcast(algorithm.init_server(1), PLAIN, [])
    (state,) = ours.personalize(trees.stack([sent]), Nothing(), None, data, rng)
    x = torch.randn(5, FEATURES)
    scores = ours.priors.prior_free(sent, Nothing(), state, x)
    told = ours.answers[OWN].predict(sent, Nothing(), state, x)
    torch.testing.assert_close(told, F.log_softmax(scores + state.log_prior, -1))
