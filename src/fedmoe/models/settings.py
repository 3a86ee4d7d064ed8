"""What the section [model] of a config may say: one class per network. The gate is the same network with one output."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from fedmoe.import_strings import EXAMPLE, kind_by
from fedmoe.setting_types import PositiveInt


class ModelSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MlpModel(ModelSection):
    name: Literal["mlp"] = "mlp"
    hidden: tuple[PositiveInt, ...] = (64,)


class SmallCnnModel(ModelSection):
    name: Literal["small_cnn"] = "small_cnn"


class LeNetModel(ModelSection):
    name: Literal["lenet"] = "lenet"
    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    dense: tuple[PositiveInt, ...] = (512,)


class ResNetModel(ModelSection):
    name: Literal["resnet"] = "resnet"
    depth: Literal[8, 20, 34] = 20
    groups: PositiveInt | None = None  # of the GroupNorm layers; default: 8, for depth 34 32


class TextLstmModel(ModelSection):
    name: Literal["text_lstm"] = "text_lstm"
    embedding: PositiveInt = 100
    hidden: PositiveInt = 64
    layers: PositiveInt = 1
    bidirectional: bool = True


class BagOfWordsModel(ModelSection):
    name: Literal["bag_of_words"] = "bag_of_words"
    counts: Literal["log1p", "raw"] = "log1p"


class OutsideModel(BaseModel):
    """A function of the user's own: name(input_shape, num_outputs, **the other keys) -> nn.Module.

    Of texts it is also given the `vocabulary_size`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str


ModelConfig = Annotated[
    Annotated[MlpModel, Tag("mlp")]
    | Annotated[SmallCnnModel, Tag("small_cnn")]
    | Annotated[LeNetModel, Tag("lenet")]
    | Annotated[ResNetModel, Tag("resnet")]
    | Annotated[TextLstmModel, Tag("text_lstm")]
    | Annotated[BagOfWordsModel, Tag("bag_of_words")]
    | Annotated[OutsideModel, Tag(EXAMPLE)],
    Discriminator(kind_by("name")),
]
