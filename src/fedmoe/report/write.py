"""The files of a report: a page that opens without a network, a table for a README, and the figures one by one."""

from collections.abc import Sequence
from pathlib import Path

from fedmoe.errors import RunError
from fedmoe.evaluation.summary import RunRecord
from fedmoe.report.curves import learning_curve
from fedmoe.report.figures import trade_off
from fedmoe.report.html import render
from fedmoe.report.markdown import markdown_table
from fedmoe.storage.files import make_private_folder, write_atomically


def write_report(results: Sequence[RunRecord], folder: Path, title: str) -> Path:
    """Write the report of runs, as `results.json` holds them, into `folder`; returns the path of the page."""
    files = _files(results, title)
    try:
        make_private_folder(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot hold a report: {error.strerror}. Choose another folder.") from error
    for name, content in files.items():
        if content:  # a figure without data is empty
            write_atomically(folder / name, content.encode(errors="replace"))  # a file name need not be Unicode
    return folder / "report.html"


def require_drawable(results: RunRecord, folder: Path) -> None:
    """Results that were altered after the run are named by their folder, whatever they hold now."""
    try:
        _files([results], "")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder / 'results.json'} is not as a run wrote it: a report of it fails with {type(error).__name__} "
            f"({error}). Run the same command again to write it anew."
        ) from error


def _files(results: Sequence[RunRecord], title: str) -> dict[str, str]:
    return {
        "report.html": render(results, title),
        "table.md": markdown_table(results),
        "trade_off.svg": trade_off(results),
        "accuracy_against_rounds.svg": learning_curve(results, "own", "round"),
        "accuracy_against_bytes.svg": learning_curve(results, "own", "bytes"),
        "pooled_against_rounds.svg": learning_curve(results, "pooled", "round"),
        "pooled_against_bytes.svg": learning_curve(results, "pooled", "bytes"),
    }
