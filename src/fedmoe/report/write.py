"""The files of a report: a page that opens without a network, and a table for a README."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError

from fedmoe.errors import RunError
from fedmoe.report.markdown import markdown_table
from fedmoe.report.page import render
from fedmoe.report.runs import StoredRun, read_run
from fedmoe.storage.files import make_private_folder, write_atomically


def write_report(runs: Sequence[StoredRun], folder: Path, title: str, problems: Sequence[str] = ()) -> Path:
    """Write the report of some runs into `folder`; returns the path of the page."""
    files = {
        "report.html": render(runs, title, problems),
        "table.md": markdown_table([run.results for run in runs]),
    }
    try:
        make_private_folder(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot hold a report: {error.strerror}. Choose another folder.") from error
    for name, content in files.items():
        write_atomically(folder / name, content.encode(errors="replace"))  # a file name need not be Unicode
    return folder / "report.html"


def read_drawable(folder: Path) -> StoredRun:
    """A run that can be shown; results that were altered since are named by their folder, whatever they hold."""
    run = read_run(folder)
    try:
        render([run], "")
        markdown_table([run.results])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        raise RunError(
            f"{folder / 'results.json'} is not as a run wrote it: a report of it fails with {type(error).__name__} "
            f"({error}). Run the same command again to write it anew."
        ) from error
    return run
