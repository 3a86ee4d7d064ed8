"""The equations of Reisser et al. (2021), each against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.models import expert_mixture as equations
from fedmoe.models.images import mlp
from fedmoe.models.network import Network
from fedmoe.trees import stack

LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=4, max_size=4)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_expert_predicts_with_its_own_features():
    network = Network(lambda: mlp((3,), 2, (5,)))
    experts = [network.init(k) for k in range(3)]
    x = random(4, 3)
    scores_HBC, features_HBF = equations.expert_outputs(network, stack(experts), x)
    assert scores_HBC.shape == (3, 4, 2) and features_HBF.shape == (3, 4, 5)
    for k, expert in enumerate(experts):
        torch.testing.assert_close(scores_HBC[k], network(expert, x))
        torch.testing.assert_close(features_HBF[k], (x @ expert["1.weight"].T + expert["1.bias"]).relu())


def test_usage_is_the_mean_of_q_over_the_examples():
    logits_RK, labels = random(3, 4), torch.tensor([0, 2, 2, 1, 2])
    shares_R = torch.tensor([1, 1, 3]) / 5
    expected = logits_RK.softmax(-1)[labels].mean(0)
    torch.testing.assert_close(equations.expected_usage(equations.log_posterior(logits_RK), shares_R), expected)


@settings(max_examples=50)
@given(LOGITS, st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
def test_a_renormalised_posterior_is_a_distribution(logits, in_use):
    """Also where all that is left was next to impossible before."""
    log_q_B4 = equations.log_posterior(torch.tensor([logits]))
    kept = equations.pruned_posterior(log_q_B4, torch.tensor(in_use))
    assert kept.sum() == pytest.approx(1, abs=1e-5)
    assert (kept >= 0).all() and not kept[0][~torch.tensor(in_use)].any()
    q = log_q_B4[0].double().exp() * torch.tensor(in_use)
    torch.testing.assert_close(kept[0].double(), q / q.sum(), atol=1e-5, rtol=1e-3)


def test_nothing_is_renormalised_where_nothing_is_pruned():
    log_q_BK = equations.log_posterior(random(5, 4))
    torch.testing.assert_close(equations.pruned_posterior(log_q_BK, torch.ones(4, dtype=torch.bool)), log_q_BK.exp())


def test_experts_below_the_floor_are_pruned_but_never_all():
    usage = torch.tensor([0.5, 0.2, 0.25, 0.05])
    assert equations.experts_in_use(usage, 0.2).tolist() == [True, True, True, False]
    assert equations.experts_in_use(usage, 0.0).all()
    assert equations.experts_in_use(torch.tensor([0.01, 0.03]), 0.25).tolist() == [False, True]


def test_pooling_leaves_pruned_experts_out_and_renormalises():
    features_HBF = random(3, 2, 4)
    pooled = equations.pooled_features(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([True, True, False]), features_HBF)
    torch.testing.assert_close(pooled, (2 * features_HBF[0] + features_HBF[1]) / 3)


def test_the_gate_is_a_linear_softmax_and_renormalises_over_what_is_in_use():
    gate = {"weight": random(3, 4), "bias": random(3, seed=1)}
    pooled_BF = random(2, 4, seed=2)
    log_gate_BK = equations.log_gate(gate, pooled_BF)
    torch.testing.assert_close(log_gate_BK.exp(), (pooled_BF @ gate["weight"].T + gate["bias"]).softmax(-1))
    kept = equations.pruned_gate(log_gate_BK, torch.tensor([0, 2]), torch.tensor([True, True])).exp()
    p = log_gate_BK.exp()[:, [0, 2]]
    torch.testing.assert_close(kept, p / p.sum(1, keepdim=True))
    alone = equations.pruned_gate(log_gate_BK, torch.tensor([0, 2]), torch.tensor([False, True])).exp()
    assert alone.tolist() == [[0, 1], [0, 1]]


def test_the_mixture_and_its_likelihood_are_sums_of_probabilities():
    log_probs_HBC, log_gate_BH = random(3, 5, 4).log_softmax(-1), random(5, 3, seed=1).log_softmax(-1)
    y_B = torch.tensor([0, 3, 1, 2, 2])
    expected_BC = torch.einsum("bh,hbc->bc", log_gate_BH.exp(), log_probs_HBC.exp())
    torch.testing.assert_close(equations.log_mixture(log_gate_BH, log_probs_HBC).exp(), expected_BC)
    log_likelihood_BH = equations.log_likelihoods(log_probs_HBC, y_B)
    marginal = equations.log_marginal(log_gate_BH, log_likelihood_BH).exp()
    torch.testing.assert_close(marginal, expected_BC[torch.arange(5), y_B])


def test_the_bound_with_its_entropy_lies_below_the_likelihood_and_meets_it_at_the_true_posterior():
    log_likelihood_BH, log_gate_BK = -random(6, 3).abs(), random(6, 3, seed=1).log_softmax(-1)
    marginal_B = equations.log_marginal(log_gate_BK, log_likelihood_BH)

    def with_entropy(log_q_BK):
        bound = equations.expected_log_joint(log_q_BK, log_q_BK.exp(), log_likelihood_BH, log_gate_BK)
        return bound + equations.entropy(log_q_BK)

    assert (with_entropy(random(6, 3, seed=2).log_softmax(-1)) < marginal_B).all()
    true_posterior = (log_likelihood_BH + log_gate_BK).log_softmax(-1)
    torch.testing.assert_close(with_entropy(true_posterior), marginal_B)


def test_marginal_entropy_is_highest_where_experts_share_the_work_however_they_do():
    alike, divided = torch.zeros(4, 2), 50 * torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    collapsed = 50 * torch.tensor([[1.0, 0]] * 4)
    for logits in (alike, divided):
        assert equations.marginal_entropy(logits) == pytest.approx(math.log(2))
    assert equations.marginal_entropy(collapsed) == pytest.approx(0, abs=1e-6)


def test_closed_form_usage_is_the_geometric_mean_of_the_joint_over_real_rows():
    joint_BH = random(4, 3).softmax(-1)
    real_B = torch.tensor([True, True, True, False])
    geometric = joint_BH[:3].prod(0) ** (1 / 3)
    torch.testing.assert_close(
        equations.closed_form_usage(joint_BH.log(), real_B), geometric / geometric.sum(), atol=1e-6, rtol=1e-5
    )
