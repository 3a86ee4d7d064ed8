import pytest
import torch

from fedmoe.errors import MessageError
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.reliability import BINS, NO_BINS, reliability_bins, reliability_of, summed
from fedmoe.evaluation.score_message import score_message, scores_in

PROBS = torch.tensor([[0.95, 0.05], [0.55, 0.45], [0.58, 0.42], [1.0, 0.0]])
LABELS = torch.tensor([0, 1, 0, 0])
FOUND = reliability_bins(PROBS.log(), LABELS)


def test_bins_count_examples_confidence_and_right_answers():
    counts, confidence, right = FOUND
    assert counts == (0, 0, 0, 0, 0, 2, 0, 0, 0, 2)  # full confidence is in the last
    assert confidence[5] == pytest.approx(0.55 + 0.58) and confidence[9] == pytest.approx(1.95)
    assert right[5] == 1 and right[9] == 2


def test_results_have_sums_over_clients_that_took_part():
    def score(client, *, unseen=False, bins=FOUND):
        return Score(client, unseen, "after", "own", 0.5, 1.0, 4, {}, "estimated prior", False, bins)

    (row,) = reliability_of([score(0), score(1), score(2, unseen=True), score(3, bins=NO_BINS)])
    assert row["bins"] == [list(sums) for sums in summed([FOUND, FOUND])]  # as JSON gives them back
    assert row["answer"] == "estimated prior"
    assert sum(row["bins"][0]) == 8


HONEST = [Score(1, False, "after", "own", 0.5, 1.0, 4, {}, name, name == "b", FOUND) for name in ("a", "b")]


def test_answers_choices_and_bins_arrive_as_they_were_sent():
    assert scores_in(score_message(HONEST, ("a", "b")), 1, unseen=False, answers=("a", "b")) == HONEST


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("answer", torch.tensor([0, 2]), "answer is not within 0 … 1"),
        ("answer", torch.tensor([1, 1]), "more than once"),
        ("chosen", torch.tensor([0, 2]), "chosen is not within"),
        ("reliability", torch.zeros(2, 3, BINS - 1, dtype=torch.float64), "not three rows of bins"),
        ("reliability", torch.full((2, 3, BINS), 5.0, dtype=torch.float64), "no number of the examples"),
        ("reliability", torch.full((2, 3, BINS), torch.nan, dtype=torch.float64), "no number of the examples"),
    ],
)
def test_what_no_client_can_have_measured_is_refused(field, value, sentence):
    sent = score_message(HONEST, ("a", "b"))._replace(**{field: value})
    with pytest.raises(MessageError, match=sentence):
        scores_in(sent, 1, unseen=False, answers=("a", "b"))
