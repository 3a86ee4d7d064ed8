"""Frequencies, their estimate from unlabelled questions, and the calibration that clients fit together."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmoe.algorithms.label_priors import calibration as fitting
from fedmoe.algorithms.label_priors.calibration import Calibration, CalibrationConfig, Slope
from fedmoe.algorithms.label_priors.estimate import (
    EstimateConfig,
    answer,
    estimate_prior,
    maximum_a_posteriori,
    neutral_scores,
)
from fedmoe.algorithms.label_priors.frequencies import (
    check_log_prior,
    is_near,
    label_counts,
    log_frequencies,
    shrunk_frequencies,
    training_offset,
    uniform,
)
from fedmoe.algorithms.label_priors.label_groups import prior_notes
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.core_types import Examples
from fedmoe.errors import DataError
from fedmoe.streams import torch_stream

CLASSES = 5


def labelled(*labels: list[int]) -> Examples:
    return side_by_side([examples(torch.zeros(len(y), 1), torch.tensor(y, dtype=torch.int64)) for y in labels])


def test_frequencies_are_smoothed_count_real_rows_only_and_are_even_without_labels():
    log_SC = log_frequencies(label_counts(labelled([1, 1, 0, 1], []), 3))
    torch.testing.assert_close(log_SC.exp(), torch.tensor([[2 / 7, 4 / 7, 1 / 7], [1 / 3] * 3]))
    assert torch.equal(log_SC[1], uniform(3))


def test_the_offset_of_training_is_at_most_zero_finite_and_exactly_zero_for_equal_frequencies():
    offset_SC = training_offset(labelled([0, 0, 0, 1], [2, 1, 0]), 3)
    torch.testing.assert_close(offset_SC[0], torch.log(torch.tensor([1.0, 2 / 4, 1 / 4])))
    assert torch.equal(offset_SC[1], torch.zeros(3))


def shrunk(*counts: float) -> Tensor:
    return shrunk_frequencies(torch.tensor(counts)).exp()


def test_frequencies_that_differ_by_chance_are_even_and_others_are_kept():
    """The weight of Hausser & Strimmer (2009), by hand: of 300 records two labels hold 60%."""
    torch.testing.assert_close(shrunk(46.0, 54.0), torch.tensor([0.5, 0.5]))  # one standard deviation is 5
    weight = 0.8 / 29.9
    smoothed = torch.tensor([91.0] * 2 + [16.0] * 8) / 310
    torch.testing.assert_close(shrunk(*[90.0] * 2, *[15.0] * 8), weight / 10 + (1 - weight) * smoothed)


def test_one_record_and_none_are_no_evidence_and_a_label_that_never_came_stays_possible():
    for counts in ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
        torch.testing.assert_close(shrunk(*counts), torch.full((3,), 1 / 3))
    assert 0 < shrunk(200.0, 100.0, 0.0)[2] < 0.01


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8))
def test_shrunk_frequencies_lie_between_the_smoothed_and_even_ones(counts: list[int]):
    counts_C = torch.tensor(counts, dtype=torch.float32)
    found_C, smoothed_C, even = shrunk(*counts), log_frequencies(counts_C).exp(), 1 / len(counts)
    torch.testing.assert_close(found_C.sum(), torch.tensor(1.0))
    assert bool(((found_C - even).abs() <= (smoothed_C - even).abs() + 1e-6).all())


@pytest.mark.parametrize("num_classes", range(2, 40))
def test_frequencies_are_near_to_own_ones_that_are_even(num_classes):
    generator = torch_stream("near", num_classes)
    prior_C = torch.rand(num_classes, generator=generator).log_softmax(0)
    assert bool(is_near(prior_C, shrunk_frequencies(torch.zeros(num_classes))))


@pytest.mark.parametrize(("tilt", "at_home"), [(0.0, True), (0.09, True), (0.11, False), (0.4, False)])
def test_only_frequencies_that_differ_enough_tell_where_questions_come_from(tilt, at_home):
    """Own ones are (1/2 + tilt, 1/2 - tilt): the two differ from even ones by 2 tilt, summed."""
    own_C = torch.tensor([0.5 + tilt, 0.5 - tilt]).log()
    assert bool(is_near(own_C, own_C))
    assert bool(is_near(uniform(2), own_C)) == at_home
    assert bool(is_near(torch.tensor([0.5 - tilt, 0.5 + tilt]).log(), own_C)) == at_home


# The estimate


def questions(share_C: Tensor, count: int, *path: int | str, spread: float = 0.7) -> tuple[Tensor, Tensor]:
    """Points around one corner for each label: their log-likelihoods, exactly calibrated, and the labels."""
    generator = torch_stream("questions", *path)
    y_B = torch.multinomial(share_C, count, replacement=True, generator=generator)
    x_BC = F.one_hot(y_B, len(share_C)) + spread * torch.randn(count, len(share_C), generator=generator)
    return x_BC / spread**2, y_B


SHARES = st.lists(st.floats(0.02, 1.0), min_size=CLASSES, max_size=CLASSES).map(
    lambda mass: torch.tensor(mass) / sum(mass)
)


@settings(max_examples=15, deadline=None, database=None)
@given(SHARES, st.integers(0, 10**6))
def test_it_recovers_known_frequencies_from_calibrated_scores(share_C: Tensor, seed: int):
    scores_BC, y_B = questions(share_C, 2000, seed)
    found_C = estimate_prior(scores_BC, uniform(CLASSES), EstimateConfig(pseudo_counts=1.0)).exp()
    drawn_C = torch.bincount(y_B, minlength=CLASSES) / len(y_B)
    assert float((found_C - drawn_C).abs().sum()) / 2 < 0.06


@settings(max_examples=30, deadline=None, database=None)
@given(
    st.lists(st.lists(st.floats(-1e4, 1e4), min_size=CLASSES, max_size=CLASSES), min_size=1, max_size=8),
    SHARES,
    st.floats(0.01, 1e4),
)
def test_it_is_a_distribution_whatever_the_scores_are(rows: list[list[float]], own_C: Tensor, pseudo_counts: float):
    config = EstimateConfig(pseudo_counts=pseudo_counts, max_iterations=50)
    found_C = estimate_prior(torch.tensor(rows), own_C.log(), config)
    assert bool((found_C <= 1e-6).all())
    torch.testing.assert_close(found_C.exp().sum(), torch.tensor(1.0))


def test_it_ends_after_the_given_number_of_iterations_where_it_has_not_converged():
    scores_BC, _ = questions(torch.tensor([0.96, 0.01, 0.01, 0.01, 0.01]), 50, "bounded", spread=2.0)
    own_C = uniform(CLASSES)
    short, longer, longest = (
        estimate_prior(scores_BC, own_C, EstimateConfig(0.01, max_iterations=many)) for many in (1, 5, 10**6)
    )
    assert not torch.equal(short, longer)
    torch.testing.assert_close(longest, estimate_prior(scores_BC, own_C, EstimateConfig(0.01, max_iterations=5000)))


def test_the_order_of_questions_does_not_matter():
    scores_BC, _ = questions(torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]), 80, "order")
    own_C = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6]).log()
    turned = estimate_prior(scores_BC.flip(0), own_C, EstimateConfig())
    torch.testing.assert_close(turned, estimate_prior(scores_BC, own_C, EstimateConfig()), atol=1e-6, rtol=0)


def test_given_the_prior_answers_in_pieces_are_those_of_the_whole():
    scores_BC, _ = questions(torch.full((CLASSES,), 1 / CLASSES), 37, "pieces")
    prior_C = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]).log()
    whole = answer(scores_BC, prior_C)
    assert torch.equal(torch.cat([answer(part, prior_C) for part in scores_BC.split(10)]), whole)
    assert torch.equal(torch.cat([answer(row[None], prior_C) for row in scores_BC]), whole)


def test_it_stays_near_the_own_for_a_single_question_and_leaves_it_for_a_batch_of_others():
    own_C = log_frequencies(torch.tensor([60.0, 40.0, 0.0, 0.0, 0.0]))
    foreign_BC, _ = questions(torch.full((CLASSES,), 1 / CLASSES), 100, "foreign")
    home_BC, _ = questions(own_C.exp(), 100, "home")
    one = estimate_prior(foreign_BC[:1], own_C, EstimateConfig())
    assert float((one.exp() - own_C.exp()).abs().sum()) / 2 < 0.05
    away = estimate_prior(foreign_BC, own_C, EstimateConfig())
    assert float((away.exp() - 1 / CLASSES).abs().sum()) / 2 < 0.1
    home = estimate_prior(home_BC, own_C, EstimateConfig())
    assert float((home.exp() - own_C.exp()).abs().sum()) / 2 < 0.1


def test_odds_decide_between_centres_that_explain_a_batch_alike():
    own_C = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]).log()
    silent_BC = torch.zeros(3, CLASSES)  # says nothing of any label
    torch.testing.assert_close(estimate_prior(silent_BC, own_C, EstimateConfig(own_odds=1.01)), own_C)
    torch.testing.assert_close(estimate_prior(silent_BC, own_C, EstimateConfig(own_odds=0.99)), uniform(CLASSES))


def test_a_label_that_a_client_lacks_does_not_become_impossible():
    own_C = log_frequencies(torch.tensor([100.0, 0.0, 0.0, 0.0, 0.0]))
    scores_BC, y_B = questions(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), 50, "lacking", spread=0.2)
    for prior_C in (own_C, estimate_prior(scores_BC, own_C, EstimateConfig())):
        assert bool(prior_C.isfinite().all())
        assert float((answer(scores_BC, prior_C).argmax(1) == y_B).float().mean()) > 0.95


def test_expectation_maximisation_finds_the_maximum():
    """Against plain gradient ascent on the same objective."""
    scores_BC, _ = questions(torch.tensor([0.7, 0.1, 0.1, 0.05, 0.05]), 60, "maximum")
    scores_BC, centre_C = F.log_softmax(scores_BC.double(), -1), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).double().log()
    config = EstimateConfig(pseudo_counts=7.0, max_iterations=2000)
    theta_C = torch.zeros(CLASSES, dtype=torch.double, requires_grad=True)

    def objective() -> Tensor:
        log_C = F.log_softmax(theta_C, -1)
        return (scores_BC + log_C).logsumexp(-1).sum() + (7.0 * centre_C.exp() * (log_C - centre_C)).sum()

    optimizer = torch.optim.LBFGS([theta_C], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = maximum_a_posteriori(scores_BC, centre_C, config)
    torch.testing.assert_close(found.log_prior_C, F.log_softmax(theta_C.detach(), -1), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.objective, objective().detach(), atol=1e-6, rtol=0)


def test_what_an_answer_holds_is_taken_out_and_labels_called_impossible_stay_finite():
    scores_BC = neutral_scores(torch.tensor([[0.0, -math.inf, -1.0]]), torch.tensor([0.5, 0.25, 0.25]).log())
    assert bool(scores_BC.isfinite().all())
    assert scores_BC[0, 0] == pytest.approx(-math.log(0.5))


@pytest.mark.parametrize(
    ("scores", "prior", "sentence"),
    [
        (torch.zeros(0, 3), torch.full((3,), 1 / 3).log(), "no questions to estimate"),
        (torch.zeros(2, 3), torch.full((4,), 1 / 4).log(), "prior of shape .4,. is given, but the model knows 3"),
        (torch.zeros(2, 3), torch.zeros(3), "sum to 3"),
        (torch.zeros(2, 3), torch.full((3,), math.nan), "sum to nan"),
    ],
)
def test_bad_input_is_explained(scores: Tensor, prior: Tensor, sentence: str):
    with pytest.raises(DataError, match=sentence):
        estimate_prior(scores, prior, EstimateConfig())


def test_a_prior_that_is_one_is_given_back():
    prior_C = torch.tensor([0.2, 0.8]).log()
    assert check_log_prior(prior_C, 2) is prior_C


# The calibration


def miscalibrated(num_clients: int, rows: int) -> tuple[Tensor, Tensor, Examples]:
    """Scores (S, N, C) too sharp and shifted, the clients' training offsets, and the labels."""
    scores, offsets, labels = [], [], []
    for client in range(num_clients):
        share_C = torch.softmax(torch.randn(CLASSES, generator=torch_stream("share", client)), -1)
        scores_NC, y_N = questions(share_C, rows + client, "client", client)
        scores.append(2.0 * scores_NC + torch.linspace(-1, 1, CLASSES))
        offsets.append(share_C.log() - share_C.log().max())
        labels.append(examples(scores[-1], y_N))
    together = side_by_side(labels)
    return together.x, torch.stack(offsets), together


