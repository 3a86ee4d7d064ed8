"""Pools that change by schedule, and anchors that are drawn apart: for every algorithm."""

import numpy as np
import pytest

import fedmoe
from builders import opened, tiny_parts, tiny_setup
from fedmoe.algorithms.catalog import CATALOG
from fedmoe.clients.sampling import AnchorSchedule, Drawing, PoolSchedule
from fedmoe.engines.session import Session
from fedmoe.errors import ConfigError

EVERYONE = np.arange(20)


def pools(kind, rounds):
    drawing = Drawing(EVERYONE, PoolSchedule(kind, groups=4, every=2))
    return [sorted({int(c) % 4 for c in drawing.in_pool(number)}) for number in rounds]


def test_a_pool_grows_by_a_group_every_so_many_rounds():
    assert pools("grow", range(1, 11)) == [[0]] * 2 + [[0, 1]] * 2 + [[0, 1, 2]] * 2 + [[0, 1, 2, 3]] * 4


def test_a_pool_switches_to_another_group_and_starts_over_after_the_last():
    assert pools("switch", range(1, 11)) == [[0]] * 2 + [[1]] * 2 + [[2]] * 2 + [[3]] * 2 + [[0]] * 2


def test_all_clients_of_a_group_are_in_its_pool():
    drawing = Drawing(EVERYONE, PoolSchedule("switch", groups=4, every=5))
    assert drawing.in_pool(6).tolist() == [1, 5, 9, 13, 17]


def test_anchors_are_drawn_apart_without_replacement():
    drawing = Drawing(EVERYONE, anchors=AnchorSchedule(number=5, per_round=3))
    draws = [drawing.draw_anchors(1, np.random.default_rng(seed)) for seed in range(50)]
    assert {len({*draw}) for draw in draws} == {3} and {int(c) for draw in draws for c in draw} == {*range(5)}
    assert drawing.others(1).tolist() == list(range(5, 20))


def test_the_anchors_of_a_group_are_in_the_pool_with_it():
    drawing = Drawing(EVERYONE, PoolSchedule("switch", groups=4, every=1), AnchorSchedule(number=8, per_round=5))
    assert sorted(drawing.draw_anchors(2, np.random.default_rng(0)).tolist()) == [1, 5]  # it has no more
    assert drawing.others(2).tolist() == [9, 13, 17]


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedmix_common"])
def test_baselines_are_drawn_likewise(name, tmp_path):
    """Clients 0, 1, 3 and 4 take part; 0 and 1 are the anchors, of which one is drawn in a round."""
    algorithm = CATALOG[name].factory(CATALOG[name].config(), tiny_setup(clients_per_round=1))
    schedule = {"anchors": {"number": 2, "per_round": 1}, "clients_per_round": 2, "rounds": 8}
    parts = tiny_parts(algorithm, **schedule)
    with opened(parts, tmp_path / "store") as transport:
        session = Session(parts, transport)
        drawn = [session.next_round().clients for _ in range(8)]
    assert all(len(clients) == 2 and clients[0] in (0, 1) and clients[1] in (3, 4) for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 2


def test_a_pool_changes_who_is_drawn_and_nothing_else(tmp_path):
    algorithm = CATALOG["fedavg"].factory(CATALOG["fedavg"].config(), tiny_setup(clients_per_round=1))
    parts = tiny_parts(algorithm, pool={"kind": "switch", "groups": 2, "every": 1}, clients_per_round=1, rounds=6)
    with opened(parts, tmp_path / "store") as transport:
        session = Session(parts, transport)
        drawn = [session.next_round().clients[0] for _ in range(6)]
    assert [client % 2 for client in drawn] == [0, 1] * 3


@pytest.mark.parametrize(
    ("drawing", "per_round", "sentence"),
    [
        (Drawing(EVERYONE, anchors=AnchorSchedule(21, 5)), 10, "5 per round of 21 anchors among 20 clients"),
        (Drawing(EVERYONE, anchors=AnchorSchedule(4, 5)), 10, "5 per round of 4 anchors"),
        (Drawing(EVERYONE, anchors=AnchorSchedule(5, 5)), 5, "clients_per_round=5 with .*per_round=5 leaves no"),
        (Drawing(EVERYONE, anchors=AnchorSchedule(5, 5)), None, "clients_per_round='all'"),
        (Drawing(EVERYONE[3:], anchors=AnchorSchedule(5, 5)), 10, "client 0 is an anchor .* has opted out"),
        (Drawing(EVERYONE, PoolSchedule("switch", 4, 1)), 6, "group 0 has 5 clients .* but 6 are drawn"),
        (Drawing(EVERYONE, PoolSchedule("grow", 30, 1)), 1, None),
        (Drawing(EVERYONE, PoolSchedule("switch", 30, 1)), 1, "group 20 has 0 clients"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused_before_the_first_round(drawing, per_round, sentence):
    if sentence is None:
        drawing.check(per_round, 20)
        return
    with pytest.raises(ConfigError, match=sentence):
        drawing.check(per_round, 20)


def test_groups_of_labels_and_of_the_pool_are_the_same():
    table = {
        "split": {"kind": "k_labels", "num_clients": 10, "labels_per_client": 2, "label_groups": 2},
        "schedule": {"pool": {"kind": "grow", "groups": 5, "every": 1}, "clients_per_round": 1},
    }
    with pytest.raises(ConfigError, match=r"split\.label_groups=2, but schedule\.pool\.groups=5"):
        fedmoe.build(table)
