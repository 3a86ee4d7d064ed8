"""Prior mixture: clients vote on whether specialists or the shared expert are the better default."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from builders import CLASSES, FEATURES, PARTICIPANTS, SOME_OPTED_OUT, run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.label_priors.calibration import CalibrationConfig
from fedmoe.algorithms.label_priors.frequencies import training_offset
from fedmoe.algorithms.prior_mixture import vote as voting
from fedmoe.algorithms.prior_mixture.algorithm import PriorMixtureConfig, prior_mixture
from fedmoe.algorithms.prior_mixture.personal import SHARED, SPECIALIST, fine_tune
from fedmoe.algorithms.prior_mixture.stack import halves
from fedmoe.algorithms.prior_mixture.vote import LARGEST_GAIN, Vote, elected, rejection
from fedmoe.clients.federation import examples, side_by_side
from fedmoe.core_types import ClientData
from fedmoe.streams import Streams, torch_stream

SETUP = tiny_setup()


def tiny(**settings):
    return prior_mixture(PriorMixtureConfig(calibration=CalibrationConfig(exchanges=2), **settings), SETUP)


def votes(*gains: float, rows: float = 3.0) -> dict[int, Vote]:
    return {client: Vote(torch.tensor(gain), torch.tensor(rows)) for client, gain in enumerate(gains)}


def test_specialists_are_the_default_where_their_mean_gain_is_above_a_standard_error():
    assert elected(votes(0.1, 0.2, 0.3)) == SPECIALIST  # mean 0.2, standard error 0.058
    assert elected(votes(-0.3, 0.1, 0.4)) == SHARED  # 0.067, 0.20
    assert elected(votes(-0.1, -0.2, -0.3)) == SHARED


def test_a_client_without_rows_has_no_vote_and_one_vote_decides_nothing():
    nothing = votes(-9.0, rows=0.0)
    assert elected({**votes(0.1, 0.2, 0.3), 7: nothing[0]}) == SPECIALIST
    assert elected(votes(1.0)) == elected({}) == elected(nothing) == SHARED


def vote_on(data: ClientData, client: int = 0) -> Vote:
    algorithm = tiny()
    sent_S = trees.stack([algorithm.after_rounds[-1].broadcast(algorithm.init_server(1), client, [])])
    rng = Streams(0, "after_rounds:vote", 3, (client,))
    _, update, _ = algorithm.after_rounds[-1].local_update(sent_S, None, data, rng)
    return trees.pick(update, 0)


def test_a_vote_is_the_mean_gain_of_the_specialist_on_rows_that_nothing_was_fitted_on():
    data = tiny_federation().data([SOME_OPTED_OUT], opted_in_only=True)
    rng = Streams(0, "after_rounds:vote", 3, (SOME_OPTED_OUT,))
    algorithm = tiny()
    sent_S = trees.stack([algorithm.after_rounds[-1].broadcast(algorithm.init_server(1), SOME_OPTED_OUT, [])])
    fitting, choosing = halves(data.validation, rng)
    offset = training_offset(data.train, CLASSES)
    own = trees.pick(fine_tune(SETUP, sent_S, ClientData(data.train, fitting), offset, rng), 0)
    count = int(choosing.counts[0])
    x, y = choosing.x[0, :count], choosing.y[0, :count]
    shared = F.cross_entropy(SETUP.expert(trees.pick(sent_S, 0).shared.model, x) + offset[0], y)
    specialist = F.cross_entropy(SETUP.expert(own, x) + offset[0], y)
    found = vote_on(data, SOME_OPTED_OUT)
    assert count and float(found.num_examples) == count
    torch.testing.assert_close(found.gain, shared - specialist)
    assert abs(float(found.gain)) > 1e-4


def test_a_client_with_nothing_to_train_on_or_to_compare_by_has_no_vote():
    data = tiny_federation().data([0], opted_in_only=True)
    none = side_by_side([examples(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))])
    for poor in (ClientData(none, data.validation), ClientData(data.train, none)):
        found = vote_on(poor)
        assert float(found.gain) == float(found.num_examples) == 0


def test_no_row_counts_for_more_than_the_bound(monkeypatch):
    data = tiny_federation().data([0], opted_in_only=True)
    loud = {name: 1e4 * tensor for name, tensor in SETUP.expert.init(9).items()}
    monkeypatch.setattr(voting, "fine_tune", lambda *_: trees.stack([loud]))
    assert abs(float(vote_on(data).gain)) <= LARGEST_GAIN


@pytest.mark.parametrize("gain", [2.5, -2.5, float("nan")])
def test_a_vote_beyond_the_bound_is_rejected(gain):
    assert "beyond the bound of 2" in rejection(Vote(torch.tensor(gain), torch.tensor(3.0)))
    assert rejection(Vote(torch.tensor(LARGEST_GAIN), torch.tensor(3.0))) is None


def test_every_client_that_opted_in_is_asked_once_after_the_calibration(tmp_path: Path):
    outcome = run_algorithm(tiny(), tiny_federation(), tmp_path / "store")
    assert [record.phase for record in outcome.records].count("after_rounds") == 3
    assert outcome.records[-1].clients == list(PARTICIPANTS)
    assert {*outcome.manifest["sent_by_clients"]["vote"]} == {"gain", "num_examples"}


@pytest.mark.parametrize("default", [SHARED, SPECIALIST])
def test_clients_start_from_what_was_voted_for_but_for_those_without_a_specialist(default):
    """A margin that no candidate can reach: everybody stays with the default."""
    algorithm = tiny(margin=1e9)
    server = algorithm.init_server(1)._replace(default=torch.tensor(default))
    clients = (0, SOME_OPTED_OUT, 5)  # the last has no labels
    sent_S = trees.stack([algorithm.delivery[-1].broadcast(server, client, []) for client in clients])
    data = tiny_federation().data(list(clients), opted_in_only=False)
    found_S = algorithm.personalize(sent_S, None, None, data, Streams(0, "personalize", 0, clients))
    assert found_S.choice.tolist() == [default, default, SHARED]


def test_the_server_keeps_what_most_votes_say(tmp_path: Path, monkeypatch):
    """The same run where specialists are ahead for nearly everybody, and where they are behind."""

    def run(quality: float) -> int:
        monkeypatch.setattr(
            voting, "vote", lambda _setup, _sent, data, rng: noisy_votes(quality, len(data.train.counts), rng)
        )
        return int(run_algorithm(tiny(), tiny_federation(), tmp_path / str(quality)).server.default)

    assert run(0.5) == SPECIALIST and run(-0.5) == SHARED


def noisy_votes(quality: float, count: int, rng: Streams) -> Vote:
    noise = [0.1 * torch.randn((), generator=torch_stream("votes", client)) for client in rng.clients]
    assert len(noise) == count
    return Vote(quality + torch.stack(noise), torch.ones(count))
