import numpy as np
import pytest
import torch

from builders import NO_VALIDATION_IN, OPTED_OUT, PARTICIPANTS, tiny_federation, tiny_records
from fedmoe.clients import pooled_evaluation
from fedmoe.clients.pooled_evaluation import with_pooled_client
from fedmoe.core_types import Examples
from fedmoe.errors import DataError

NEW_CLIENT = 7


def opted_in():
    """All rows that may be in the pooled: of participants, opted in."""
    held = [tiny_records()[client] for client in PARTICIPANTS]
    return torch.cat([one.validation.x[one.validation_opted_in] for one in held])


def rows(examples: Examples) -> set[bytes]:
    return {row.numpy().tobytes() for row in examples.x}


def test_the_new_client_is_unseen_has_nothing_and_is_asked_about_all_opted_in_validation_examples():
    whole = with_pooled_client(tiny_federation(), 1000, seed=0)
    assert whole.num_clients == 6 and whole.num_unseen == 2 and whole.pooled == NEW_CLIENT
    new_client = whole.load(NEW_CLIENT)
    assert len(new_client.train.y) == len(new_client.validation.y) == 0
    assert rows(new_client.test) == {row.numpy().tobytes() for row in opted_in()}
    assert len(new_client.test.y) == int(new_client.test.counts) == len(opted_in())
    for client in (OPTED_OUT, NO_VALIDATION_IN):
        records = tiny_records()[client]
        assert not rows(records.validation) & rows(new_client.test)
    assert all(torch.equal(whole.load(c).train.x, tiny_records()[c].train.x) for c in range(7))


def test_a_sample_is_bounded_seeded_and_keeps_labels_with_their_rows():
    some, same, other = (with_pooled_client(tiny_federation(), 4, seed).load(NEW_CLIENT).test for seed in (0, 0, 1))
    assert len(some.y) == 4 and len(rows(some)) == 4
    assert torch.equal(some.x, same.x) and not torch.equal(some.x, other.x)
    known = {
        x.numpy().tobytes(): int(y)
        for client in PARTICIPANTS
        for x, y in zip(*tiny_records()[client].validation[:2], strict=True)
    }
    assert all(known[x.numpy().tobytes()] == int(y) for x, y in zip(some.x, some.y, strict=True))


def test_of_a_large_population_only_some_clients_are_read(monkeypatch):
    monkeypatch.setattr(pooled_evaluation, "MOST_CLIENTS", 2)
    federation = tiny_federation()
    asked = []
    load = federation.load
    object.__setattr__(federation, "load", lambda client: asked.append(client) or load(client))
    pooled_evaluation.pooled_validation(federation, 1000, seed=0)
    assert len(asked) == 2 and asked == sorted(asked)


def test_without_validation_examples_there_is_no_union():
    federation = tiny_federation()
    object.__setattr__(federation, "participants", np.array([NO_VALIDATION_IN]))
    with pytest.raises(
        DataError, match=r"evaluation\.pooled=10, but no client that takes part .*Give clients validation"
    ):
        with_pooled_client(federation, 10, seed=0)
