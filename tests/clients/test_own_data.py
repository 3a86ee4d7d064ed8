from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedmoe.clients.own_data import federation_from_clients
from fedmoe.errors import DataError


def rows(size, start=0, classes=2):
    """Each row holds its own number, so it can be recognised wherever the cut takes it."""
    number = torch.arange(start, start + size)
    return number[:, None].expand(size, 3).float().contiguous(), number % classes


def numbers(part):
    return part.x[:, 0].long().tolist()


def three_clients():
    return {"ada": rows(10), "bob": rows(20, 100), "cy": rows(5, 200)}


class ItemByItem(Dataset):
    def __init__(self, items):
        self.items, self.reads = items, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3), 0


@settings(deadline=None)
@given(size=st.integers(1, 40), validation=st.floats(0, 0.4), test=st.floats(0, 0.4), seed=st.integers(0, 2**40))
def test_a_cut_loses_no_row_doubles_none_and_leaves_some_to_train(size, validation, test, seed):
    federation = federation_from_clients(
        {"ada": rows(size)}, num_classes=2, validation_share=validation, test_share=test, seed=seed
    )
    record = federation.load(0)
    assert sorted(numbers(record.train) + numbers(record.validation) + numbers(record.test)) == list(range(size))
    assert len(record.train.y) >= (1 if size < 10 else 2)
    for part in record[:3]:
        assert (part.y == part.x[:, 0].long() % 2).all()
        assert part.counts == len(part.y)


def test_the_shares_say_how_much_is_cut():
    record = federation_from_clients({"ada": rows(10)}, validation_share=0.3, test_share=0.1).load(0)
    assert [len(part.y) for part in record[:3]] == [6, 3, 1]


def test_the_cut_goes_by_seed_and_name_and_not_by_who_else_is_there():
    alone = numbers(federation_from_clients({"bob": rows(20, 100)}).load(0).train)
    assert numbers(federation_from_clients(three_clients()).load(1).train) == alone
    assert numbers(federation_from_clients({"bob": rows(20, 100)}, seed=1).load(0).train) != alone
    assert numbers(federation_from_clients({"eve": rows(20, 100)}).load(0).train) != alone


def test_unseen_clients_are_numbered_last_and_keep_their_names():
    federation = federation_from_clients(three_clients(), unseen=["ada"])
    assert (federation.num_clients, federation.num_unseen) == (2, 1)
    assert list(federation.names) == ["bob", "cy", "ada"]
    assert federation.number_of("ada") == 2
    assert federation.participants.tolist() == [0, 1]
    assert max(numbers(federation.load(2).train)) < 10


def test_parts_that_are_given_are_held_as_they_are_without_a_copy():
    train, validation, test = rows(4), rows(3, 10), rows(2, 20)
    record = federation_from_clients({"ada": {"train": train, "validation": validation, "test": test}}).load(0)
    for held, given_x in zip(record[:3], (train[0], validation[0], test[0]), strict=True):
        assert held.x.data_ptr() == given_x.data_ptr() and held.x.shape == given_x.shape


