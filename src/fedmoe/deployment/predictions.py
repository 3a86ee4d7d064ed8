"""What a personal model says of many rows, and as a file. Shape suffixes: N rows, B rows of a batch, C classes."""

import csv
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmoe.data.rows import RowReader
from fedmoe.errors import ConfigError, DataError
from fedmoe.evaluation.personal_model import PersonalModel, Prior
from fedmoe.result import Result
from fedmoe.storage.files import write_atomically

BATCH = 512  # rows that are computed together


class Predictions(NamedTuple):
    """Probabilities of classes, or, where there are no class names, the numbers of a regression."""

    answers_NC: NDArray[np.float32]
    class_names: tuple[str, ...]

    @property
    def classes(self) -> list[str]:
        """The most likely class of each row."""
        return [self.class_names[best] for best in self.answers_NC.argmax(1).tolist()]

    def columns(self) -> dict[str, list[Any]]:
        """As a table: the class, then the probability of each; or the numbers."""
        columns_CN = self.answers_NC.T.tolist()
        if not self.class_names:
            return {f"value {number}": column_N for number, column_N in enumerate(columns_CN)}
        shares = {f"p({name})": share_N for name, share_N in zip(self.class_names, columns_CN, strict=True)}
        return {"class": self.classes, **shares}


def reader_of(result: Result) -> RowReader:
    """How rows become what the models of this run read."""
    federation = result.federation
    are_texts = federation.vocabulary_size is not None
    return RowReader(federation.input_shape, federation.input_dtype, federation.table, are_texts)


def predict(model: PersonalModel, x: Tensor, prior: Prior | None = None) -> Predictions:
    """With a `prior` the answers under these label frequencies; estimated ones are those of all the rows together."""
    try:
        with torch.no_grad():
            log_prior = None if prior is None else model.log_prior(prior, x)
            parts = [model(part_B, log_prior) for part_B in x.split(BATCH)]
    except (IndexError, RuntimeError) as error:  # a word beyond the vocabulary, say
        raise DataError(f"the model cannot read these rows: {str(error).splitlines()[0]}.") from error
    return Predictions(torch.cat(parts).cpu().numpy(), model.facts.class_names)


def write_predictions(predictions: Predictions, path: Path) -> None:
    write_columns(predictions.columns(), path)


def write_columns(columns: Mapping[str, Sequence[Any]], path: Path) -> None:
    """One line per row: .csv, or .parquet where pandas is there."""
    if path.suffix.lower() == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        write_atomically(path, text.getvalue().encode())
    elif path.suffix.lower() == ".parquet":
        write_atomically(path, _parquet(columns))
    else:
        raise ConfigError(f"--to {path}: predictions are written as .csv or .parquet. Choose one of these endings.")


def _parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    try:
        frame = importlib.import_module("pandas").DataFrame(columns)
        return bytes(frame.to_parquet(None, index=False))
    except ImportError as error:
        raise ConfigError(
            f"parquet is written with pandas and pyarrow ({error}). Install them with `pip install 'fedmoe[table]'`, "
            "or choose a .csv file."
        ) from error
