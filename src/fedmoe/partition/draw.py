"""From the section [split] of a config to a split, and to what it does to a client's examples."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe import import_strings
from fedmoe.core_types import ClientId, Tensors
from fedmoe.data.dataset import Dataset
from fedmoe.errors import ConfigError
from fedmoe.partition import domains
from fedmoe.partition.dirichlet import split_by_dirichlet
from fedmoe.partition.k_labels import split_by_k_labels
from fedmoe.partition.majority import split_by_majority
from fedmoe.partition.natural import split_by_field
from fedmoe.partition.pachinko import split_by_pachinko
from fedmoe.partition.quotas import Labels, Pools, quotas, require_supply, stream
from fedmoe.partition.settings import (
    DrawnSplit,
    NaturalSplit,
    OutsideSplit,
    PachinkoSplit,
    PermutationSplit,
    PublicRows,
    RotationSplit,
    SplitConfig,
)
from fedmoe.partition.size_skew import split_by_size
from fedmoe.partition.split import Shards, Split


class Transform(NamedTuple):
    """What is done to a client's examples when they are loaded."""

    # client, "train" or "validation" or "test", x, y -> x, y, side information per example
    apply: Callable[[ClientId, str, Tensor, Tensor], tuple[Tensor, Tensor, Tensors]]
    side_values: Mapping[str, int]  # how many values each piece of side information has: 0 … that - 1


PUBLIC_SEED = 0

BY_LABEL: dict[str, Callable[..., Split]] = {
    "majority": split_by_majority,
    "dirichlet": split_by_dirichlet,
    "k_labels": split_by_k_labels,
    "size_skew": split_by_size,
}


def draw_split(config: SplitConfig, dataset: Dataset, seed: int) -> Split:
    if isinstance(config, OutsideSplit):
        arguments = {"dataset": dataset, "seed": seed}
        made: Split = import_strings.call("split.kind", config.kind, arguments, config.model_extra, Split)
        _require_rows(config.kind, made, dataset)
        return made
    public = public_rows(config, dataset.train.y.numpy(), dataset.num_classes)
    rest = np.setdiff1d(np.arange(len(dataset.train.y)), np.concatenate(list(public.values())))
    return with_public(_draw(config, dataset, rest, seed), public, rest)


def public_rows(config: PublicRows, y: NDArray[np.int64], num_classes: int) -> dict[str, NDArray[np.int64]]:
    """Rows that no client will hold, by the part of the split: as many of each class, at random in a regression.

    The same whatever the seed of a run, so that one model trained on them serves runs of all seeds.
    """
    sizes = (config.public_size, config.public_validation_size, config.global_validation_size)
    if sizes[1] and not sizes[0]:
        raise ConfigError(
            f"split.public_validation_size={sizes[1]} rows are held out of nothing: split.public_size is 0. Set both."
        )
    labels, classes = (y, num_classes) if num_classes else (np.zeros(len(y), dtype=np.int64), 1)
    pools = Pools(labels, classes, PUBLIC_SEED, "public")
    demand_PK = np.stack(
        [quotas(size, np.ones(classes), stream(PUBLIC_SEED, "public", part)) for part, size in enumerate(sizes)]
    )
    parts = {"public": sizes[0], "public_validation": sizes[1], "global_validation": sizes[2]}
    asked = " and ".join(f"split.{part}_size={size}" for part, size in parts.items() if size)
    setting = f"{asked}: what no client holds"
    require_supply(demand_PK.sum(0), pools.supply_K, setting, "Lower one of them")
    dealt = pools.deal(demand_PK)
    return {part: dealt.of(place) for place, part in enumerate(parts)}


def with_public(split: Split, public: dict[str, NDArray[np.int64]], rest: NDArray[np.int64]) -> Split:
    """`split` deals out rows of `rest`, which are numbered anew: back to rows of the training part."""
    if not any(map(len, public.values())):
        return split

    def of_training_part(shards: Shards) -> Shards:
        return shards._replace(rows=rest[shards.rows])

    test = of_training_part(split.test) if split.own_test == "train" else split.test
    return replace(
        split,
        train=of_training_part(split.train),
        validation=of_training_part(split.validation),
        test=test,
        public=public["public"],
        public_validation=public["public_validation"],
        global_validation=public["global_validation"],
    )


