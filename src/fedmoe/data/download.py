"""From a publisher to the data folder: downloaded, verified, unpacked aside, and moved in place whole."""

import shutil
import tempfile
from pathlib import Path

from fedmoe.data.available import VARIABLE, data_folder, find_source, missing_files
from fedmoe.data.convert import CONVERTERS, Downloads
from fedmoe.data.fetch import Progress, Show, fetch
from fedmoe.data.loading import READERS
from fedmoe.data.source_spec import Remote, SourceSpec
from fedmoe.data.unpack import read_members
from fedmoe.errors import DataError

DOWNLOADS = ".downloads"  # in the data folder: partial files, kept so that a broken download can go on


def ignore(progress: Progress) -> None:
    """Show nothing."""


def get(name: str, folder: Path | None = None, progress: Show = ignore) -> Path:
    """Download a data set into its folder under `folder` (or FEDMOE_DATA), ready for `load_dataset`.

    A set that is there is left alone. A set appears only once it has been read successfully: whatever goes wrong,
    nothing half-written is left where it would be read. `progress` is called with each piece that arrives.
    """
    source = find_source(name)
    if source.folder is None:
        raise DataError(f"{source.title} needs no download: data.name={name!r} works as it is.")
    base = data_folder(folder)
    if base is None:
        raise DataError(f"There is no folder to put {source.title} into. Set {VARIABLE}, or name a folder.")
    home = base / source.folder
    if not missing_files(source, home):
        return home
    if not source.remotes:
        raise DataError(f"{source.title} has no public address: {source.no_remote}. {_by_hand(source, home)}")
    try:
        _install(source, base, home, progress)
    except DataError as error:
        raise DataError(f"{source.title} could not be downloaded. {error} {_by_hand(source, home)}") from error
    except OSError as error:
        raise DataError(f"{source.title} could not be written to {base} ({error}). Check the disk.") from error
    return home


def _install(source: SourceSpec, base: Path, home: Path, progress: Show) -> None:
    parts = base / DOWNLOADS / home.name
    parts.mkdir(parents=True, exist_ok=True)
    needed = [remote for remote in source.remotes if not _is_here(remote, source, home)]
    for remote in needed:
        fetch(remote, parts / remote.file, progress)
    downloads = {remote.file: parts / remote.file for remote in needed}
    aside = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=base))
    try:
        _fill(source, downloads, home, aside)
        READERS[source.format](source, aside)
        _move(source, aside, home)
    except DataError as error:
        shutil.rmtree(parts, ignore_errors=True)  # what could not be used now could not be used next time
        raise DataError(str(error).replace(str(aside), str(home))) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(parts, ignore_errors=True)


def _is_here(remote: Remote, source: SourceSpec, home: Path) -> bool:
    """Another data set in the same folder may have brought a file already."""
    return remote.file in source.files and (home / remote.file).is_file()


def _fill(source: SourceSpec, downloads: Downloads, home: Path, aside: Path) -> None:
    """The complete set in the folder `aside`: files that were here, sent, unpacked, or converted."""
    for file in source.files:
        origin = home / file if (home / file).is_file() else downloads.get(file)
        if origin is not None:
            shutil.copyfile(origin, aside / file)
    for remote in source.remotes:
        if remote.members:
            _unpack(source, remote, downloads[remote.file], aside)
    if source.format in CONVERTERS:
        CONVERTERS[source.format](source, downloads, aside)


def _unpack(source: SourceSpec, remote: Remote, archive: Path, aside: Path) -> None:
    for name, content in read_members(archive, remote.members.__contains__, source.largest_file):
        (aside / remote.members[name]).write_bytes(content)
    missing = missing_files(source, aside)
    if missing:
        raise DataError(f"{remote.url} lacks {', '.join(missing)}.")


def _move(source: SourceSpec, aside: Path, home: Path) -> None:
    """At once if the folder is new; else file by file, each of them whole."""
    if not home.exists():
        aside.chmod(0o755)
        aside.rename(home)
        return
    for file in missing_files(source, home):
        (aside / file).replace(home / file)


def _by_hand(source: SourceSpec, home: Path) -> str:
    return f"Put {', '.join(source.files)} into {home} by hand (from {source.url})."
