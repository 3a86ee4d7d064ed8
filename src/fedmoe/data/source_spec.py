"""What is known of a published data set: its files, their contents, and where they come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Format = Literal[
    "digits",
    "idx",
    "idx by writer",
    "cifar10",
    "cifar100",
    "ag_news",
    "newsgroups",
    "sent140",
    "shakespeare",
    "spam",
    "synthetic_regression",
]


@dataclass(frozen=True)
class Remote:
    """A file at its publisher's. `checksum` is of the file as it is sent, such as "md5:…".

    `members` are the names wanted from a tar archive, and the files that they become; a plain file has none.
    """

    url: str
    file: str
    checksum: str
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceSpec:
    """A published data set. `folder` is None if no file is needed.

    `files` have the sha256 of their unpacked contents, or None where copies legitimately differ: then only their
    form is checked, and the number of rows where it is fixed.
    """

    name: str
    title: str
    folder: str | None
    format: Format
    train_rows: int
    test_rows: int
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    url: str
    cite: str
    licence: str
    files: Mapping[str, str | None] = field(default_factory=dict)
    remotes: tuple[Remote, ...] = ()
    no_remote: str = ""  # why `fedmoe data get` cannot fetch it, and what to do instead
    largest_file: int = 48_000_000  # bytes once unpacked: no more is read of any file
