"""What the section [split] of a config may say: one class per kind of split.

Values are checked where they are used, against the data: the splits say what does not fit.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from fedmoe.import_strings import EXAMPLE, kind_by
from fedmoe.setting_types import Float, Int, NonNegativeInt

Pairs = Literal["overlapping", "disjoint"]


class SplitSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitSizes(SplitSection):
    num_clients: Int = 15
    num_unseen: Int = 0
    train_size: Int = 25
    validation_size: Int = 10
    test_size: Int = 100
    global_test_size: Int = 500

    @property
    def own_size(self) -> int:
        """Rows of a client to learn from, training and validation together."""
        return self.train_size + self.validation_size

    @property
    def all_clients(self) -> int:
        return self.num_clients + self.num_unseen


class MajoritySplit(SplitSizes):
    kind: Literal["majority"] = "majority"
    share: Float = 0.8  # p: what the two majority classes hold together
    pairs: Pairs = "overlapping"


class DirichletSplit(SplitSizes):
    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Float = 0.5
    min_size: Int = 2
    equal_sizes: bool = False  # each client draws its own chances over classes, and as many rows as the others


class KLabelsSplit(SplitSizes):
    kind: Literal["k_labels"] = "k_labels"
    labels_per_client: Int = 4
    unseen_labels: Literal["new", "any"] = "new"  # new: sets of labels that no training client has
    num_anchors: Int = 0  # the first clients, with labels that no two of them share
    labels_per_anchor: Int = 2


class PachinkoSplit(SplitSizes):
    kind: Literal["pachinko"] = "pachinko"
    alpha: Float = 0.1  # over coarse labels
    beta: Float = 10.0  # over the fine labels of a coarse one


class SizeSkewSplit(SplitSizes):
    kind: Literal["size_skew"] = "size_skew"
    sigma: Float = 1.0  # of the logarithm of the sizes
    min_size: Int = 2


class DomainSplit(SplitSizes):
    alpha: Float | None = None  # label skew by Dir(alpha); none: iid, all clients of one size
    min_size: Int = 2
    equal_sizes: bool = False  # as in a split by Dirichlet


class RotationSplit(DomainSplit):
    kind: Literal["rotation"] = "rotation"
    num_angles: Int = 8
    angle_alpha: Float | None = None  # none: one angle per client; else each client mixes angles by Dir(angle_alpha)


class PermutationSplit(DomainSplit):
    kind: Literal["permutation"] = "permutation"
    num_permutations: Int = 4


class NaturalSplit(SplitSection):
    """Sizes are upper limits, and come before the shares; see `per_client_holdout.HoldoutSizes`."""

    kind: Literal["natural"] = "natural"
    field: str
    num_clients: Int | None = None  # default: all with min_size rows
    num_unseen: NonNegativeInt = 0
    train_size: Int | None = None
    validation_size: Int | None = None
    test_size: Int | None = None
    validation_share: Float = 0.1
    test_share: Float = 0.2
    min_size: Int = 10
    global_test_size: Int = 500


class OutsideSplit(BaseModel):
    """A function of the user's own: kind(dataset, seed, **the other keys) -> Split."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str


SplitConfig = Annotated[
    Annotated[MajoritySplit, Tag("majority")]
    | Annotated[DirichletSplit, Tag("dirichlet")]
    | Annotated[KLabelsSplit, Tag("k_labels")]
    | Annotated[PachinkoSplit, Tag("pachinko")]
    | Annotated[SizeSkewSplit, Tag("size_skew")]
    | Annotated[RotationSplit, Tag("rotation")]
    | Annotated[PermutationSplit, Tag("permutation")]
    | Annotated[NaturalSplit, Tag("natural")]
    | Annotated[OutsideSplit, Tag(EXAMPLE)],
    Discriminator(kind_by("kind")),
]
