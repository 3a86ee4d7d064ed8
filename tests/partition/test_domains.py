import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.clients.federation import Federation, federation_from_split
from fedmoe.clients.opt_out import opt_out
from fedmoe.config import parse_config
from fedmoe.data.dataset import Dataset, Table
from fedmoe.errors import ConfigError
from fedmoe.partition.domains import (
    angle_chances,
    label_permutations,
    mixed_angles,
    permute_labels,
    turn,
    turn_each,
)
from fedmoe.partition.draw import domain_transform, draw_split
from fedmoe.partition.split import Split

SIZES = {
    "num_clients": 12,
    "num_unseen": 5,
    "train_size": 6,
    "validation_size": 3,
    "test_size": 5,
    "global_test_size": 20,
}


def tiny_dataset(shape: tuple[int, ...] = (1, 6, 6)) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    tables = [
        Table(torch.rand(rows, *shape, generator=generator), torch.arange(rows) % 5, {"user": torch.arange(rows) % 9})
        for rows in (400, 100)
    ]
    return Dataset("tiny", *tables, tuple("abcde"))


def drawn(table: dict, dataset: Dataset | None = None, seed: int = 0) -> tuple[Federation, Split, Dataset]:
    dataset = dataset or tiny_dataset()
    config = parse_config({"split": table, "seed": seed})
    split = draw_split(config.split, dataset, config.seed)
    opted = opt_out(split, dataset.train, seed=seed)
    transform = domain_transform(config.split, split, dataset.num_classes, seed)
    return federation_from_split(dataset, split, opted, transform), split, dataset


class TestTurn:
    @pytest.mark.parametrize("quarters", range(-4, 9))
    def test_quarter_turns_are_exact(self, quarters):
        images = torch.rand(3, 2, 5, 5)
        assert torch.equal(turn(images, 90 * quarters), torch.rot90(images, quarters % 4, (2, 3)))

    @pytest.mark.parametrize("angle", [90, 180, 270, 360])
    def test_bilinear_turns_join_the_exact_ones(self, angle):
        images = torch.rand(2, 1, 8, 8)
        assert torch.allclose(turn(images, angle + 1e-3), turn(images, angle), atol=1e-2)

    @given(angle=st.floats(0.5, 720), background=st.floats(-1, 1))
    @settings(max_examples=30, deadline=None)
    def test_the_background_stays_and_values_stay_in_range(self, angle, background):
        flat = torch.full((1, 1, 7, 7), background)
        assert torch.allclose(turn(flat, angle), flat, atol=1e-5)
        spot = flat.clone()
        spot[0, 0, 3, 3] = 1.0
        turned = turn(spot, angle)
        assert turned[0, 0, 3, 3] == pytest.approx(1.0, abs=1e-4)
        assert turned.min() >= background - 1e-5 and turned.max() <= 1 + 1e-5

    def test_two_eighths_are_nearly_a_quarter(self):
        row = torch.linspace(-1, 1, 16)
        image = torch.exp(-4 * ((row[:, None] - 0.2) ** 2 + 2 * row[None] ** 2))[None, None]
        twice = turn(turn(image, 45), 45)
        assert (twice - turn(image, 90)).abs().max() < 0.1 < (image - turn(image, 90)).abs().max()

    def test_each_image_by_its_own_angle(self):
        images = torch.rand(4, 1, 5, 5)
        turned = turn_each(images, np.array([0, 3, 1, 3]), 4)
        for image, one, quarters in zip(images, turned, [0, 3, 1, 3], strict=True):
            assert torch.equal(one, torch.rot90(image, quarters, (1, 2)))


class TestPermutations:
    @given(num_classes=st.integers(3, 12), number=st.integers(1, 6), seed=st.integers(0, 2**40))
    @settings(max_examples=40, deadline=None)
    def test_they_differ_and_the_first_is_as_it_was(self, num_classes, number, seed):
        orders = label_permutations(number, num_classes, seed)
        assert (np.sort(orders, axis=1) == np.arange(num_classes)).all()
        assert (orders[0] == np.arange(num_classes)).all()
        assert len({order.tobytes() for order in orders}) == number

    def test_all_there_are_can_be_had(self):
        assert len({order.tobytes() for order in label_permutations(24, 4, seed=0)}) == 24

    def test_labels_are_renamed(self):
        assert permute_labels(torch.tensor([2, 0]), torch.tensor([1, 2, 0])).tolist() == [0, 1]


