"""What a frozen public function says of each example is computed once per client, and kept within bounds."""

import gc
from dataclasses import replace

import torch

from builders import SOME_OPTED_OUT, UNSEEN, tiny_federation
from fedmoe.clients.federation import examples
from fedmoe.clients.per_example_cache import PerExampleCache, with_cached


class Doubled:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return 2 * x


def rows(value, count=3):
    return examples(torch.full((count, 2), float(value)), torch.zeros(count, dtype=torch.int64))


def test_it_is_computed_once_per_client_and_part_however_many_rounds_ask():
    function = Doubled()
    federation = with_cached(tiny_federation(), {"twice": function})
    for _ in range(3):
        data = federation.data([0, 3], opted_in_only=True)
        torch.testing.assert_close(data.train.extra["twice"], 2 * data.train.x)
        torch.testing.assert_close(data.inputs.extra["twice"], 2 * data.inputs.x)
    assert function.calls == 2
    federation.data([0], opted_in_only=True).validation.extra["twice"]
    assert function.calls == 3


def test_what_is_kept_follows_the_opted_in_rows():
    federation = with_cached(tiny_federation(), {"twice": Doubled()})
    everything = federation.data([SOME_OPTED_OUT], opted_in_only=False).train
    opted_in = federation.data([SOME_OPTED_OUT], opted_in_only=True).train
    assert everything.extra["twice"].shape[1] == 9 and opted_in.extra["twice"].shape[1] == 6
    torch.testing.assert_close(opted_in.extra["twice"], 2 * opted_in.x)


def test_beyond_its_bound_it_goes_to_disk_and_comes_back():
    function = Doubled()
    cache = PerExampleCache({"twice": function}, most_bytes=60)  # two clients of 24 bytes each
    for _ in range(2):
        for client in range(5):
            found = cache(client, "train", rows(client)).extra["twice"]
            assert torch.equal(found, torch.full((3, 2), 2.0 * client))
    assert function.calls == 5
    assert sum(t["twice"].nbytes for t in cache._memory.values()) <= 60
    folder = cache._folder
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.iterdir())) >= 3
    del cache
    gc.collect()
    assert not folder.exists()


def test_a_client_larger_than_the_bound_is_served_too():
    cache = PerExampleCache({"twice": Doubled()}, most_bytes=10)
    assert torch.equal(cache(0, "train", rows(1)).extra["twice"], cache(0, "train", rows(1)).extra["twice"])


def test_no_rows_have_no_embeddings():
    assert PerExampleCache({"twice": Doubled()})(0, "train", rows(1, count=0)).extra["twice"].shape == (0, 2)


def test_a_new_client_without_labels_has_inputs_and_what_is_computed_of_them():
    plain = tiny_federation()

    class NewClient:
        def __init__(self):
            records = plain.load(UNSEEN)
            empty = torch.zeros(0, dtype=torch.bool)
            self.train = self.validation = examples(records.test.x[:0], records.test.y[:0])
            self.test, self.train_opted_in, self.validation_opted_in = records.test, empty, empty
            self.unlabelled = examples(records.test.x, torch.zeros_like(records.test.y))

    federation = replace(plain, load=lambda client: NewClient() if client == UNSEEN else plain.load(client))
    data = with_cached(federation, {"twice": Doubled()}).data([0, UNSEEN], opted_in_only=True)
    assert data.inputs.counts.tolist() == [6, 6] and data.train.counts.tolist() == [6, 0]
    torch.testing.assert_close(data.inputs.extra["twice"], 2 * data.inputs.x)
    assert not data.inputs.y.any()
