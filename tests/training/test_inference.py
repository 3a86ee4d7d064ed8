import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.clients.federation import examples, side_by_side
from fedmoe.training.inference import CHUNK, clients_of, pad_rows, per_example


def cohort(*sizes):
    return side_by_side([examples(torch.arange(1.0, n + 1)[:, None], torch.zeros(n).long()) for n in sizes])


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4))
@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_rows_of_padding_hold_zeros(backend, sizes):
    scale = torch.arange(1.0, len(sizes) + 1)
    predictions = per_example(
        lambda tree, batch: batch.x * tree["scale"] + 1, {"scale": scale}, cohort(*sizes), backend
    )
    for s, size in enumerate(sizes):
        assert predictions[s, :size, 0].tolist() == [(s + 1) * n + 1 for n in range(1, size + 1)]
        assert not predictions[s, size:].any()


def test_long_clients_are_read_in_pieces():
    lengths = []

    def spy(_tree, batch):
        lengths.append(len(batch))
        return batch.x

    data = cohort(2 * CHUNK + 3)
    assert torch.equal(per_example(spy, {}, data, "sequential"), data.x)
    assert lengths == [CHUNK, CHUNK, 3]


def test_tensors_beside_the_examples_go_along():
    data = cohort(2, 3)
    data = data._replace(extra={"prediction": data.x * 10})
    for backend in ("sequential", "batched"):
        sums = per_example(lambda _tree, batch: batch.x + batch.extra["prediction"], {}, data, backend)
        assert sums[1, :, 0].tolist() == [11, 22, 33]
    assert [one.extra["prediction"].shape[0] for one in clients_of(data)] == [2, 3]


def test_no_gradient_is_recorded():
    scale = torch.ones(1, requires_grad=True)
    for backend in ("sequential", "batched"):
        assert not per_example(lambda tree, batch: batch.x * tree, scale, cohort(2), backend).requires_grad


def test_ragged_tensors_are_padded_at_the_end():
    assert pad_rows([torch.tensor([1, 2]), torch.tensor([3])], 3).tolist() == [[1, 2, 0], [3, 0, 0]]
