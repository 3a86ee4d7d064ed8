"""The data sets that can be named, and what their files must contain: images here, the others in `text_registry`.

Checksums are sha256 of the unpacked contents, since gzip headers differ between copies of one file. The order of
`files` is the order of reading: training files first. To add a data set in a known format, add a SourceSpec.
"""

from dataclasses import replace

from fedmoe.data.source_spec import Remote, SourceSpec
from fedmoe.data.text_registry import TEXT_SOURCES


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DIGITS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE_OBJECTS = _names("""
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
""")
MNIST_HOST = "https://ossci-datasets.s3.amazonaws.com/mnist"  # a mirror: the authors' page no longer serves files
FASHION_HOST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
QMNIST_HOST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
CIFAR_HOST = "https://www.cs.toronto.edu/~kriz"


def _idx_remotes(host: str, *md5: str) -> tuple[Remote, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(Remote(f"{host}/{name}", name, f"md5:{one}") for name, one in zip(names, md5, strict=True))


def _qmnist_remote(file: str, md5: str) -> Remote:
    return Remote(f"{QMNIST_HOST}/{file}", file, f"md5:{md5}")


def _cifar_remote(file: str, folder: str, md5: str, names: tuple[str, ...]) -> tuple[Remote, ...]:
    return (Remote(f"{CIFAR_HOST}/{file}", file, f"md5:{md5}", {f"{folder}/{name}": name for name in names}),)


_digits = SourceSpec(
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
_mnist = SourceSpec(
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
    remotes=_idx_remotes(
        MNIST_HOST,
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
_fashion_mnist = SourceSpec(
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
    remotes=_idx_remotes(
        FASHION_HOST,
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
_cifar10 = SourceSpec(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    format="cifar10",
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
    remotes=_cifar_remote(
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        "c32a1d4ab5d03f1284b67883e8d87530",
        (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    ),
)
_mnist_by_writer = replace(
    _mnist,
    name="mnist_by_writer",
    title="MNIST by writer",
    format="idx by writer",
    url="http://yann.lecun.com/exdb/mnist/ and https://github.com/facebookresearch/qmnist",
    cite=f"{_mnist.cite}; Yadav and Bottou, Cold case: the lost MNIST digits, 2019",
    files={**_mnist.files, "writers.npz": "83a810f30b1af94c86979f9ff460b59ad40119afc07a233ee083d922fbabdf08"},
    remotes=(
        *_mnist.remotes,
        _qmnist_remote("qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
        _qmnist_remote("qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa"),
    ),
)
_cifar100 = SourceSpec(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-binary",
    format="cifar100",
    train_rows=50_000,
    test_rows=10_000,
    input_shape=(3, 32, 32),
    class_names=FINE_OBJECTS,
    url="https://www.cs.toronto.edu/~kriz/cifar.html (binary version)",
    cite=_cifar10.cite,
    licence="none stated",
    files={"train.bin": None, "test.bin": None},
    largest_file=160_000_000,
    remotes=_cifar_remote(
        "cifar-100-binary.tar.gz",
        "cifar-100-binary",
        "03b5dce01913d631647c71ecec9e9cb8",
        ("train.bin", "test.bin"),
    ),
)

IMAGE_SOURCES = (_digits, _mnist, _fashion_mnist, _cifar10, _cifar100, _mnist_by_writer)
SOURCES = {source.name: source for source in (*IMAGE_SOURCES, *TEXT_SOURCES)}
