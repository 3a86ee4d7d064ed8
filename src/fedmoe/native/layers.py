"""What a layer of a program is, to Python and to the native kernels."""

from typing import NamedTuple

from fedmoe.native.recurrent import READ_OUTS

CONV, DENSE, MAX_POOL, AVERAGE_POOL, RELU, SIGMOID, TANH, TO_CHANNELS_FIRST, EMBEDDING_MEAN = range(9)
GROUP_NORM, ADD, SUBSAMPLE, LSTM = range(9, 13)

INPUT, NONE = -1, -2  # instead of the number of a layer

_NAMES = (
    "convolution",
    "dense",
    "max pool",
    "average pool",
    "relu",
    "sigmoid",
    "tanh",
    "channels first",
    "embedding mean",
    "group norm",
    "sum",
    "subsample",
    "lstm",
)

MOST_WORDS = 2**24  # words travel to the kernels as float32, beside all other inputs

Size = tuple[int, int, int]  # channels, height, width; a vector is (c, 1, 1)


class Layer(NamedTuple):
    """The same numbers in the same order as `struct Layer` in layer.h."""

    kind: int
    c: int
    h: int
    w: int
    oc: int
    oh: int
    ow: int
    ch: int = 1
    cw: int = 1
    kh: int = 1
    kw: int = 1
    sh: int = 1
    sw: int = 1
    ph: int = 0
    pw: int = 0
    qh: int = 1
    qw: int = 1
    rh: int = 1
    rw: int = 1
    relu: int = 0
    weight: int = -1
    bias: int = -1
    source: int = INPUT
    second: int = NONE
    groups: int = 1
    epsilon_bits: int = 0

    @property
    def output(self) -> Size:
        return self.oc, self.oh, self.ow

    @property
    def reads_words(self) -> bool:
        return self.kind in (EMBEDDING_MEAN, LSTM) and self.weight >= 0

    @property
    def params(self) -> set[int]:
        """Of an LSTM `bias` is the first parameter of its cells, of which each has its biases or none."""
        if self.kind == LSTM:
            return {self.weight, *range(self.bias, self.bias + self.kh * self.kw * (4 if self.pw else 2))} - {-1}
        return {self.weight, self.bias} - {-1}

    def describe(self) -> str:
        name = _NAMES[self.kind]
        if self.kind == LSTM:
            words = f"embedding {self.qh} + " if self.reads_words else ""
            way = " in both directions" if self.kw == 2 else ""
            deep = f", {self.kh} levels" if self.kh > 1 else ""
            return f"{words}{name} {self.oc // self.kw}{way}{deep}, {READ_OUTS[self.sh]} -> {self.oc}"
        kernel = f" {self.kh}x{self.kw}" if self.kind in (CONV, MAX_POOL, AVERAGE_POOL) else ""
        pool = f" + max pool {self.qh}x{self.qw}" if self.qh * self.qw > 1 else ""
        pool += f" of {self.groups}" if self.kind == GROUP_NORM else ""
        pool += " + shortcut" if self.kind == GROUP_NORM and self.second != NONE else ""
        size = "x".join(str(length) for length in self.output if length > 1) or "1"
        return f"{name}{kernel}{pool}{' + relu' if self.relu else ''} -> {size}"


class Program(NamedTuple):
    """`params` names the parameters in the order of the numbers in `weight` and `bias`."""

    layers: tuple[Layer, ...]
    params: tuple[str, ...]
    input_shape: tuple[int, ...]
    channels_last: bool  # images of several channels are given to the kernels as (height, width, channels)
    num_outputs: int


class Unsupported(Exception):  # noqa: N818 (not an error: PyTorch takes over)
    """Why a module is no chain of the layers that the kernels know."""
