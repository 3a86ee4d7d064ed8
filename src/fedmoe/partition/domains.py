"""Clients that differ in what they see or mean: turned images (rotated MNIST), or labels under other names.

A base split says who holds which rows; `Split.domains` says which domain a client belongs to; the examples themselves
are changed when a client's training, validation and own test examples are loaded. The global test set is left as it is.
An image's angle is side information that a client may learn from; a client's group of labels is never given to it.
Labels that a rule of opt-out or a picture of the split reads are those of the data set, before any permutation.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe.errors import ConfigError
from fedmoe.partition.dirichlet import split_by_dirichlet
from fedmoe.partition.quotas import Labels, Shares, proportions, require_concentration, stream
from fedmoe.partition.settings import DirichletSplit, DomainSplit, SizeSkewSplit, SplitSizes
from fedmoe.partition.size_skew import split_by_size
from fedmoe.partition.split import Indices, Split


def base_split(labels: Labels, config: DomainSplit, seed: int) -> Split:
    """Labels iid and clients of equal size (no alpha), or by Dirichlet."""
    sizes = config.model_dump(include={*SplitSizes.model_fields, "min_size"})
    if config.alpha is None:
        return split_by_size(labels, SizeSkewSplit(sigma=0.0, **sizes), seed)
    skewed = DirichletSplit(alpha=config.alpha, equal_sizes=config.equal_sizes, **sizes)
    return split_by_dirichlet(labels, skewed, seed)


def with_domains(split: Split, key: str, num_domains: int, seed: int) -> Split:
    """Domains at random, each with the same number of training clients and of unseen ones, give or take one."""
    require_domains(key, num_domains)
    rng = stream(seed, key, num_domains)
    dealt = [rng.permutation(np.arange(number) % num_domains) for number in (split.num_clients, split.num_unseen)]
    return replace(split, domains=np.concatenate(dealt).astype(np.int64))


def with_favourite_angles(split: Split, num_angles: int, angle_alpha: float, seed: int) -> Split:
    """Clients that mix angles: the domain of each is the angle that it has the best chance of."""
    require_domains("num_angles", num_angles)
    require_concentration("angle_alpha", angle_alpha)
    clients = range(split.num_clients + split.num_unseen)
    favourites = [angle_chances(client, num_angles, angle_alpha, seed).argmax() for client in clients]
    return replace(split, domains=np.array(favourites, dtype=np.int64))


def turn(images: Tensor, angle: float) -> Tensor:
    """Square images (B, C, H, H) turned counter-clockwise by degrees.

    Bilinear, exact for multiples of 90; where a corner comes from outside, the nearest edge pixel is repeated.

    >>> turn(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90)
    tensor([[[[2., 4.],
              [1., 3.]]]])
    """
    if angle % 90 == 0:
        return torch.rot90(images, int(angle // 90) % 4, (-2, -1))
    radians = torch.tensor(angle, dtype=images.dtype).deg2rad()
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros((), dtype=images.dtype)
    back = torch.stack([torch.stack([cos, -sin, zero]), torch.stack([sin, cos, zero])])
    grid = F.affine_grid(back.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def turn_each(images: Tensor, steps: Indices, num_angles: int) -> Tensor:
    """Each image by its own number of steps of 360 / num_angles degrees."""
    turned = torch.empty_like(images)
    for step in np.unique(steps):
        at = torch.from_numpy(np.flatnonzero(steps == step))
        turned[at] = turn(images[at], 360 * int(step) / num_angles)
    return turned


def angle_chances(client: int, num_angles: int, angle_alpha: float, seed: int) -> Shares:
    """A client's own chances of each angle, out of Dir(angle_alpha) (Reisser et al. 2021, Section 4.2)."""
    return proportions(num_angles, angle_alpha, stream(seed, "angle chances", client))


def mixed_angles(client: int, part: str, number: int, num_angles: int, angle_alpha: float, seed: int) -> Indices:
    """Angles for a client's images of one part, in order: drawn anew for each part, from the client's chances."""
    chances = angle_chances(client, num_angles, angle_alpha, seed)
    return stream(seed, f"angles of {part}", client).choice(num_angles, number, p=chances).astype(np.int64)


def label_permutations(number: int, num_classes: int, seed: int) -> Indices:
    """(number, K): the first leaves labels as they are, the others are random; with two or more labels they differ."""
    permutations = [np.arange(num_classes)]
    while len(permutations) < number:
        drawn = stream(seed, "permutation", len(permutations)).permutation(num_classes)
        while any((drawn == known).all() for known in permutations):
            drawn = next_permutation(drawn)
        permutations.append(drawn)
    return np.stack(permutations).astype(np.int64)


def next_permutation(order: Indices) -> Indices:
    """The next in the dictionary, and the first after the last: walking on visits every permutation.

    >>> next_permutation(np.array([0, 2, 1])), next_permutation(np.array([2, 1, 0]))
    (array([1, 0, 2]), array([0, 1, 2]))
    """
    rises = np.flatnonzero(order[:-1] < order[1:])
    if not rises.size:
        return order[::-1].copy()
    at, found = rises[-1], order.copy()
    swap = np.flatnonzero(order > order[at])[-1]
    found[[at, swap]] = found[[swap, at]]
    found[at + 1 :] = found[at + 1 :][::-1]
    return found


def permute_labels(y: Tensor, permutation: Tensor) -> Tensor:
    """Class k becomes class permutation[k].

    >>> permute_labels(torch.tensor([0, 2, 2]), torch.tensor([1, 2, 0]))
    tensor([1, 0, 0])
    """
    return permutation.to(y.device)[y]


def require_square(input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ConfigError(
            f"split.kind='rotation' turns square images, but these examples have shape {input_shape}. "
            "Choose another kind of split or an image data set."
        )


def require_permutations(number: int, num_classes: int) -> None:
    possible = 1
    for factor in range(2, num_classes + 1):
        possible = min(possible * factor, number)
    if number > possible:
        raise ConfigError(
            f"split.num_permutations={number} is more than the {possible} orders of {num_classes} labels. Lower it."
        )


def require_domains(key: str, number: int) -> None:
    if number < 1:
        raise ConfigError(f"split.{key}={number} is below 1. Set it to 1 or more.")
