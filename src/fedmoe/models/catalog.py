"""From the section [model] of a config to a network that fits the data."""

from torch import nn

from fedmoe import import_strings
from fedmoe.errors import ConfigError
from fedmoe.models.images import LeNet, SmallCNN, mlp
from fedmoe.models.resnet import resnet
from fedmoe.models.settings import (
    BagOfWordsModel,
    LeNetModel,
    MlpModel,
    ModelConfig,
    OutsideModel,
    ResNetModel,
    TextLstmModel,
)
from fedmoe.models.text import BagOfWords, TextLSTM


def build_model(
    config: ModelConfig, input_shape: tuple[int, ...], num_outputs: int, vocabulary_size: int | None = None
) -> nn.Module:
    if isinstance(config, OutsideModel):
        arguments = {"input_shape": input_shape, "num_outputs": num_outputs}
        vocabulary = {} if vocabulary_size is None else {"vocabulary_size": vocabulary_size}
        settings = {**vocabulary, **(config.model_extra or {})}
        made: nn.Module = import_strings.call("model.name", config.name, arguments, settings, nn.Module)
        return made
    if isinstance(config, MlpModel):
        return mlp(input_shape, num_outputs, config.hidden)
    if isinstance(config, TextLstmModel | BagOfWordsModel):
        return _text_model(config, input_shape, num_outputs, vocabulary_size)
    _require_images(config.name, input_shape, smallest=8 if isinstance(config, ResNetModel) else 16)
    if isinstance(config, ResNetModel):
        _require_groups(config)
        return resnet(input_shape, num_outputs, config.depth, config.groups)
    if isinstance(config, LeNetModel):
        return LeNet(input_shape, num_outputs, config.channels, config.dense)
    return SmallCNN(input_shape, num_outputs)


def _text_model(
    config: TextLstmModel | BagOfWordsModel,
    input_shape: tuple[int, ...],
    num_outputs: int,
    vocabulary_size: int | None,
) -> nn.Module:
    is_bag = isinstance(config, BagOfWordsModel)
    fits = len(input_shape) == 2 and input_shape[0] == 2 if is_bag else len(input_shape) == 1
    if vocabulary_size is None or not fits:
        wanted = "words with counts, of shape (2, L)," if is_bag else "token ids, of shape (L,),"
        raise ConfigError(
            f"model.name={config.name!r} needs {wanted} and the size of their vocabulary; these examples have shape "
            f"{input_shape} and {'no vocabulary' if vocabulary_size is None else f'{vocabulary_size} words'}. "
            "Use model.name='mlp', or a data set of texts."
        )
    if isinstance(config, BagOfWordsModel):
        return BagOfWords(vocabulary_size, num_outputs, config.counts)
    sizes = (config.embedding, config.hidden, config.layers, config.bidirectional)
    return TextLSTM(vocabulary_size, num_outputs, *sizes)


def _require_images(name: str, input_shape: tuple[int, ...], smallest: int) -> None:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ConfigError(
            f"model.name={name!r} needs images of at least {smallest}x{smallest} pixels; these examples have shape "
            f"{input_shape}. Use model.name='mlp'."
        )


def _require_groups(config: ResNetModel) -> None:
    narrowest = 64 if config.depth == 34 else 16
    if config.groups is not None and narrowest % config.groups:
        raise ConfigError(
            f"model.groups={config.groups} does not divide the {narrowest} channels of a ResNet-{config.depth}. "
            f"Choose a divisor of {narrowest}."
        )