def federated_fit(scores_SNC: Tensor, offset_SC: Tensor, rows: Examples, config: CalibrationConfig) -> Calibration:
    fit, size = fitting.start(CLASSES), len(offset_SC)
    for _ in range(config.exchanges):
        ahead = fitting.looking_ahead(fit)
        sent_S = Calibration(ahead.log_scale.expand(size), ahead.biases.expand(size, CLASSES))
        sent = fitting.slopes(scores_SNC, offset_SC, rows, sent_S, config.clip)
        fit = fitting.step(fit, {s: Slope(*(part[s] for part in sent)) for s in range(size)}, config.ridge)
    return fit.at


def pooled_fit(scores_SNC: Tensor, offset_SC: Tensor, rows: Examples, ridge: float) -> Calibration:
    """By L-BFGS, with all rows in one place."""
    real_SN = torch.arange(rows.y.shape[1]) < rows.counts[:, None]
    scores_NC = scores_SNC[real_SN].double()
    offset_NC = offset_SC[:, None].expand_as(scores_SNC)[real_SN].double()
    at = Calibration(torch.zeros((), dtype=torch.double), torch.zeros(CLASSES, dtype=torch.double))
    for part in at:
        part.requires_grad_()
    optimizer = torch.optim.LBFGS(list(at), max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(fitting.calibrated(scores_NC, at) + offset_NC, rows.y[real_SN])
        loss = loss + ridge / 2 * sum(part.square().sum() for part in at)
        loss.backward()
        return loss

    optimizer.step(closure)
    return Calibration(*(part.detach().float() for part in at))


def test_the_federated_calibration_equals_the_fit_on_pooled_data():
    parts = miscalibrated(6, 40)
    config = CalibrationConfig(clip=1e3)
    found, expected = federated_fit(*parts, config), pooled_fit(*parts, config.ridge)
    assert expected.log_scale < -0.2 and expected.biases.abs().max() > 0.2  # there is something to find
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_clipped_too_it_does_not_matter_who_holds_which_row():
    """The same rows under the same offset, on one client or on three of different sizes."""
    scores_SNC, offset_SC, rows = miscalibrated(1, 60)
    parts = [examples(scores_SNC[0, at], rows.y[0, at]) for at in (slice(5), slice(5, 35), slice(35, 60))]
    spread = side_by_side(parts)
    config = CalibrationConfig(clip=0.5, exchanges=20)
    together = federated_fit(scores_SNC, offset_SC, rows, config)
    torch.testing.assert_close(federated_fit(spread.x, offset_SC.expand(3, -1), spread, config), together)
    alone = fitting.fit_alone(scores_SNC[0], offset_SC[0], rows.y[0], config)
    torch.testing.assert_close(alone, together)
    assert not torch.allclose(together.biases, federated_fit(scores_SNC, offset_SC, rows, CalibrationConfig()).biases)


def test_a_row_moves_the_calibration_by_no_more_than_its_clip():
    scores_SNC, offset_SC, rows = miscalibrated(2, 30)
    at_S = Calibration(torch.zeros(2), torch.zeros(2, CLASSES))
    by_row = fitting.row_gradients(50 * scores_SNC, offset_SC, rows.y, at_S, clip=0.7)
    norm_SN = (by_row.biases.square().sum(-1) + by_row.log_scale.square()).sqrt()
    assert float(norm_SN.max()) == pytest.approx(0.7)


def test_the_gradient_is_that_of_the_cross_entropy():
    scores_SNC, offset_SC, rows = miscalibrated(1, 20)
    at = Calibration(torch.tensor(0.3), torch.linspace(-0.5, 0.5, CLASSES))
    for part in at:
        part.requires_grad_()
    F.cross_entropy(fitting.calibrated(scores_SNC[0], at) + offset_SC[0], rows.y[0]).backward()
    at_S = Calibration(*(part.detach()[None] for part in at))
    sent = fitting.slopes(scores_SNC, offset_SC, rows, at_S, clip=1e6)
    torch.testing.assert_close((sent.log_scale[0], sent.biases[0]), (at.log_scale.grad, at.biases.grad))


def test_clients_without_validation_rows_have_no_vote_and_one_count_is_capped():
    scores_SNC, offset_SC, rows = miscalibrated(2, 30)
    at_S = Calibration(torch.zeros(2), torch.zeros(2, CLASSES))
    sent = fitting.slopes(scores_SNC, offset_SC, rows, at_S, clip=4.0)
    first, second = (Slope(*(part[s] for part in sent)) for s in range(2))
    none = Slope(torch.zeros(()), torch.zeros(CLASSES), torch.zeros(()))
    start = fitting.start(CLASSES)
    assert fitting.step(start, {0: none}, 0.01) == start
    torch.testing.assert_close(fitting.step(start, {0: first, 1: none}, 0.01), fitting.step(start, {0: first}, 0.01))
    liar = first._replace(num_examples=torch.tensor(1e6))
    honest = second._replace(num_examples=torch.tensor(50.0))
    capped = fitting.step(start, {0: liar, 1: honest}, 0.01, max_weight=50.0)
    even = fitting.step(start, {0: first._replace(num_examples=torch.tensor(50.0)), 1: honest}, 0.01)
    torch.testing.assert_close(capped, even)


def test_a_slope_longer_than_the_clip_is_rejected():
    slope = Slope(torch.tensor(0.0), torch.tensor([3.0, 0.0, -3.0]), torch.tensor(5.0))
    assert "above the clip of 4" in str(fitting.rejection(slope, 4.0))
    assert fitting.rejection(slope, 5.0) is None


def test_a_run_says_which_labels_never_share_a_client_and_who_has_none():
    def notes(*label_sets: list[int], unlabelled: tuple[int, ...] = (), fits_together: bool = True) -> list[str]:
        parts = {f"c{i}": {"train": (torch.zeros(len(y), 1), torch.tensor(y))} for i, y in enumerate(label_sets)}
        federation = federation_from_clients(parts, num_classes=4)
        return prior_notes(federation, unlabelled, fits_together=fits_together)

    apart = notes([0, 1] * 5, [2, 3] * 5)
    assert len(apart) == 1 and "2 groups that no client holds together, such as '0' and '2'" in apart[0]
    assert notes([0, 1] * 5, [2, 3] * 5, fits_together=False) == []
    assert notes([0, 1] * 5, [2, 3] * 5, [1, 2] * 5) == []
    assert "start from even ones" in notes([0, 1] * 5, unlabelled=(0,))[0]


def test_where_labels_never_share_a_client_the_ridge_keeps_their_biases_even():
    """Two clients with labels {0, 1} and {2, 3}: nothing tells the pairs apart, so the pairs' biases balance."""
    scores, offsets = [], []
    for client, share in enumerate(([0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5, 0.0])):
        scores.append(examples(*questions(torch.tensor(share), 200, "pair", client)))
        offsets.append(torch.tensor(share).clamp_min(1e-9).log())
    rows = side_by_side(scores)
    found = federated_fit(rows.x, torch.stack(offsets), rows, CalibrationConfig())
    assert abs(float(found.biases[:2].mean() - found.biases[2:4].mean())) < 0.05