def _draw(config: DrawnSplit, dataset: Dataset, rest: NDArray[np.int64], seed: int) -> Split:
    """Among the rows `rest` of the training part."""
    labels = Labels(dataset.train.y.numpy()[rest], dataset.test.y.numpy(), dataset.num_classes)
    if isinstance(config, NaturalSplit):
        values = _column(dataset, config.field, f"split.field={config.field!r}")[rest]
        limits = config.model_dump(exclude={"kind", "field", *PublicRows.model_fields})
        return split_by_field(values, labels.test, labels.num_classes, **limits, seed=seed)
    _require_classes(dataset, config.kind)
    if isinstance(config, PachinkoSplit):
        return split_by_pachinko(labels, _column(dataset, "coarse", "split.kind='pachinko'")[rest], config, seed)
    if isinstance(config, RotationSplit):
        domains.require_square(dataset.input_shape)
        base = domains.base_split(labels, config, seed)
        if config.angle_alpha is not None:
            return domains.with_favourite_angles(base, config.num_angles, config.angle_alpha, seed)
        return domains.with_domains(base, "num_angles", config.num_angles, seed)
    if isinstance(config, PermutationSplit):
        domains.require_permutations(config.num_permutations, dataset.num_classes)
        base = domains.base_split(labels, config, seed)
        return domains.with_domains(base, "num_permutations", config.num_permutations, seed)
    return BY_LABEL[config.kind](labels, config, seed)


def domain_transform(config: SplitConfig, split: Split, num_classes: int, seed: int) -> Transform | None:
    """None: examples are used as they are."""
    of_client = split.domains
    if of_client is None:
        return None
    if isinstance(config, RotationSplit):
        return _rotation(config, of_client, seed)
    if isinstance(config, PermutationSplit):
        orders = torch.from_numpy(domains.label_permutations(config.num_permutations, num_classes, seed))
        return Transform(
            lambda client, _part, x, y: (x, domains.permute_labels(y, orders[int(of_client[client])]), {}), {}
        )
    return None


def _rotation(config: RotationSplit, of_client: NDArray[np.int64], seed: int) -> Transform:
    number, mix = config.num_angles, config.angle_alpha

    def turned(client: ClientId, part: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        if mix is None:
            steps = np.full(len(y), of_client[client], dtype=np.int64)
        else:
            steps = domains.mixed_angles(client, part, len(y), number, mix, seed)
        return domains.turn_each(x, steps, number), y, {"angle": torch.from_numpy(steps)}

    return Transform(turned, {"angle": number})


def _require_rows(kind: str, split: Split, dataset: Dataset) -> None:
    """Rows that a split of the user's own names must be there: as many clients in each part, and rows of the data."""
    own_test = dataset.train if split.own_test == "train" else dataset.test
    tables = {"train": dataset.train, "validation": dataset.train, "test": own_test}
    clients = split.num_clients + split.num_unseen
    for part, table in tables.items():
        shards = getattr(split, part)
        if len(shards.offsets) != clients + 1:
            raise ConfigError(
                f"split.kind={kind!r}: {part} has rows of {len(shards.offsets) - 1} clients, but there are {clients}."
            )
        _require_in_range(kind, part, shards.rows, len(table.y))
    _require_in_range(kind, "global_test", split.global_test, len(dataset.test.y))


def _require_in_range(kind: str, part: str, rows: NDArray[np.int64], count: int) -> None:
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ConfigError(
            f"split.kind={kind!r}: {part} names rows {rows.min()} to {rows.max()}, but there are {count}, from 0."
        )


def _require_classes(dataset: Dataset, kind: str) -> None:
    if not dataset.num_classes:
        raise ConfigError(
            f"split.kind={kind!r} deals out classes, but the data set {dataset.name!r} has none (a regression). "
            "Use split.kind='natural' with a field that says whose row it is."
        )


def _column(dataset: Dataset, name: str, setting: str) -> NDArray[Any]:
    if name not in dataset.train.columns:
        raise ConfigError(
            f"{setting} needs the field {name!r}, but the data set {dataset.name!r} has only: "
            f"{', '.join(dataset.train.columns)}. Choose one of them, another data set or another kind of split."
        )
    column: NDArray[Any] = dataset.train.column(name).numpy()
    return column
