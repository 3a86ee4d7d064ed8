"""A network's program on the kernels, and what is compared of it with PyTorch."""

import torch

from fedmoe.native.kernel import Kernel
from fedmoe.native.program import program_of


def kernel_of(module, shape):
    program = program_of(module, shape)
    params = dict(module.named_parameters())
    return Kernel(program, [tuple(params[name].shape) for name in program.params]), [params[n] for n in program.params]


def results(forward, params, x, direction):
    """Scores, and gradients of a projection of them by the parameters and the input."""
    x = x.detach().clone().requires_grad_()
    scores = forward(x)
    grads = torch.autograd.grad((scores * direction.to(scores.dtype)).sum(), [*params, x])
    return [scores.detach(), *grads]
