"""What the section [model] of a config may say: one class per network. The gate is the same network with one output."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from fedmoe.errors import ConfigError
from fedmoe.import_strings import EXAMPLE, kind_by
from fedmoe.models.common_expert import Embedding
from fedmoe.paths import FilePath
from fedmoe.setting_types import NonNegativeFloat, PositiveFloat, PositiveInt


class StartSection(BaseModel):
    """Where every algorithm's models start: from fresh weights, or from those of a file."""

    start_from: FilePath | None = None  # a safetensors file with all weights of the expert; gates start afresh
    start_noise: NonNegativeFloat = 0.0  # moves each copy at random: a share of the standard deviation of each tensor

    @model_validator(mode="after")
    def _noise_is_added_to_something(self) -> "StartSection":
        if self.start_noise and self.start_from is None:
            raise ConfigError(
                f"model.start_noise={self.start_noise} moves the weights of a file, but model.start_from names none. "
                "Name one, or leave start_noise away."
            )
        return self


class ModelSection(StartSection):
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


class OutsideModel(StartSection):
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


class CommonExpertConfig(BaseModel):
    """A frozen network that every client has. `fedmoe pretrain` makes one of public data; any file of weights does."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    weights: FilePath
    model: ModelConfig | None = None  # default: that of the section [model]
    # Where `fedmoe pretrain` ends: at this share of right answers on held-out public rows. Default: after all epochs.
    until_accuracy: Annotated[PositiveFloat, Field(le=1)] | None = None
    embedding: Embedding = "features"  # the input of its output layer; "output": what it returns, without such a layer
