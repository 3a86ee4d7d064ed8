import pytest
import torch
import torch.nn.functional as F

from algorithms.digits import mean_accuracy, run_digits
from builders import (
    CLASSES,
    FEATURES,
    PARTICIPANTS,
    PLAIN,
    SOME_OPTED_OUT,
    make_expert,
    run_algorithm,
    run_spied,
    tiny_federation,
    tiny_setup,
)
from fedmoe import trees
from fedmoe.algorithms.centralized import (
    Announcement,
    CentralizedConfig,
    Records,
    centralized,
    records_like,
    records_rejection,
    train_on_all,
)
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.models.network import Network
from fedmoe.models.text import TextLSTM
from fedmoe.streams import Streams
from fedmoe.training.fallbacks import record_fallbacks

EXPERT = tiny_setup().expert


def make(backend="batched"):
    return centralized(CentralizedConfig(), tiny_setup(backend))


def sent_records(federation=None):
    """What the participants would send."""
    data = (federation or tiny_federation()).data(PARTICIPANTS, opted_in_only=True)
    return dict(zip(PARTICIPANTS, make().round[1].local_update(None, None, data, None)[1], strict=True))


def test_it_bounds_fedavg_from_above_on_everybodys_data(tmp_path):
    together = run_digits(lambda setup: centralized(CentralizedConfig(), setup), tmp_path / "together")
    apart = run_digits(lambda setup: fedavg(FedAvgConfig(), setup), tmp_path / "apart", rounds=40)
    assert mean_accuracy(together, "before", "global") > mean_accuracy(apart, "before", "global") + 0.02


def test_the_server_trains_on_all_records_as_plain_torch_does():
    """Early stopping on everybody's validation records; here the training ends before it matters."""
    setup = tiny_setup("sequential")
    setup = setup._replace(local=setup.local.with_settings(epochs=1))
    algorithm, records = centralized(CentralizedConfig(), setup), sent_records()
    server = algorithm.init_server(5)
    after = algorithm.round[1].aggregate(server, records, {}, {})

    x, y, validation_x, validation_y = map(torch.cat, zip(*(records[client] for client in PARTICIPANTS), strict=True))
    module = make_expert()
    module.load_state_dict(server.model)
    start_loss = F.cross_entropy(module(validation_x), validation_y)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    (shuffle,) = Streams(5, "centralized", 1, (0,)).generators("batches")
    for rows in torch.randperm(len(y), generator=shuffle).split(4):
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    assert F.cross_entropy(module(validation_x), validation_y) < start_loss  # so the trained copy is the best one
    torch.testing.assert_close(after.model, dict(sorted(module.state_dict().items())))
    assert len(y) == 6 + 1 + 7 + 6 and after.trained == 1


def test_of_one_client_it_is_that_clients_own_training():
    setup, one = tiny_setup("sequential"), sent_records()[PLAIN]
    server = centralized(CentralizedConfig(), setup).init_server(5)
    data = tiny_federation().data([PLAIN], opted_in_only=True)
    rng, start = Streams(5, "centralized", 1, (0,)), trees.stack([server.model])
    alone = setup.local.train_classifier(EXPERT, start, data, rng, stop_early=True)
    together = train_on_all(setup, server, {PLAIN: one})
    torch.testing.assert_close(together.model, trees.pick(alone.params["model"], 0))


def test_it_starts_from_fedavgs_weights_and_ends_with_a_model_alone(tmp_path):
    start = fedavg(FedAvgConfig(), tiny_setup()).init_server(3).model
    server = make().init_server(3)
    assert all(torch.equal(server.model[name], leaf) for name, leaf in start.items())
    outcome = run_algorithm(make(), tiny_federation(), tmp_path / "store", rounds=3)
    assert set(trees.to_named(outcome.server)) == {f"model/{name}" for name in start} | {"trained", "seed"}


