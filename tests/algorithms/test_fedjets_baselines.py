"""The baselines of Dun et al. (2023) that are no other paper's: each by what defines it."""

import pytest
import torch

from builders import CLASSES, FEATURES, make_common_expert, run_algorithm, tiny_federation, tiny_setup
from fedmoe import trees
from fedmoe.algorithms.average_ensembles import average_ensembles
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.algorithms.common_expert import CommonExpertConfig, PersonalState, common_expert, estimate_priors
from fedmoe.algorithms.common_expert import predict as predict_alone
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedjets.states import FedJetsConfig, Parts, build_router
from fedmoe.algorithms.fedmix_common import FedMixCommonConfig, fedmix_common, predict
from fedmoe.core_types import ClientData, Examples
from fedmoe.errors import ConfigError

X = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(0))


def test_average_ensembles_are_two_fedavg_models_of_two_seeds(tmp_path):
    """The first is FedAvg's to the last bit; the second starts elsewhere and sees batches in another order."""
    setup = tiny_setup()
    both = run_algorithm(average_ensembles(FedAvgConfig(), setup), tiny_federation(), tmp_path / "both", rounds=3)
    one = run_algorithm(fedavg(FedAvgConfig(), setup), tiny_federation(), tmp_path / "one", rounds=3)
    assert [record.clients for record in both.records] == [record.clients for record in one.records]
    for name, leaf in one.server.model.items():
        assert torch.equal(both.server.first.model[name], leaf) and not torch.equal(
            both.server.second.model[name], leaf
        )


def test_their_batches_differ_also_from_one_start(tmp_path):
    setup = tiny_setup()
    algorithm = average_ensembles(FedAvgConfig(), setup)
    start = algorithm.init_server(0).first
    alike = algorithm._replace(init_server=lambda _seed: type(algorithm.init_server(0))(start, start))
    server = run_algorithm(alike, tiny_federation(), tmp_path / "store", rounds=1).server
    assert any(not torch.equal(server.first.model[name], leaf) for name, leaf in server.second.model.items())


def test_they_answer_with_the_mean_of_probabilities():
    setup = tiny_setup()
    algorithm = average_ensembles(FedAvgConfig(), setup)
    server = algorithm.init_server(0)
    sent = algorithm.delivery[0].broadcast(server, 0, [])
    answers = [setup.expert(model.model, X).softmax(-1) for model in server]
    torch.testing.assert_close(algorithm.predict(sent, None, None, X).exp(), (answers[0] + answers[1]) / 2)


def test_the_common_expert_alone_answers_everybody_and_nobody_sends_anything(tmp_path):
    outcome = run_algorithm(common_expert(CommonExpertConfig(), tiny_setup()), tiny_federation(), tmp_path / "store")
    assert outcome.manifest["sent_by_clients"] == {} and outcome.records == []
    module = make_common_expert()
    test = tiny_federation().global_test
    expected = float((module(test.x).argmax(1) == test.y).double().mean())
    assert {score.accuracy for score in outcome.scores if score.data == "global"} == {expected}
    assert {score.model for score in outcome.scores} == {"before"}


def test_the_fedmix_variant_mixes_all_experts_by_a_gate_on_the_common_experts_embeddings():
    setup = tiny_setup()
    algorithm = fedmix_common(FedMixCommonConfig(num_experts=3), setup)
    server = algorithm.init_server(0)
    sent = algorithm.round[0].broadcast(server, 3, [])
    assert sent.expert_ids.tolist() == [0, 1, 2]
    router = build_router(setup, setup.common, 3, 64)
    parts = Parts(FedJetsConfig(3, 3), setup, setup.common, router, {})
    gate = router(server.router, setup.common.embed(X)).softmax(-1)
    answers = torch.stack([setup.expert(trees.pick(server.experts, k), X).softmax(-1) for k in range(3)])
    expected = torch.einsum("bk,kbc->bc", gate, answers)
    torch.testing.assert_close(predict(parts, sent, X).exp(), expected)
    torch.testing.assert_close(algorithm.predict(sent, None, None, X).exp(), expected)


@pytest.mark.parametrize("name", ["fedmix_common", "common_expert"])
def test_without_a_common_expert_they_are_refused(name):
    with pytest.raises(ConfigError, match=f"algorithm.name='{name}' needs a common expert"):
        CATALOG[name].factory(CATALOG[name].config(), tiny_setup()._replace(common=None))


def test_the_common_expert_answers_with_label_frequencies_that_are_estimated_from_inputs_alone():
    """Two classes of three are there: the third is no longer answered, though no label was read."""
    setup = tiny_setup()
    common = setup.common
    module = make_common_expert()
    x = torch.randn(4000, FEATURES, generator=torch.Generator().manual_seed(3)) * 4
    said = module(x).argmax(1)
    kept = x[said != 2][:300]
    rows = Examples(kept[None], torch.zeros(1, len(kept), dtype=torch.int64), torch.tensor([len(kept)]), {})
    empty = rows._replace(x=rows.x[:, :0], y=rows.y[:, :0], counts=torch.tensor([0]))
    found = estimate_priors(common, CLASSES, ClientData(empty, empty, lambda: rows)).log_prior[0].exp()
    assert found.sum() == pytest.approx(1, abs=1e-5) and found[2] < found[:2].max() and found[2] < 1 / 3
    answers = predict_alone(common, PersonalState(found.log()), x)
    torch.testing.assert_close(answers, (common.log_probs(x) + found.log()).log_softmax(-1))
    nothing = estimate_priors(common, CLASSES, ClientData(empty, empty, lambda: empty)).log_prior[0].exp()
    torch.testing.assert_close(nothing, torch.full((CLASSES,), 1 / CLASSES))
