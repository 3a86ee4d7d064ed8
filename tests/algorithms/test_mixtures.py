"""What the two papers say of stages 2 and 3: fine-tuning, the specialist mixture, the local-global mixture."""

import pytest
import torch
import torch.nn.functional as F

from fedmoe import trees
from fedmoe.algorithms import fine_tuned, local_global_mixture, local_only, specialist_mixture
from fedmoe.algorithms.algorithm import Nothing
from fedmoe.algorithms.catalog import CATALOG, find
from fedmoe.algorithms.fedavg import Broadcast
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.clients.own_data import federation_from_clients
from fedmoe.core_types import ClientData
from fedmoe.errors import ConfigError
from fedmoe.models.images import mlp
from fedmoe.models.mixture import log_mix, negative_log_likelihood
from fedmoe.models.network import Network
from fedmoe.streams import Streams
from fedmoe.training.augment import AUGMENTATIONS, Augmentation
from fedmoe.training.classifier import log_probs
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.group import Group
from fedmoe.training.local import LocalTrainer
from fedmoe.training.settings import LocalTraining

EXPERT = Network(lambda: mlp((3,), 2, (4,)), "expert")
GATE = Network(lambda: mlp((3,), 1, (4,)), "gate")
BACKENDS = ["sequential", "batched"]
PERSONAL = ["local_only", "fine_tuned", "specialist_mixture", "local_global_mixture"]


def setup(backend="sequential", **plan):
    train = LocalTraining(**{"epochs": 4, "batch_size": 4, "learning_rate": 0.02, "patience": 4, **plan})
    trainer = LocalTrainer(train, backend)
    return AlgorithmSetup(EXPERT, GATE, trainer, trainer, trainer, None)


def make(name, backend="sequential", **plan):
    entry = find(name)
    return entry.factory(entry.config(), setup(backend, **plan))


