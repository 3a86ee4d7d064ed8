import pytest
import torch

from fedmoe.training.optimizers import Adam, Sgd, descend, init_optimizer_state

PAIRS = [
    (Sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (Sgd(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    (Adam(1e-2), lambda p: torch.optim.Adam(p, lr=1e-2)),
    (Adam(1e-3, 0.8, 0.99, 1e-4), lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.99), eps=1e-4)),
    (Sgd(0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
    (Sgd(0.05, 0.9, 0.3), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.3)),
    (Adam(1e-2, weight_decay=0.3), lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3)),
    (Adam(1e-2, weight_decay=0.3, decoupled=True), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3)),
]


def reference(make, start, grads):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
        yield parameter.detach().clone()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_step_is_the_one_of_torch_optim(ours, theirs):
    rng = torch.Generator().manual_seed(0)
    start, grads = torch.randn(2, 7, generator=rng), torch.randn(20, 2, 7, generator=rng)
    grads[:, :, 0], grads[:, :, 1] = 0, 1e-7  # where Adam's epsilon is all that matters
    flat, state = start.clone(), init_optimizer_state(ours, start)
    for step, expected in enumerate(reference(theirs, start, grads), 1):
        descend(ours, flat, grads[step - 1], state, step, ours.learning_rate)
        torch.testing.assert_close(flat, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_clients_at_different_step_counts_step_as_if_alone(ours, theirs):
    """Client 1 joins at step 6: its bias correction starts with its own first step."""
    rng = torch.Generator().manual_seed(1)
    start, grads = torch.randn(2, 5, generator=rng), torch.randn(15, 2, 5, generator=rng)
    grads[:, :, 0], grads[:, :, 1] = 0, 1e-7
    flat, state = start.clone(), init_optimizer_state(ours, start)
    for step in range(1, 16):
        rows = [0] if step < 6 else [0, 1]
        part, held = flat[rows], {name: part_of_state[rows] for name, part_of_state in state.items()}
        descend(ours, part, grads[step - 1][rows], held, torch.tensor([[step], [step - 5]])[rows], ours.learning_rate)
        flat[rows] = part
        for name, part_of_state in held.items():
            state[name][rows] = part_of_state
    for s, taken in ((0, grads[:, 0]), (1, grads[5:, 1])):
        *_, expected = reference(theirs, start[s], taken)
        torch.testing.assert_close(flat[s], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [Sgd(0.1, 0.9, 0.5), Adam(0.1, weight_decay=0.5, decoupled=True)])
def test_weights_that_are_not_trained_do_not_decay(optimizer):
    flat, state = torch.ones(1, 3), init_optimizer_state(optimizer, torch.ones(1, 3))
    for step in (1, 2):
        descend(optimizer, flat, torch.zeros(1, 3), state, step, 0.1, torch.tensor([True, False, True]))
    assert flat[0, 1] < 0.95 and flat[0, [0, 2]].tolist() == [1.0, 1.0]
