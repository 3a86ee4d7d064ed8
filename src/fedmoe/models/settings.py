"""What the section [model] of a config may say: one class per network. The gate is the same network with one output."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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


ModelConfig = Annotated[
    MlpModel | SmallCnnModel | LeNetModel | ResNetModel | TextLstmModel | BagOfWordsModel, Field(discriminator="name")
]