@pytest.mark.parametrize("alpha", [{}, {"alpha": 0.5}])
def test_clients_see_their_angle_and_the_global_test_is_as_it_was(alpha):
    federation, split, dataset = drawn({"kind": "rotation", "num_angles": 4, **SIZES, **alpha})
    assert np.bincount(split.domains[:12]).tolist() == [3] * 4 and len(split.domains) == 17
    assert sorted(np.bincount(split.domains[12:], minlength=4)) == [1, 1, 1, 2]
    for client in range(17):
        records, angle = federation.load(client), 90 * int(split.domains[client])
        for part, table, shards in (
            (records.train, dataset.train, split.train),
            (records.validation, dataset.train, split.validation),
            (records.test, dataset.test, split.test),
        ):
            rows = torch.from_numpy(shards.of(client))
            assert torch.equal(part.x, turn(table.x[rows], angle)) and torch.equal(part.y, table.y[rows])
            assert part.extra["angle"].tolist() == [int(split.domains[client])] * len(rows)
    assert federation.side_values == {"angle": 4}
    assert torch.equal(federation.global_test.x, dataset.test.x[torch.from_numpy(split.global_test)])


@pytest.mark.parametrize("alpha", [{}, {"alpha": 0.5}, {"alpha": 0.5, "equal_sizes": True}])
def test_a_client_may_mix_angles_and_every_example_tells_its_own(alpha):
    federation, split, dataset = drawn({"kind": "rotation", "num_angles": 4, "angle_alpha": 0.5, **SIZES, **alpha})
    assert federation.side_values == {"angle": 4}
    for client in (0, 5, 16):
        records = federation.load(client)
        for part, table, shards in (
            (records.train, dataset.train, split.train),
            (records.validation, dataset.train, split.validation),
            (records.test, dataset.test, split.test),
        ):
            stored = table.x[torch.from_numpy(shards.of(client))]
            assert part.extra["angle"].shape == part.y.shape and part.extra["angle"].dtype == torch.int64
            assert torch.equal(part.x, turn_each(stored, part.extra["angle"].numpy(), 4))


def test_angles_are_drawn_anew_for_test_data_from_the_same_chances():
    mixed = {part: [mixed_angles(c, part, 500, 8, 1.0, seed=0) for c in range(100)] for part in ("train", "test")}
    assert all((mixed["train"][c] != mixed["test"][c]).any() for c in range(100))
    train, test = ([np.bincount(steps, minlength=8) / 500 for steps in mixed[part]] for part in ("train", "test"))
    assert np.abs(np.mean(train, axis=0) - 1 / 8).max() < 0.05 and np.std(train) > 0.08  # Dir(1.0) has 0.11
    assert np.abs(np.subtract(train, test)).mean() < 0.02  # sampling alone gives 0.014 or so
    favourites = drawn({"kind": "rotation", "angle_alpha": 1.0, **SIZES})[1].domains
    expected = [np.argmax(angle_chances(client, 8, 1.0, seed=0)) for client in range(17)]
    assert favourites.tolist() == expected and np.mean(np.argmax(train[:17], axis=1) == expected) > 0.7


def test_the_angles_of_a_mixed_cohort_stay_with_their_examples_through_opt_out_and_padding():
    table = {"kind": "rotation", "angle_alpha": 0.5, "alpha": 0.3, **SIZES}
    dataset, config = tiny_dataset(), parse_config({"split": table})
    split = draw_split(config.split, dataset, config.seed)
    opted = opt_out(split, dataset.train, record_fraction=0.4, seed=0)
    transform = domain_transform(config.split, split, 5, 0)
    federation = federation_from_split(dataset, split, opted, transform)
    clients = [int(client) for client in federation.participants[:6]]
    data = federation.data(clients, opted_in_only=True)
    for s, client in enumerate(clients):
        whole = federation.load(client)
        for part, records, mask in (
            (data.train, whole.train, whole.train_opted_in),
            (data.validation, whole.validation, whole.validation_opted_in),
        ):
            count = int(part.counts[s])
            assert part.extra["angle"].shape == part.y.shape and count == int(mask.sum())
            assert torch.equal(part.extra["angle"][s, :count], records.extra["angle"][mask])
            assert torch.equal(part.x[s, :count], records.x[mask])
    assert len(set(data.train.counts.tolist())) > 1


