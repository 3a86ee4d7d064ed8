"""Prior mixture: rounds that learn no label frequencies, the client's stack and choice, and answers under priors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from algorithms.digits import run_digits
from builders import (
    CLASSES,
    FEATURES,
    ONE_RECORD,
    PARTICIPANTS,
    SOME_OPTED_OUT,
    make_expert,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.fedavg import Broadcast, FedAvgConfig, fedavg
from fedmoe.algorithms.fine_tuned import fine_tuned
from fedmoe.algorithms.label_priors import calibration as fitting
from fedmoe.algorithms.label_priors.answers import BALANCED, ESTIMATED, OWN
from fedmoe.algorithms.label_priors.calibration import Calibration, CalibrationConfig
from fedmoe.algorithms.label_priors.frequencies import (
    label_counts,
    log_frequencies,
    shrunk_frequencies,
    training_offset,
    uniform,
)
from fedmoe.algorithms.prior_mixture import algorithm as prior_mixture_module
from fedmoe.algorithms.prior_mixture.algorithm import PriorMixtureConfig, prior_mixture
from fedmoe.algorithms.prior_mixture.personal import (
    CANDIDATES,
    TRAINED,
    Mixture,
    PersonalState,
    candidate_scores,
    train_chosen,
)
from fedmoe.algorithms.prior_mixture.stack import choose, fit_weights, halves, stacked
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.streams import Streams, torch_stream

EXPERT = tiny_setup().expert
FEW = CalibrationConfig(exchanges=3)


def tiny(backend="batched", **settings):
    return prior_mixture(PriorMixtureConfig(calibration=FEW, **settings), tiny_setup(backend))


# The rounds


def update_of(algorithm, data, client=0):
    sent, rng = trees.stack([Broadcast(EXPERT.init(1))]), Streams(0, "round:train", 1, (client,))
    return algorithm.round[0].local_update(sent, Nothing(), data, rng)[1]


@pytest.mark.parametrize("backend", ["batched", "sequential", "native"])
def test_with_equal_frequencies_a_round_is_fedavgs_bit_for_bit(backend):
    x, y = torch.randn(12, FEATURES, generator=torch_stream("equal")), torch.arange(12) % CLASSES
    data = tiny_federation().data([0], opted_in_only=True).map(lambda _: side_by_side([examples(x, y)]))
    ours, plain = (update_of(made, data) for made in (tiny(backend), fedavg(FedAvgConfig(), tiny_setup(backend))))
    assert trees.to_bytes(ours) == trees.to_bytes(plain)


def test_shifting_the_log_frequencies_by_a_constant_changes_nothing(monkeypatch):
    data = tiny_federation().data([SOME_OPTED_OUT], opted_in_only=True)
    as_it_is = update_of(tiny(), data, SOME_OPTED_OUT)
    monkeypatch.setattr(prior_mixture_module, "training_offset", lambda *args: training_offset(*args) + 3.0)
    torch.testing.assert_close(update_of(tiny(), data, SOME_OPTED_OUT), as_it_is)
    monkeypatch.setattr(prior_mixture_module, "training_offset", lambda *args: 2 * training_offset(*args))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(update_of(tiny(), data, SOME_OPTED_OUT), as_it_is)


def test_a_round_follows_the_smoothed_frequencies_of_opted_in_records():
    """In a few lines of plain torch: -log of (n_y + 1) exp(s_y) / sum_c (n_c + 1) exp(s_c)."""
    data = tiny_federation().data([SOME_OPTED_OUT], opted_in_only=True)
    rng = Streams(0, "round:train", 1, (SOME_OPTED_OUT,))
    update = update_of(tiny("sequential"), data, SOME_OPTED_OUT)
    count = int(data.train.counts[0])
    x, y = data.train.x[0, :count], data.train.y[0, :count]
    weight = torch.bincount(y, minlength=CLASSES) + 1.0
    module = make_expert()
    module.load_state_dict(EXPERT.init(1))
    optimizer, shuffle = torch.optim.SGD(module.parameters(), lr=0.2), rng.generators("batches")[0]
    for _ in range(2):
        for rows in torch.randperm(count, generator=shuffle).split(4):
            optimizer.zero_grad()
            weighted = weight * module(x[rows]).exp()
            (-(weighted[torch.arange(len(rows)), y[rows]] / weighted.sum(1)).log().mean()).backward()
            optimizer.step()
    torch.testing.assert_close(trees.pick(update.model, 0), dict(sorted(module.state_dict().items())))


def test_the_output_row_of_a_label_that_a_client_lacks_does_not_come_back_as_it_was_sent():
    x, y = torch.randn(8, FEATURES, generator=torch_stream("lacks")), torch.zeros(8, dtype=torch.int64)
    data = tiny_federation().data([0], opted_in_only=True).map(lambda _: side_by_side([examples(x, y)]))
    model = trees.pick(update_of(tiny(), data).model, 0)
    *_, last = [name for name in model if name.endswith("weight")]
    assert bool((model[last] != EXPERT.init(1)[last]).any(dim=1).all())


def test_the_best_round_is_chosen_by_the_adjusted_loss():
    setup, client = tiny_setup(), SOME_OPTED_OUT
    data = tiny_federation().data([client], opted_in_only=True)
    sent = Broadcast(EXPERT.init(1))
    validation = prior_mixture(PriorMixtureConfig(), setup).validation
    rng = Streams(0, "validation:validate", 1, (client,))
    _, update, _ = validation.exchange.local_update(trees.stack([sent]), Nothing(), data, rng)
    count = int(data.validation.counts[0])
    scores = EXPERT(sent.model, data.validation.x[0, :count]) + training_offset(data.train, CLASSES)[0]
    torch.testing.assert_close(update.validation_loss[0], F.cross_entropy(scores, data.validation.y[0, :count]))


def test_without_adjustment_the_rounds_are_fedavgs(tmp_path: Path):
    ours = run_algorithm(tiny(adjust=False), tiny_federation(), tmp_path / "ours")
    plain = run_algorithm(fedavg(FedAvgConfig(), tiny_setup()), tiny_federation(), tmp_path / "plain")
    assert trees.to_bytes(ours.server.shared) == trees.to_bytes(plain.server)


# Calibration


def test_the_exchanges_fit_what_a_client_with_all_rows_would_fit(tmp_path: Path):
    """The server ends where the same steps end that are computed from all opted-in validation rows in one place."""
    config = PriorMixtureConfig(calibration=CalibrationConfig(exchanges=8))
    federation = tiny_federation()
    server = run_algorithm(prior_mixture(config, tiny_setup()), federation, tmp_path / "store").server
    model = server.shared.best_model
    fit = fitting.start(CLASSES)
    data = {client: federation.data([client], opted_in_only=True) for client in PARTICIPANTS}
    for _ in range(8):
        ahead_S = Calibration(*(part[None] for part in fitting.looking_ahead(fit)))
        sent = {
            client: trees.pick(
                fitting.slopes(
                    EXPERT(model, one.validation.x[0])[None],
                    training_offset(one.train, CLASSES),
                    one.validation,
                    ahead_S,
                    config.calibration.clip,
                ),
                0,
            )
            for client, one in data.items()
        }
        fit = fitting.step(fit, sent, config.calibration.ridge)
    torch.testing.assert_close(server.fit.at, fit.at, atol=1e-5, rtol=1e-4)
    assert fit.at.biases.abs().max() > 0.05


def test_what_clients_send_after_the_rounds_is_a_slope_and_nothing_else(tmp_path: Path):
    outcome, _ = run_spied(tiny(), tiny_federation(), tmp_path / "store")
    sent = outcome.manifest["sent_by_clients"]
    assert {name for name in sent if name.startswith("calibrate")} == {f"calibrate {n}" for n in (1, 2, 3)}
    for number in (1, 2, 3):
        assert {*sent[f"calibrate {number}"]} == {"log_scale", "biases", "num_examples"}


# On the client


def test_halves_share_no_row_and_hold_them_all():
    federation = tiny_federation()
    validation = federation.data([0, ONE_RECORD, 3], opted_in_only=False).validation
    first, second = halves(validation, Streams(0, "personalize", 0, (0, ONE_RECORD, 3)))
    assert first.counts.tolist() == [2, 0, 2] and second.counts.tolist() == [2, 0, 1]
    for s, count in enumerate(validation.counts.tolist()):
        parts = [half.x[s, : half.counts[s]] for half in (first, second)]
        together = {tuple(row) for part in parts for row in part.tolist()}
        assert together == {tuple(row) for row in validation.x[s, :count].tolist()} and len(together) == count


def experts(*quality: float, rows: int = 60):
    """Scores (K, N, C) of experts that see the label more or less clearly, and the labels."""
    y = torch.arange(rows) % CLASSES
    noise = torch.randn(len(quality), rows, CLASSES, generator=torch_stream("experts", rows))
    return torch.stack([q * F.one_hot(y, CLASSES) + noise[k] for k, q in enumerate(quality)]), y


def test_weights_of_the_stack_minimise_the_penalised_loss():
    scores, y = experts(1.0, 3.0, 0.5)
    prior = torch.tensor([0.5, 0.3, 0.2]).log()
    weights = fit_weights(scores, prior, y, pull=10.0).requires_grad_()
    shared = torch.tensor([1.0, 0.0, 0.0])
    loss = F.cross_entropy(stacked(scores, weights) + prior, y, reduction="sum")
    (loss + 5.0 * (weights - shared).square().sum()).backward()
    assert weights.grad.abs().max() < 1e-3


def test_a_specialist_that_knows_more_gets_weight_and_a_strong_pull_keeps_the_shared():
    better, y = experts(0.2, 4.0, 0.0)
    assert fit_weights(better, uniform(CLASSES), y, pull=1.0)[1] > 0.5
    held = fit_weights(better, uniform(CLASSES), y, pull=1e6)
    torch.testing.assert_close(held, torch.tensor([1.0, 0.0, 0.0]), atol=1e-3, rtol=0)
    assert torch.equal(fit_weights(better[:, :0], uniform(CLASSES), y[:0], pull=1.0), torch.tensor([1.0, 0.0, 0.0]))


def test_another_candidate_is_chosen_where_it_wins_by_the_margin_only():
    generator = torch_stream("losses")
    noise = 0.5 * torch.randn(2, 100, generator=generator)
    close, clear = noise[0] - 0.02, noise[0] - 1.0 + noise[1]
    assert choose(torch.stack([noise[0], noise[1], clear]), margin=2.0, default=0) == 2
    assert choose(torch.stack([noise[0], close + noise[1] - noise[1].mean()]), margin=2.0, default=0) == 0
    assert choose(torch.stack([noise[0], close]), margin=0.0, default=0) == 1
    assert choose(torch.zeros(3, 1), margin=0.0, default=0) == 0  # one row is no evidence


def personal_state(choice: int = 0) -> PersonalState:
    counts = torch.tensor([5.0, 1.0, 0.0])
    mixture = Mixture(EXPERT.init(4), tiny_setup().gate.init(5))
    weights = torch.tensor([0.5, 0.3, 0.2])
    frequencies = log_frequencies(counts), log_frequencies(2 * counts)
    return PersonalState(EXPERT.init(2), EXPERT.init(3), mixture, weights, torch.tensor(choice), *frequencies)


def sent_by(algorithm, seed=1):
    server = algorithm.init_server(seed)
    calibration = Calibration(torch.tensor(0.4), torch.tensor([0.3, -0.1, -0.2]))
    return algorithm.delivery[-1].broadcast(server._replace(fit=server.fit._replace(at=calibration)), 0, [])


@pytest.mark.parametrize("name", CANDIDATES)
def test_predict_is_row_wise_and_adds_the_stored_prior_once(name):
    algorithm, x = tiny(), torch.randn(9, FEATURES, generator=torch_stream("rows"))
    sent, personal = sent_by(algorithm), personal_state(CANDIDATES.index(name))
    whole = algorithm.predict(sent, Nothing(), personal, x)
    pieces = torch.cat([algorithm.predict(sent, Nothing(), personal, part) for part in x.split(2)])
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)
    scores = candidate_scores(tiny_setup(), name, sent, personal, x)
    torch.testing.assert_close(whole, F.log_softmax(scores + personal.log_prior, -1))
    torch.testing.assert_close(algorithm.answers[OWN].predict(sent, Nothing(), personal, x), whole)


@pytest.mark.parametrize("name", CANDIDATES)
def test_elsewhere_the_shared_expert_answers_whatever_a_client_chose_at_home(name):
    algorithm, x = tiny(), torch.randn(9, FEATURES, generator=torch_stream("elsewhere"))
    sent, personal = sent_by(algorithm), personal_state(CANDIDATES.index(name))
    shared = algorithm.priors.prior_free(sent, Nothing(), personal, x)
    torch.testing.assert_close(
        algorithm.answers[BALANCED].predict(sent, Nothing(), personal, x), F.log_softmax(shared, -1)
    )
    even_at_home = personal._replace(log_prior=uniform(CLASSES))
    scores = candidate_scores(tiny_setup(), name, sent, even_at_home, x)
    at_home = algorithm.answers[BALANCED].predict(sent, Nothing(), even_at_home, x)
    torch.testing.assert_close(at_home, F.log_softmax(scores, -1))


def test_candidates_are_what_they_are_called():
    algorithm, x = tiny(), torch.randn(4, FEATURES, generator=torch_stream("named"))
    sent, state = sent_by(algorithm), personal_state()
    shared = torch.tensor(0.4).exp() * EXPERT(sent.shared.model, x) + torch.tensor([0.3, -0.1, -0.2])
    specialist, local = EXPERT(state.specialist, x), EXPERT(state.local, x)
    gate = torch.sigmoid(tiny_setup().gate(state.mixture.gate, x))
    first = F.softmax(EXPERT(state.mixture.specialist, x) + state.held, -1)
    mixed = (gate * first + (1 - gate) * F.softmax(shared + state.held, -1)).log() - state.held
    expected = {
        "shared": shared,
        "specialist": specialist,
        "local": local,
        "stack": 0.5 * shared + 0.3 * specialist + 0.2 * local,
        "mixture": mixed,
    }
    for choice, name in enumerate(CANDIDATES):
        found = algorithm.predict(sent, Nothing(), personal_state(choice), x)
        torch.testing.assert_close(found, F.log_softmax(expected[name] + state.log_prior, -1), msg=name)
        assert algorithm.choice(personal_state(choice)) == name


def test_the_stored_prior_counts_all_records_and_what_competes_sees_the_first_half_of_validation():
    federation, algorithm = tiny_federation(), tiny(margin=1e9)  # nobody leaves the shared expert
    data = federation.data([SOME_OPTED_OUT], opted_in_only=False)
    sent_S = trees.stack([sent_by(algorithm)])
    rng = Streams(0, "personalize", 0, (SOME_OPTED_OUT,))
    found = trees.pick(algorithm.personalize(sent_S, Nothing(), None, data, rng), 0)
    counts = label_counts(data.train, CLASSES)[0] + label_counts(data.validation, CLASSES)[0]
    torch.testing.assert_close(found.log_prior, shrunk_frequencies(counts))
    _, second = halves(data.validation, rng)
    other = data.validation.x.clone()
    for row in second.x[0, : second.counts[0]]:
        other[0][(other[0] == row).all(1)] = 100.0
    moved = type(data)(data.train, data.validation._replace(x=other))
    again = trees.pick(algorithm.personalize(sent_S, Nothing(), None, moved, rng), 0)
    for name in ("specialist", "local", "mixture", "weights"):
        assert trees.to_bytes({"part": getattr(found, name)}) == trees.to_bytes({"part": getattr(again, name)}), name


@pytest.mark.parametrize("name", ["specialist", "local", "mixture"])
def test_the_expert_that_won_is_trained_once_more_with_all_validation_rows(name):
    """Of the client that chose it, and of nobody else; whoever is in the cohort."""
    setup, algorithm, clients = tiny_setup(), tiny(), (0, 1, SOME_OPTED_OUT)
    data = tiny_federation().data(clients, opted_in_only=False)
    sent_S, offset_SC = trees.stack([sent_by(algorithm)] * 3), training_offset(data.train, CLASSES)
    choice = torch.tensor([0, CANDIDATES.index(name), 0])
    before_S = trees.stack([personal_state()] * 3)._replace(choice=choice)
    rng = Streams(0, "personalize", 0, clients)
    after_S = train_chosen(setup, sent_S, before_S, data, offset_SC, rng)
    alone = tiny_federation().data([1], opted_in_only=False)
    expected = TRAINED[name](
        setup, trees.stack([sent_by(algorithm)]), alone, offset_SC[1:2], rng._replace(clients=(1,))
    )
    torch.testing.assert_close(trees.pick(getattr(after_S, name), 1), trees.pick(expected, 0))
    for s, client_fields in (
        (0, PersonalState._fields),
        (1, {*PersonalState._fields} - {name}),
        (2, PersonalState._fields),
    ):
        for field in client_fields:
            old, new = ({field: trees.pick(getattr(state, field), s)} for state in (before_S, after_S))
            assert trees.to_bytes(old) == trees.to_bytes(new), field


def test_personalising_ends_with_the_expert_that_won():
    """Nobody leaves the default, a specialist: it is the one that all validation rows stopped."""
    setup, algorithm, clients = tiny_setup(), tiny(margin=1e9), (0,)
    data = tiny_federation().data(clients, opted_in_only=False)
    sent_S = trees.stack([sent_by(algorithm)._replace(default=torch.tensor(CANDIDATES.index("specialist")))])
    rng = Streams(0, "personalize", 0, clients)
    final_S = algorithm.personalize(sent_S, None, None, data, rng)
    expected_S = TRAINED["specialist"](setup, sent_S, data, training_offset(data.train, CLASSES), rng)
    assert trees.to_bytes({"part": final_S.specialist}) == trees.to_bytes({"part": expected_S})


def test_a_client_without_labels_starts_from_uniform(tmp_path: Path):
    algorithm = tiny()
    empty = tiny_federation().data([5], opted_in_only=False)
    sent_S = trees.stack([sent_by(algorithm)])
    found = trees.pick(algorithm.personalize(sent_S, Nothing(), None, empty, Streams(0, "personalize", 0, (5,))), 0)
    assert torch.equal(found.log_prior, uniform(CLASSES)) and algorithm.choice(found) == "shared"


# All together


def test_it_is_better_at_home_and_elsewhere_at_once_on_digits(tmp_path: Path):
    """One rule for both, frequencies estimated from unlabelled questions: against FedAvg and fine-tuning."""
    ours = run_digits(lambda setup: prior_mixture(PriorMixtureConfig(), setup), tmp_path / "ours")
    tuned = run_digits(lambda setup: fine_tuned(FedAvgConfig(), setup), tmp_path / "tuned")

    def mean(scores, data, model, answer=""):
        found = [s.accuracy for s in scores if (s.data, s.model, s.answer, s.unseen) == (data, model, answer, False)]
        return sum(found) / len(found)

    assert mean(ours, "own", "after", ESTIMATED) > mean(tuned, "own", "before") + 0.02
    assert mean(ours, "global", "after", ESTIMATED) > mean(tuned, "global", "after") + 0.02
    assert mean(ours, "global", "after", ESTIMATED) > mean(ours, "global", "after", OWN)
    assert mean(ours, "own", "after", ESTIMATED) > mean(ours, "own", "after", BALANCED)
    assert {s.answer for s in ours if s.chosen} <= {*CANDIDATES}