def federation(**changes):
    """Three clients of 30 rows; rows 0 to 3 of client 0 are opted out."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 30, 3, generator=rng)
    y = (x[:, :, 0] > 0).long()  # can be learned, so that validation losses fall and copies move
    if "secret" in changes:
        x[0, :4] += changes["secret"]
    parts = {f"c{s}": {"train": (x[s, :20], y[s, :20]), "validation": (x[s, 20:], y[s, 20:])} for s in range(3)}
    return federation_from_clients(parts, opted_out={"c0": [row < 4 for row in range(20)]}, num_classes=2, test_share=0)


def received(clients=3):
    sent = Broadcast(EXPERT.init(77))
    return sent, trees.stack([sent] * clients)


def streams(*clients):
    return Streams(0, "personalize", 0, clients or (0, 1, 2))


def personalize(name, data, backend="sequential", **plan):
    return make(name, backend, **plan).personalize(received()[1], Nothing(), None, data, streams())


def everything(**changes):
    return federation(**changes).data([0, 1, 2], opted_in_only=False)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(trees.leaves(one), trees.leaves(other), strict=True))


@pytest.mark.parametrize("name", PERSONAL)
def test_stacked_equals_looped(name):
    one, other = (personalize(name, everything(), backend) for backend in BACKENDS)
    for a, b in zip(trees.leaves(one), trees.leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PERSONAL)
def test_opted_out_records_train_the_personal_parts(name):
    """Section 3.1: the local and the gating model are trained on the whole of D^k."""
    before, after = (personalize(name, everything(secret=shift)) for shift in (0.0, 0.3))
    for part in before._fields:
        changed = [
            not equal(trees.pick(getattr(before, part), s), trees.pick(getattr(after, part), s)) for s in range(3)
        ]
        assert changed == [True, False, False], part


@pytest.mark.parametrize("backend", BACKENDS)
def test_opted_out_records_never_reach_the_global_model(backend):
    """ "No information from the opt-out data will ever leave the client." """
    (exchange,) = make("fedavg", backend).round
    replies = []
    for shift in (0.0, 0.3):
        data = federation(secret=shift).data([0, 1, 2], opted_in_only=True)
        replies.append(exchange.local_update(received()[1], Nothing(), data, Streams(0, "train", 1, (0, 1, 2))))
    assert equal(replies[0], replies[1])
    assert replies[0][1].num_examples.tolist() == [16, 20, 20]


@pytest.mark.parametrize("name", ["fine_tuned", "specialist_mixture", "local_global_mixture"])
def test_personalisation_leaves_the_broadcast_as_it_was(name):
    sent, sent_S = received()
    before = trees.tree_map(torch.clone, sent)
    make(name).personalize(sent_S, Nothing(), None, everything(), streams())
    assert equal(before, sent)


@pytest.mark.parametrize("name", ["fedavg", "fine_tuned", "specialist_mixture", "local_global_mixture"])
def test_before_personalisation_a_client_uses_the_global_model(name):
    sent, x = received()[0], torch.randn(4, 3)
    torch.testing.assert_close(make(name).predict(sent, Nothing(), None, x), F.log_softmax(EXPERT(sent.model, x), 1))


@pytest.mark.parametrize("name", PERSONAL)
def test_predictions_are_probabilities(name):
    personal = trees.pick(personalize(name, everything()), 1)
    prediction = make(name).predict(received()[0], Nothing(), personal, torch.randn(20, 3) * 10)
    torch.testing.assert_close(prediction.exp().sum(1), torch.ones(20))


def contradicted():
    """Validation labels that say the opposite of the training labels, on the same inputs."""
    data = everything()
    return ClientData(data.train, data.train._replace(y=1 - data.train.y))


class TestFineTuned:
    def test_without_improvement_it_stays_at_the_global_model(self):
        state = personalize("fine_tuned", contradicted(), batch_size=20, optimizer="sgd", learning_rate=1e-3)
        for s in range(3):
            assert equal(trees.pick(state.specialist, s), received()[0].model)

    def test_it_starts_at_the_global_model(self):
        state = personalize("fine_tuned", everything(), steps=1, learning_rate=1e-4)
        for name, tensor in received()[0].model.items():
            assert (state.specialist[name] - tensor).abs().max() < 2e-4  # a step of Adam is at most the learning rate
        assert not equal(trees.pick(state.specialist, 0), received()[0].model)

    def test_it_improves_on_what_it_is_stopped_by(self):
        data = everything()
        data = ClientData(data.train, data.train)
        state = fine_tuned.fine_tune(setup(epochs=20), received()[1], data, streams())
        for s in range(3):
            losses = [F.cross_entropy(EXPERT(p, data.train.x[s]), data.train.y[s]) for p in (
                received()[0].model, trees.pick(state.specialist, s))]  # fmt: skip
            assert losses[1] < losses[0]


class TestSpecialistMixture:
    def test_it_predicts_the_gated_mix_of_probabilities(self):
        """Eq. 6: h f_s + (1 - h) f_g, with f_g the broadcast itself."""
        sent, x = received()[0], torch.randn(6, 3)
        personal = trees.pick(personalize("specialist_mixture", everything()), 0)
        h = torch.sigmoid(GATE(personal.gate, x))
        expected = h * EXPERT(personal.specialist, x).softmax(1) + (1 - h) * EXPERT(sent.model, x).softmax(1)
        torch.testing.assert_close(make("specialist_mixture").predict(sent, Nothing(), personal, x).exp(), expected)

    def test_the_global_model_is_frozen(self):
        """The personal state holds no copy of it, and the part that the gate leaves is the broadcast, bit for bit."""
        personal = trees.pick(personalize("specialist_mixture", everything()), 0)
        assert personal._fields == ("specialist", "gate")
        closed = trees.tree_map(torch.zeros_like, personal.gate)
        closed["3.bias"] -= 200
        sent, x = received()[0], torch.randn(6, 3)
        prediction = make("specialist_mixture").predict(sent, Nothing(), personal._replace(gate=closed), x)
        assert torch.equal(prediction, F.log_softmax(EXPERT(sent.model, x), 1))

    @pytest.mark.parametrize("augment", [None, "crop_flip"])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_answers_computed_once_are_those_computed_at_every_step(self, backend, augment, monkeypatch):
        """With augmentation nothing can be computed beforehand: the global model predicts what the specialist sees."""
        shift = Augmentation(lambda rng, number: torch.rand(number, 3, generator=rng), torch.add)
        monkeypatch.setitem(AUGMENTATIONS, "crop_flip", shift)
        here, data, sent_S = setup(backend, augment=augment), everything(), received()[1]

        def losses(trainable, frozen, batch):
            own = trainable["mixture"]
            gate, special = GATE(own["gate"], batch.x), log_probs(EXPERT, own["specialist"], batch)
            return negative_log_likelihood(log_mix(gate, special, log_probs(EXPERT, frozen["general"], batch)), batch.y)

        start = {
            "specialist": fine_tuned.fine_tune(here, sent_S, data, streams()).specialist,
            "gate": trees.stack([GATE.init(seed) for seed in streams().seeds("gate")]),
        }
        plan = here.personal.settings
        group = Group(start, losses, data.train, plan.make_optimizer(), augmentation=plan.augmentation)
        stopping = EarlyStopping(losses, data.validation, plan.patience)
        slow = fit({"mixture": group}, plan.schedule, streams(), backend, {"general": sent_S.model}, stopping)
        fast = specialist_mixture.personalize(here, sent_S, data, streams())
        torch.testing.assert_close(fast._asdict(), slow.params["mixture"], rtol=1e-4, atol=1e-5)
        assert not equal(fast.gate, start["gate"]) and not equal(fast.specialist, start["specialist"])

    def test_training_starts_from_the_fine_tuned_specialist(self):
        """Nothing improves on contradicted labels: lines 6, 7 and 9 of Algorithm 1 all return their start."""
        state = personalize("specialist_mixture", contradicted(), batch_size=20, optimizer="sgd", learning_rate=1e-3)
        fine = personalize("fine_tuned", contradicted(), batch_size=20, optimizer="sgd", learning_rate=1e-3)
        assert equal(state.specialist, fine.specialist)

    def test_every_client_has_a_gate_of_its_own(self):
        gates = personalize("specialist_mixture", everything()).gate["1.weight"]
        assert not torch.allclose(gates[0], gates[1]) and not torch.allclose(gates[1], gates[2])


class TestLocalGlobalMixture:
    def test_the_personal_copy_of_the_global_model_is_trained(self):
        """Eq. 6 of the 2020 paper minimises over w_g too: a personal copy moves, the broadcast does not."""
        state = personalize("local_global_mixture", everything())
        for s in range(3):
            assert not equal(trees.pick(state.general, s), received()[0].model)
        copies = state.general["1.weight"]
        assert not torch.allclose(copies[0], copies[1])

    def test_it_predicts_with_the_personal_copy(self):
        sent, x = received()[0], torch.randn(6, 3)
        own = trees.pick(personalize("local_global_mixture", everything()), 2)
        h = torch.sigmoid(GATE(own.gate, x))
        expected = h * EXPERT(own.local, x).softmax(1) + (1 - h) * EXPERT(own.general, x).softmax(1)
        torch.testing.assert_close(make("local_global_mixture").predict(sent, Nothing(), own, x).exp(), expected)

    def test_all_three_parts_follow_the_loss_of_the_mixture(self):
        here, x, y = setup(), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
        own = {"local": EXPERT.init(1), "general": EXPERT.init(2), "gate": GATE.init(3)}
        own = trees.tree_map(lambda leaf: leaf.requires_grad_(), own)

        class Batch:
            training = False

        Batch.x, Batch.y = x, y
        losses = local_global_mixture.mixture_losses(here)({"mixture": own}, {}, Batch)
        h = torch.sigmoid(GATE(own["gate"], x))
        mixed = h * EXPERT(own["local"], x).softmax(1) + (1 - h) * EXPERT(own["general"], x).softmax(1)
        torch.testing.assert_close(losses, -torch.log(mixed[torch.arange(5), y]))
        grads = torch.autograd.grad(losses.sum(), trees.leaves(own))
        assert all(grad.any() for grad in grads[-2:]) and len(grads) == 12

    def test_without_improvement_the_copy_is_the_global_model_and_the_local_one_its_own(self):
        plan = {"batch_size": 20, "optimizer": "sgd", "learning_rate": 1e-9}
        state = personalize("local_global_mixture", everything(), **plan)
        for s in range(3):
            torch.testing.assert_close(trees.pick(state.general, s), received()[0].model)
        local = personalize("local_only", everything(), **plan)
        torch.testing.assert_close(state.local, local.local)


class TestLocalOnly:
    def test_each_client_starts_from_its_own_random_weights(self):
        """Algorithm 1, line 3 of the 2020 paper; and never from the global model."""
        state = personalize("local_only", everything(), learning_rate=1e-12)
        weights = state.local["1.weight"]
        starts = [weights[0], weights[1], weights[2], received()[0].model["1.weight"]]
        for i, one in enumerate(starts):
            assert not any(torch.allclose(one, other, atol=1e-3) for other in starts[i + 1 :])

    def test_a_client_starts_the_same_in_any_cohort(self):
        here = setup(learning_rate=1e-12)
        together = local_only.train_alone(here, everything(), streams())
        alone = local_only.train_alone(here, federation().data([1], opted_in_only=False), streams(1))
        assert torch.equal(together["1.weight"][1], alone["1.weight"][0])

    def test_nothing_is_sent(self):
        algorithm = make("local_only")
        assert algorithm.round == () and algorithm.validation is None
        (silence,) = algorithm.delivery
        assert trees.leaves(silence.broadcast(algorithm.init_server(0), 0, ())) == []
        _, update, report = silence.local_update(None, Nothing(), None, None)
        assert trees.leaves(update) == trees.leaves(report) == []


class TestCatalog:
    def test_the_nearest_name_is_given(self):
        with pytest.raises(
            ConfigError, match=r"algorithm.name='specialist_mix' is not known. Did you mean 'specialist_mixture'"
        ):
            find("specialist_mix")
        with pytest.raises(ConfigError, match="Choose one of fedavg, local_only"):
            find("12345")

    @pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if entry.rounds])
    def test_algorithms_that_claim_the_same_rounds_have_them(self, name):
        """Only the server's checkpoint is reused, so rounds that leave private state behind cannot be shared."""
        algorithm, reference = make(name), make("fedavg")
        assert [(e.name, e.update_type) for e in algorithm.round] == [(e.name, e.update_type) for e in reference.round]
        assert equal(algorithm.init_server(5), reference.init_server(5))
        assert algorithm.server_type is reference.server_type
        assert algorithm.client_type is Nothing and algorithm.init_personal is None
