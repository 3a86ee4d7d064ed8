"""What the section [split] of a config may say: one class per kind of split.

Values are checked where they are used, against the data: the splits say what does not fit.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from fedmoe.import_strings import EXAMPLE, kind_by
from fedmoe.setting_types import Float, Int, NonNegativeInt, PositiveInt

Pairs = Literal["overlapping", "disjoint"]


class SplitSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: NonNegativeInt | None = None  # default: that of the run; set, runs of all seeds have the same clients


class PublicRows(SplitSection):
    """Rows of the training part that no client holds, as many of each class.

    Public ones are for a model that everybody is given. On those of the global validation every client's model is
    scored, as on the global test: to choose settings by.
    """

    public_size: NonNegativeInt = 0
    public_validation_size: NonNegativeInt = 0  # held out of the public rows: they decide when its training ends
    global_validation_size: NonNegativeInt = 0


class SplitSizes(PublicRows):
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

    @property
    def labelled_clients(self) -> int:
        """Clients that hold rows to learn from."""
        return self.all_clients


class NewClientSizes(SplitSizes):
    """What else unseen clients may be (Dun et al. 2023)."""

    replacement: bool = False  # each client draws its rows alone: two clients may hold the same row
    unseen_labelled: bool = True  # false: an unseen client has no rows to learn from, and chooses by its test inputs
    unseen_test_size: PositiveInt | None = None  # default: test_size
    # The first so many unseen clients are for choosing settings. A fifth of the test part is theirs alone, and a client
    # of them has fewer test rows than it should where that has no more.
    num_validation: NonNegativeInt = 0

    @property
    def labelled_clients(self) -> int:
        return self.all_clients if self.unseen_labelled else self.num_clients

    def test_size_of(self, client: int) -> int:
        return self.test_size if client < self.num_clients else self.unseen_test_size or self.test_size

    def validates(self, client: int) -> bool:
        return self.num_clients <= client < self.num_clients + self.num_validation


class MajoritySplit(SplitSizes):
    kind: Literal["majority"] = "majority"
    share: Float = 0.8  # p: what the two majority classes hold together
    pairs: Pairs = "overlapping"


class DirichletSplit(NewClientSizes):
    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Float = 0.5
    min_size: Int = 2
    equal_sizes: bool = False  # each client draws its own chances over classes, and as many rows as the others


class KLabelsSplit(NewClientSizes):
    kind: Literal["k_labels"] = "k_labels"
    labels_per_client: Int = 4
    unseen_labels: Literal["new", "any"] = "new"  # new: sets of labels that no training client has
    num_anchors: Int = 0  # the first clients, with labels that no two of them share
    labels_per_anchor: Int = 2
    # Labels in so many groups at random; training client c has labels of group c mod this, as in schedule.pool.groups.
    label_groups: PositiveInt = 1


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


class NaturalSplit(PublicRows):
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


DrawnSplit = (
    MajoritySplit
    | DirichletSplit
    | KLabelsSplit
    | PachinkoSplit
    | SizeSkewSplit
    | RotationSplit
    | PermutationSplit
    | NaturalSplit
)  # those of this package

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