def test_only_the_parts_that_are_missing_are_cut():
    record = federation_from_clients({"ada": {"train": rows(10), "test": rows(7, 100)}}).load(0)
    assert [len(part.y) for part in record[:3]] == [8, 2, 7]
    empty = (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    record = federation_from_clients({"ada": {"train": rows(10), "validation": empty, "test": rows(7)}}).load(0)
    assert [len(part.y) for part in record[:3]] == [10, 0, 7] and record.validation.x.shape == (0, 3)


def test_arrays_datasets_and_tensors_give_the_same_federation():
    x, y = rows(10)
    sources = {
        "tensors": (x, y),
        "arrays": (x.double().numpy(), y.to(torch.int32).numpy()),
        "dataset": TensorDataset(x, y),
        "items": ItemByItem([(one.numpy(), int(label)) for one, label in zip(x, y, strict=True)]),
        "frames": (pd.DataFrame(x.numpy(), columns=["a", "b", "c"]), pd.Series(y.numpy(), index=range(5, 15))),
        "read-only": (np.frombuffer(x.numpy().tobytes(), np.float32).reshape(10, 3), y.float()),
    }
    digests = {federation_from_clients({"ada": source}).digest for source in sources.values()}
    assert len(digests) == 1
    assert sources["items"].reads == 10


def test_token_ids_stay_integers_and_doubles_become_floats():
    tokens = torch.randint(0, 50, (10, 7))
    assert federation_from_clients({"ada": (tokens, rows(10)[1])}).load(0).train.x.dtype == torch.int64
    assert federation_from_clients({"ada": (rows(10)[0].double(), rows(10)[1])}).load(0).train.x.dtype == torch.float32


def test_the_number_of_classes_is_that_of_shared_labels_unless_it_is_declared():
    assert federation_from_clients({"ada": rows(6), "bob": rows(70, classes=7)}).num_classes == 7
    assert federation_from_clients({"ada": rows(6)}, num_classes=10).num_classes == 10
    assert federation_from_clients({"ada": rows(6)}, global_test=rows(5, classes=5)).num_classes == 5


class TestPrivateRecordsShapeNothing:
    """Of the federation, that is: what is sent has its number of classes and of values of side information."""

    def clients(self, label, site):
        x, y, side = sided(20)
        private_y, private_side = y.clone(), {"site": side["site"].clone()}
        private_y[4], private_side["site"][4] = label, site
        return {"ada": (x, y, side), "bob": (x, private_y, private_side)}

    PRIVATE: ClassVar = {
        "an opted-out client": {"opted_out": {"bob": True}},
        "an opted-out record": {"opted_out": {"bob": [row == 4 for row in range(20)]}},
        "an unseen client": {"unseen": ["bob"]},
    }

    @pytest.mark.parametrize("private", PRIVATE.values(), ids=PRIVATE)
    def test_a_label_beyond_is_refused_until_it_is_declared(self, private):
        clients = self.clients(label=6, site=0)
        with pytest.raises(
            DataError, match=r"client 'bob', .* has a label 6, .* go up to 1, .*Declare num_classes=7\."
        ):
            federation_from_clients(clients, **private)
        assert federation_from_clients(clients, num_classes=7, **private).num_classes == 7

    @pytest.mark.parametrize("private", PRIVATE.values(), ids=PRIVATE)
    def test_side_information_beyond_is_refused_until_it_is_declared(self, private):
        clients = self.clients(label=0, site=9)
        with pytest.raises(DataError, match=r"client 'bob', .* has 'site' 9, .*Declare side_values={'site': 10}\."):
            federation_from_clients(clients, test_share=0, **private)
        declared = federation_from_clients(clients, side_values={"site": 10}, test_share=0, **private)
        assert declared.side_values == {"site": 10}

    def test_a_test_row_beyond_is_refused_too(self):
        clients = {"ada": {"train": rows(10), "test": with_label(3, 5)}}
        with pytest.raises(DataError, match=r"client 'ada', test has a label 5"):
            federation_from_clients(clients)

    def test_what_is_declared_must_be_there(self):
        with pytest.raises(DataError, match=r"side_values: the name 'sit' is not known. Did you mean 'site'"):
            federation_from_clients({"ada": sided(10)}, side_values={"sit": 3})
        with pytest.raises(DataError, match=r"client 'ada', train has 'site' 2, beyond side_values={'site': 2}"):
            federation_from_clients({"ada": sided(10)}, side_values={"site": 2})


def test_the_digest_tells_data_labels_masks_and_roles_apart():
    x, y = rows(10)
    changed = x.clone()
    changed[3, 1] += 1
    variants = [
        {"clients": {"ada": (x, y), "bob": (x, y)}},
        {"clients": {"ada": (changed, y), "bob": (x, y)}},
        {"clients": {"ada": (x, 1 - y), "bob": (x, y)}},
        {"clients": {"ada": (x[:9], y[:9]), "bob": (x, y)}},
        {"clients": {"ada": (x, y), "bob": (x, y)}, "opted_out": {"ada": True}},
        {"clients": {"ada": (x, y), "bob": (x, y)}, "unseen": ["bob"]},
        {"clients": {"ada": (x, y), "bob": (x, y)}, "seed": 5},
    ]
    digests = [federation_from_clients(**variant).digest for variant in variants]
    assert len(set(digests)) == len(variants)
    assert federation_from_clients(**variants[0]).digest == digests[0]


class TestOptOut:
    def test_a_whole_client_sends_nothing_but_keeps_its_data(self):
        federation = federation_from_clients(three_clients(), opted_out={"bob": True, "cy": False})
        assert federation.participants.tolist() == [0, 2]
        record = federation.load(1)
        assert not record.train_opted_in.any() and not record.validation_opted_in.any() and len(record.train.y) == 12

    @pytest.mark.parametrize("convert", [list, torch.tensor, np.array])
    def test_a_mask_follows_its_rows_through_the_cut(self, convert):
        out = [number % 3 == 0 for number in range(10)]
        record = federation_from_clients({"ada": rows(10)}, opted_out={"ada": convert(out)}).load(0)
        assert (record.train_opted_in == (record.train.x[:, 0] % 3 != 0)).all()
        assert (record.validation_opted_in == (record.validation.x[:, 0] % 3 != 0)).all()
        assert len(record.validation_opted_in) == 2

    def test_a_mask_speaks_of_training_rows_only_unless_it_takes_them_all(self):
        clients = {name: {"train": rows(4), "validation": rows(3)} for name in ("ada", "bob")}
        masks = {"ada": [True, True, False, False], "bob": [True] * 4}
        federation = federation_from_clients(clients, opted_out=masks, test_share=0)
        assert federation.load(0).validation_opted_in.all() and not federation.load(1).validation_opted_in.any()
        assert federation.participants.tolist() == [0]

    @pytest.mark.parametrize("mask", [[True] * 9, [3, 5], torch.zeros(10), [[True]] * 10])
    def test_a_mask_that_does_not_fit_is_refused(self, mask):
        with pytest.raises(DataError, match=r"opted_out of client 'ada'.*10 training rows"):
            federation_from_clients(three_clients(), opted_out={"ada": mask})

    def test_somebody_has_to_train(self):
        with pytest.raises(DataError, match="none of the 3 clients has a training row to share"):
            federation_from_clients(three_clients(), opted_out={"ada": True, "bob": [True] * 20}, unseen={"cy"})
        with pytest.raises(DataError, match="none of the 0 clients"):
            federation_from_clients({})


class TestGlobalTest:
    def test_it_is_balanced_as_far_as_the_test_rows_go(self):
        labels = torch.tensor([0] * 30 + [1] * 8 + [2] * 10)
        parts = {"train": rows(6, classes=3), "test": (torch.arange(48.0)[:, None].expand(48, 3), labels)}
        global_test = federation_from_clients({"ada": parts, "bob": parts}).global_test
        assert torch.bincount(global_test.y).tolist() == [32, 16, 20]
        assert (labels[global_test.x[:, 0].long()] == global_test.y).all()

    def test_it_draws_from_every_client(self):
        federation = federation_from_clients({"ada": rows(100), "bob": rows(100, 1000)})
        whose = federation.global_test.x[:, 0] >= 1000
        assert whose.any() and not whose.all()
        own = numbers(federation.load(0).test) + numbers(federation.load(1).test)
        assert set(numbers(federation.global_test)) <= set(own)

    def test_rows_of_clients_and_records_that_opted_out_stay_with_their_client(self):
        clients = {name: rows(40, start) for name, start in (("ada", 0), ("bob", 1000), ("cy", 2000))}
        out = {"bob": True, "ada": [row % 2 == 0 for row in range(40)]}
        pooled = numbers(federation_from_clients(clients, opted_out=out, unseen=["cy"], num_classes=2).global_test)
        assert pooled and all(number < 1000 and number % 2 for number in pooled)

    def test_it_may_be_given(self):
        federation = federation_from_clients(three_clients(), global_test=rows(4, 900))
        assert numbers(federation.global_test) == [900, 901, 902, 903]

    def test_it_is_empty_where_nobody_has_test_rows(self):
        assert len(federation_from_clients(three_clients(), test_share=0).global_test.y) == 0


def with_value(row, value):
    x, y = rows(10)
    x[row, 1] = value
    return x, y


def with_label(row, label, dtype=torch.int64):
    x, y = rows(10)
    y = y.to(dtype)
    y[row] = label
    return x, y


@pytest.mark.parametrize(
    ("bob", "complaint"),
    [
        (with_value(7, torch.nan), "client 'bob', row 7: x holds NaN"),
        (with_value(2, -torch.inf), "client 'bob', row 2: x holds NaN or infinity"),
        ((with_value(0, 0.0)[0].double() * 1e300, rows(10)[1]), "client 'bob', row 1: x holds NaN or infinity"),
        (with_label(4, -1), "client 'bob', row 4: the label is -1"),
        (with_label(9, 3), "client 'bob', row 9: the label is 3.* to num_classes - 1 = 2"),
        (with_label(5, 0.5, torch.float32), "client 'bob', row 5: the label is 0.5.* integers"),
        (with_label(5, torch.nan, torch.float32), "client 'bob', row 5: the label is nan"),
        ((rows(10)[0], rows(9)[1]), r"client 'bob': x has shape \(10, 3\) and y \(9,\)"),
        ((rows(10)[0], torch.eye(10)), r"client 'bob': .* y \(10, 10\)"),
        (rows(0), "client 'bob' is empty"),
        (ItemByItem([]), "client 'bob' is empty"),
        ((torch.zeros(10, 4), rows(10)[1]), r"client 'bob', train: x is .*\(4,\), but of client 'ada', train .*\(3,\)"),
        ((torch.zeros(10, 3).long(), rows(10)[1]), "client 'bob', train: x is torch.int64"),
        ({"train": rows(4), "test": (torch.zeros(2, 5), torch.zeros(2))}, r"client 'bob', test: x is .*\(5,\)"),
        ({"train": rows(4), "test": with_label(1, 8)}, "client 'bob', test, row 1: the label is 8"),
        ({"train": rows(4), "tset": rows(4)}, "client 'bob': the name 'tset' is not known. Did you mean 'test'"),
        ({"test": rows(4)}, "client 'bob' has no part 'train'"),
        ("data.csv", "client 'bob' is a str"),
        (rows(4)[0], "client 'bob' is a Tensor"),
        ((np.array(["a", "b"]), [0, 1]), "client 'bob': a ndarray is no array of numbers"),
        ((rows(10)[0] + 1j, rows(10)[1]), "client 'bob': x is complex. Give real numbers"),
        (pd.DataFrame(rows(4)[0].numpy()), r"client 'bob' is a DataFrame. .*federation_from_table\(frame"),
        (Endless(), "client 'bob' is a Endless.*length"),
        (ItemByItem([(torch.zeros(3), 0), (torch.zeros(2), 0)]), "client 'bob', row 1: x has another shape"),
        (ItemByItem([(torch.zeros(3), torch.zeros(2))]), "client 'bob': .*y \\(1, 2\\). Give one label number per row"),
        (ItemByItem([{"x": 1}]), "client 'bob', row 0: the Dataset gives a dict"),
        (ItemByItem([("picture", 0)]), "client 'bob', row 0: a str is no array"),
    ],
)
def test_what_cannot_be_used_is_refused_by_client_row_and_value(bob, complaint):
    with pytest.raises(DataError, match=complaint):
        federation_from_clients({"ada": rows(10), "bob": bob}, num_classes=3)


def test_words_in_a_series_are_labels():
    words = pd.Series(["flu", "cold"] * 5).astype("category")
    assert federation_from_clients({"ada": (rows(10)[0], words)}).class_names == ("cold", "flu")


def test_a_table_of_all_clients_is_sent_to_where_tables_are_read():
    with pytest.raises(DataError, match=r"clients= is a DataFrame. .*federation_from_table\(frame"):
        federation_from_clients(pd.DataFrame({"ward": ["north"], "label": [0]}))


def test_a_global_test_of_another_shape_is_refused():
    with pytest.raises(DataError, match="global_test: x is"):
        federation_from_clients(three_clients(), global_test=(torch.zeros(2, 9), torch.zeros(2)))


@pytest.mark.parametrize("argument", ["unseen", "opted_out"])
def test_a_name_that_nobody_has_is_refused_and_the_nearest_named(argument):
    with pytest.raises(DataError, match=f"{argument}: the name 'bobb' is not known. Did you mean 'bob'"):
        federation_from_clients(three_clients(), **{argument: {"bobb": True}})
    with pytest.raises(DataError, match="Known: 'ada', 'bob', 'cy'"):
        federation_from_clients(three_clients(), **{argument: {"1234": True}})


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"validation_share": 0.5, "test_share": 0.5}, "leave nothing to train on"),
        ({"validation_share": 0.6, "test_share": 0.7}, "leave nothing to train on"),
        ({"validation_share": 0.5, "test_share": 0.45}, "client 'bob' has 20 rows.* leave one of them for training"),
    ],
)
def test_shares_that_leave_no_training_data_are_refused(shares, words):
    with pytest.raises(DataError, match=words):
        federation_from_clients({"bob": rows(20)}, **shares)


