import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fedmoe.clients.own_data import federation_from_clients
from fedmoe.errors import DataError

X = torch.arange(20.0)[:, None]
WORDS = np.where(np.arange(20) % 2, "flu", "cold")


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("form", [np.asarray, list, lambda words: words.astype(object)])
def test_words_become_classes_in_sorted_order(form):
    federation = federation_from_clients({"ada": (X, form(WORDS))})
    assert federation.class_names == ("cold", "flu") and federation.num_classes == 2
    train = federation.load(0).train
    assert train.y.tolist() == (train.x[:, 0].long() % 2).tolist()


def test_words_of_a_dataset_and_of_a_global_test_too():
    rows = Rows([(x, str(word)) for x, word in zip(X, WORDS, strict=True)])
    federation = federation_from_clients({"ada": rows}, global_test=(X[:4], WORDS[:4]))
    assert federation.class_names == ("cold", "flu") and federation.global_test.y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("private", [{"opted_out": ["bob"]}, {"unseen": ["bob"]}, {"opted_out": {"bob": [True] * 20}}])
def test_words_of_private_rows_are_refused_until_they_are_declared(private):
    words = WORDS.astype(object).copy()
    words[7] = "plague"
    clients = {"ada": (X, WORDS), "bob": (X, words)}
    with pytest.raises(DataError, match=r"client 'bob', row 7: the label 'plague' is not known.*class_names="):
        federation_from_clients(clients, **private)
    names = ["plague", "cold", "flu"]
    federation = federation_from_clients(clients, class_names=names, **private)
    assert federation.class_names == tuple(names) and federation.load(0).train.y.min() == 1


def test_numbers_may_have_names():
    federation = federation_from_clients({"ada": (X, np.arange(20) % 2)}, class_names=["well", "ill", "dead"])
    assert federation.num_classes == 3 and federation.class_names == ("well", "ill", "dead")
    with pytest.raises(DataError, match="num_classes=2, but class_names has 3"):
        federation_from_clients({"ada": (X, WORDS)}, class_names=["cold", "flu", "well"], num_classes=2)


def test_a_missing_word_is_refused():
    words = list(WORDS)
    words[3] = None
    with pytest.raises(DataError, match="row 3: the label is missing"):
        federation_from_clients({"ada": (X, words)})


def test_labels_that_start_at_one_are_said():
    with pytest.raises(DataError, match=r"labels go from 1 to 2, so class 0 has no row.*\(y - 1\).*num_classes=3"):
        federation_from_clients({"ada": (X, np.arange(20) % 2 + 1)})
    assert federation_from_clients({"ada": (X, np.arange(20) % 2 + 1)}, num_classes=3).num_classes == 3


class TestDictRows:
    ROWS = Rows([{"image": x, "label": int(n) % 2, "site": int(n) % 3} for n, x in enumerate(X)])

    @staticmethod
    def collate(rows):
        return (
            torch.stack([row["image"] for row in rows]),
            torch.tensor([row["label"] for row in rows]),
            {"site": torch.tensor([row["site"] for row in rows])},
        )

    def test_they_go_through_a_collate_of_the_users(self):
        federation = federation_from_clients({"ada": self.ROWS, "bob": self.ROWS.rows}, collate=self.collate)
        for client in range(2):
            train = federation.load(client).train
            assert train.y.tolist() == (train.x[:, 0].long() % 2).tolist()
            assert train.extra["site"].tolist() == (train.x[:, 0].long() % 3).tolist()
        assert federation.side_values == {"site": 3}

    def test_without_one_the_sentence_names_it(self):
        with pytest.raises(DataError, match=r"row 0: the Dataset gives a dict, not a pair.*collate="):
            federation_from_clients({"ada": self.ROWS})

    def test_one_that_returns_something_else_is_refused(self):
        with pytest.raises(DataError, match=r"client 'ada': collate returned a dict"):
            federation_from_clients({"ada": self.ROWS}, collate=lambda rows: rows[0])


class TestBadInput:
    def test_clients_as_a_list(self):
        with pytest.raises(DataError, match=r"clients= is a list. Give a dict by name"):
            federation_from_clients([(X, WORDS)])

    def test_names_that_are_no_text(self):
        with pytest.raises(DataError, match=r"the name of a client is 3, a int"):
            federation_from_clients({3: (X, WORDS)})

    def test_opted_out_is_a_list_of_names(self):
        clients = {"ada": (X, WORDS), "bob": (X, WORDS)}
        by_list = federation_from_clients(clients, opted_out=["bob"])
        assert by_list.digest == federation_from_clients(clients, opted_out={"bob": True}).digest
        with pytest.raises(DataError, match=r"opted_out: the name 'bo' is not known. Did you mean 'bob'"):
            federation_from_clients(clients, opted_out=["bo"])
        with pytest.raises(DataError, match=r"opted_out='bob' is a text.*opted_out=\['bob'\]"):
            federation_from_clients(clients, opted_out="bob")

    def test_sparse_x(self):
        from scipy.sparse import csr_matrix

        with pytest.raises(DataError, match=r"client 'ada': a csr_matrix is sparse.*x\.toarray\(\)"):
            federation_from_clients({"ada": (csr_matrix(X.numpy()), WORDS)})
        with pytest.raises(DataError, match=r"client 'ada': a Tensor is sparse.*x\.to_dense\(\)"):
            federation_from_clients({"ada": (X.to_sparse(), WORDS)})
