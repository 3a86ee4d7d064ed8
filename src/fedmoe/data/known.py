"""The data sets that can be named, and what their files must contain.

Checksums are sha256 of the unpacked contents, since gzip headers differ between copies of one file. The order of
`files` is the order of reading: training files first. To add a data set in a known format, add a Source.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Source:
    """A published data set. `folder` is None if no file is needed."""

    name: str
    title: str
    folder: str | None
    format: Literal["idx", "cifar", "digits"]
    train_rows: int
    test_rows: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    url: str
    cite: str
    licence: str
    files: dict[str, str] = field(default_factory=dict)
    largest_file: int = 48_000_000  # bytes once unpacked: no more is read of any file


DIGITS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_digits = Source(
    name="digits",
    title="Digits 8x8 (optdigits)",
    folder=None,
    format="digits",
    train_rows=1197,
    test_rows=600,
    input_shape=(1, 8, 8),
    class_names=DIGITS,
    url="https://archive.ics.uci.edu/dataset/80",
    cite="Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998",
    licence="CC BY 4.0",
)
_mnist = Source(
    name="mnist",
    title="MNIST",
    folder="mnist",
    format="idx",
    train_rows=60_000,
    test_rows=10_000,
    input_shape=(1, 28, 28),
    class_names=DIGITS,
    url="http://yann.lecun.com/exdb/mnist/",
    cite="LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, 1998",
    licence="CC BY-SA 3.0",
    files={
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
_fashion_mnist = Source(
    name="fashion_mnist",
    title="Fashion-MNIST",
    folder="fashion-mnist",
    format="idx",
    train_rows=60_000,
    test_rows=10_000,
    input_shape=(1, 28, 28),
    class_names=GARMENTS,
    url="https://github.com/zalandoresearch/fashion-mnist",
    cite="Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017",
    licence="MIT",
    files={
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
_cifar10 = Source(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    format="cifar",
    train_rows=50_000,
    test_rows=10_000,
    input_shape=(3, 32, 32),
    class_names=OBJECTS,
    url="https://www.cs.toronto.edu/~kriz/cifar.html (binary version)",
    cite="Krizhevsky, Learning multiple layers of features from tiny images, 2009",
    licence="none stated",
    files={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)

SOURCES = {source.name: source for source in (_digits, _mnist, _fashion_mnist, _cifar10)}
