import torch
from torch.distributions import Normal

from fedmoe.models.vae import LATENT, log_density, negative_bound, vae_network
from fedmoe.streams import torch_stream

NETWORK = vae_network((2, 3))
X = torch.randn(5, 2, 3, generator=torch_stream("x"))


def constant_decoder(scale=0.5):
    """Restores the same point whatever the latent variable, so that p(x) is known."""
    params = {name: torch.zeros_like(leaf) for name, leaf in NETWORK.init(0).items()}
    params["decoder.4.bias"] = torch.arange(6.0) / 6
    params["log_scale"] = torch.tensor([scale]).log()
    return params, Normal(params["decoder.4.bias"], scale).log_prob(X.flatten(1)).sum(1)


def noise(*shape):
    return torch.randn(*shape, generator=torch_stream("noise"))


def test_density_and_bound_are_exact_where_the_latent_variable_says_nothing():
    params, expected = constant_decoder()
    torch.testing.assert_close(log_density(NETWORK, params, X, noise(3, LATENT)), expected)
    torch.testing.assert_close(-negative_bound(NETWORK, params, X, noise(5, LATENT)), expected)


def test_importance_weights_make_up_for_a_wrong_encoder_and_the_bound_pays_for_it():
    params, expected = constant_decoder()
    bias = params["encoder.4.bias"].clone()
    bias[0] = 0.4  # one latent dimension is read as 0.4 on average
    params["encoder.4.bias"] = bias
    torch.testing.assert_close(log_density(NETWORK, params, X, noise(300, LATENT)), expected, atol=0.06, rtol=0)
    torch.testing.assert_close(-negative_bound(NETWORK, params, X, noise(5, LATENT)), expected - 0.08)


def test_every_latent_dimension_reaches_the_answer():
    params, x = NETWORK.init(0), X.flatten(1)
    draws = noise(5, LATENT).requires_grad_()
    (slope,) = torch.autograd.grad(negative_bound(NETWORK, params, x, draws).sum(), draws)
    assert slope.ne(0).all()