@pytest.mark.parametrize("shares", [{"test_share": 1.0}, {"validation_share": -0.1}, {"test_share": float("nan")}])
def test_a_share_is_a_share(shares):
    with pytest.raises(DataError, match=next(iter(shares))):
        federation_from_clients(three_clients(), **shares)


def sided(size, start=0, **changed):
    x, y = rows(size, start)
    return x, y, {"site": (x[:, 0] % 3).long(), **changed}


class TestSideInformation:
    def test_it_stays_with_its_rows_through_cut_opt_out_and_padding(self):
        items = [(x, y, {"site": int(x[0]) % 3}) for x, y in zip(*rows(9), strict=True)]
        federation = federation_from_clients(
            {"ada": sided(20), "bob": ItemByItem(items)}, opted_out={"ada": [row % 4 == 0 for row in range(20)]}
        )
        assert federation.side_values == {"site": 3}
        data = federation.data([0, 1], opted_in_only=True)
        for part in (data.train, data.validation):
            for s, count in enumerate(part.counts.tolist()):
                assert part.extra["site"][s, :count].tolist() == (part.x[s, :count, 0] % 3).tolist()
                assert not part.extra["site"][s, count:].any()
        assert not (data.train.x[0, : data.train.counts[0], 0] % 4 == 0).any()

    def test_a_test_part_needs_none(self):
        federation = federation_from_clients({"ada": {"train": sided(10), "test": rows(4)}, "bob": sided(8)})
        assert federation.load(0).test.extra == {} and federation.side_values == {"site": 3}

    def test_other_side_information_is_another_federation(self):
        one, other = (federation_from_clients({"ada": sided(6, site=np.full(6, site))}) for site in (0, 1))
        assert one.digest != other.digest

    @pytest.mark.parametrize(
        ("bob", "complaint"),
        [
            (rows(10), r"client 'bob', train has side information \[\], but client 'ada', train has \['site'\]"),
            (sided(10, ward=np.zeros(10)), r"client 'bob', train has side information \['site', 'ward'\]"),
            ({"train": sided(8), "validation": rows(4)}, r"client 'bob', validation has side information \[\]"),
            (sided(10, site=np.zeros(9)), r"client 'bob': 'site' has shape \(9,\), for 10 rows"),
            (sided(10, site=np.arange(10) - 1), "client 'bob', row 0: the 'site' is -1. Give integers from 0"),
            (sided(10, site=np.full(10, 0.5)), "client 'bob', row 0: the 'site' is 0.5"),
            ((*rows(10), np.zeros(10)), "client 'bob': side information is a ndarray"),
            (ItemByItem([(torch.zeros(3), 0, 5)]), "client 'bob', row 0: side information is a int"),
            (ItemByItem([(torch.zeros(3), 0, {"site": 0}), (torch.zeros(3), 0)]), r"client 'bob', row 1: side .* \[\]"),
        ],
    )
    def test_what_is_missing_or_no_number_is_refused(self, bob, complaint):
        with pytest.raises(DataError, match=complaint):
            federation_from_clients({"ada": sided(10), "bob": bob})