def test_clients_name_labels_their_way_and_the_global_test_is_as_it_was():
    federation, split, dataset = drawn({"kind": "permutation", "num_permutations": 3, **SIZES})
    orders = label_permutations(3, 5, seed=0)
    for client in range(17):
        stored = dataset.train.y[torch.from_numpy(split.train.of(client))].numpy()
        records = federation.load(client)
        assert (records.train.y.numpy() == orders[split.domains[client]][stored]).all()
        assert torch.equal(records.train.x, dataset.train.x[torch.from_numpy(split.train.of(client))])
        assert records.train.extra == {}  # the group is for scoring: nothing that trains may read it
    assert federation.side_values == {}
    assert torch.equal(federation.global_test.y, dataset.test.y[torch.from_numpy(split.global_test)])


def test_a_split_with_domains_survives_its_file(tmp_path):
    _, split, _ = drawn({"kind": "permutation", **SIZES})
    split.save(tmp_path / "split.safetensors")
    loaded = Split.load(tmp_path / "split.safetensors")
    assert loaded.digest == split.digest
    assert np.bincount(loaded.domains[:12]).tolist() == [3] * 4  # who belongs together: for scoring clusters


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "majority", **SIZES},
        {"kind": "dirichlet", **SIZES},
        {"kind": "dirichlet", "equal_sizes": True, **SIZES},
        {"kind": "k_labels", "labels_per_client": 2, **SIZES},
        {"kind": "size_skew", **SIZES},
        {"kind": "rotation", **SIZES},
        {"kind": "permutation", **SIZES},
        {"kind": "natural", "field": "user", "global_test_size": 20},
    ],
)
def test_every_kind_can_be_asked_for_and_follows_the_seed(table):
    _, split, _ = drawn(table)
    assert split.digest == drawn(table)[1].digest != drawn(table, seed=1)[1].digest


def test_pachinko_reads_the_coarse_field():
    plain = tiny_dataset()
    tables = [Table(t.x, t.y, {"coarse": t.y // 2}) for t in (plain.train, plain.test)]
    found = drawn({"kind": "pachinko", **SIZES}, Dataset("tiny", *tables, tuple("abcde")))[1]
    assert (found.train.sizes == 6).all()


@pytest.mark.parametrize(
    ("table", "shape", "message"),
    [
        ({"kind": "rotation", "num_angles": 0}, (1, 6, 6), r"split\.num_angles=0 is below 1"),
        ({"kind": "rotation", "angle_alpha": 0.0}, (1, 6, 6), r"split\.angle_alpha=0\.0 is not a positive"),
        ({"kind": "rotation", "angle_alpha": 1.0, "num_angles": 0}, (1, 6, 6), r"split\.num_angles=0 is below 1"),
        ({"kind": "rotation", "alpha": -1.0}, (1, 6, 6), r"split\.alpha=-1\.0 is not a positive"),
        ({"kind": "rotation"}, (1, 6, 5), r"split\.kind='rotation' turns square images.*\(1, 6, 5\)"),
        ({"kind": "rotation"}, (8,), r"split\.kind='rotation' turns square images"),
        ({"kind": "permutation", "num_permutations": 121}, (8,), r"split\.num_permutations=121 is more than the 120"),
        ({"kind": "permutation", "num_permutations": 0}, (8,), r"split\.num_permutations=0 is below 1"),
        ({"kind": "pachinko"}, (8,), r"split\.kind='pachinko' needs the field 'coarse', but.*label, user"),
        ({"kind": "natural", "field": "writer"}, (8,), r"split\.field='writer' needs the field 'writer'"),
        ({"kind": "natural"}, (8,), r"split\.field: field required"),
        ({"kind": "naturl"}, (8,), r"split\.kind='naturl' is not known\. Did you mean 'natural'"),
        ({"kind": "k_labels", "alpha": 1}, (8,), r"'split\.alpha' is not known beside split\.kind='k_labels'"),
    ],
)
def test_what_cannot_work_is_refused_with_value_reason_and_remedy(table, shape, message):
    sizes = {} if table["kind"] == "natural" else SIZES
    with pytest.raises(ConfigError, match=message):
        drawn({**sizes, **table}, tiny_dataset(shape))


def test_a_regression_has_no_classes_to_deal_out():
    table = Table(torch.rand(60, 2), torch.rand(60), {"user": torch.arange(60) % 2})
    dataset = Dataset("plane", table, table, ())
    with pytest.raises(ConfigError, match=r"split\.kind='majority' deals out classes.*Use split\.kind='natural'"):
        drawn(SIZES, dataset)
    assert drawn({"kind": "natural", "field": "user"}, dataset)[1].num_clients == 2