def test_the_manifest_says_that_the_records_left_their_clients_once(tmp_path):
    outcome, spy = run_spied(make(), tiny_federation(), tmp_path / "store", rounds=3)
    rows = outcome.manifest["sent_by_clients"]["collect records"]
    records = sent_records()
    for part in Records._fields:
        assert rows[part]["times"] == len(PARTICIPANTS)
        assert rows[part]["bytes"] == sum(getattr(one, part).nbytes for one in records.values())
    assert [record.clients for record in outcome.records] == [list(PARTICIPANTS), [], []]
    plain = tiny_federation().load(SOME_OPTED_OUT).train
    collected = [one.messages for one in spy.exchanged if one.asked["index"] == 1]
    (sent,) = [messages[SOME_OPTED_OUT][0] for messages in collected if SOME_OPTED_OUT in messages]
    keep = tiny_federation().load(SOME_OPTED_OUT).train_opted_in
    assert torch.equal(sent["x"], plain.x[keep]) and torch.equal(sent["y"], plain.y[keep])  # and nothing opted out


def test_after_an_abandoned_round_everybody_is_asked_again():
    algorithm = make()
    server = algorithm.init_server(0)
    pool = torch.arange(4).numpy()
    assert list(algorithm.sample(server, 2, pool, None)) == [0, 1, 2, 3]
    assert list(algorithm.sample(server._replace(trained=torch.tensor(1)), 2, pool, None)) == []


class TestWhatTheServerExpects:
    def test_as_many_records_as_were_announced(self):
        asked = Announcement(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(0.0))
        like = records_like(tiny_setup(), asked)
        assert like.x.shape == (3, FEATURES) and like.x.dtype == torch.float32
        assert like.validation_y.shape == (2,) and like.validation_y.dtype == torch.int64
        words = records_like(tiny_setup(), asked._replace(integer_inputs=torch.tensor(1.0)))
        assert words.x.dtype == torch.int64

    def test_a_count_below_zero_is_none(self):
        asked = Announcement(torch.tensor(-3.0), torch.tensor(0.0), torch.tensor(0.0))
        assert records_like(tiny_setup(), asked).x.shape == (0, FEATURES)

    @pytest.mark.parametrize("part", ["y", "validation_y"])
    @pytest.mark.parametrize("label", [-1, CLASSES])
    def test_a_label_that_no_class_has_is_rejected(self, part, label):
        good = Records(torch.zeros(2, FEATURES), torch.tensor([0, 1]), torch.zeros(1, FEATURES), torch.tensor([2]))
        assert records_rejection(tiny_setup(), good) is None
        bad = good._replace(**{part: torch.full_like(getattr(good, part), label)})
        assert "but there are 3 classes" in records_rejection(tiny_setup(), bad)

    def test_a_word_beyond_the_vocabulary_is_rejected(self):
        setup = tiny_setup()._replace(expert=Network(lambda: TextLSTM(10, CLASSES, 3, 3), "expert", (4,)))
        words = Records(torch.full((1, 4), 9), torch.tensor([0]), torch.zeros(0, 4).long(), torch.zeros(0).long())
        assert records_rejection(setup, words) is None
        with pytest.raises(IndexError):  # which the engine turns into a rejection
            records_rejection(setup, words._replace(x=torch.full((1, 4), 10)))


def test_the_server_trains_in_whole_native_epochs():
    algorithm, records = make("native"), sent_records()
    with record_fallbacks() as reasons:
        native = algorithm.round[1].aggregate(algorithm.init_server(0), records, {}, {})
    other = make("sequential").round[1].aggregate(make().init_server(0), records, {}, {})
    assert reasons == []
    torch.testing.assert_close(native.model, other.model)


def test_without_any_validation_record_the_last_epoch_counts():
    def without(one):
        return one._replace(validation_x=one.validation_x[:0], validation_y=one.validation_y[:0])

    server = make().init_server(0)
    after = train_on_all(tiny_setup(), server, {client: without(one) for client, one in sent_records().items()})
    assert all(leaf.isfinite().all() for leaf in after.model.values())
    assert not any(torch.equal(leaf, server.model[name]) for name, leaf in after.model.items())
