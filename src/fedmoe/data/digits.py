"""The digits that scikit-learn ships: real data without a download, so demos and tests run anywhere."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmoe.data.dataset import Table
from fedmoe.errors import DataError

TEST_PER_CLASS = 60
CUT_SEED = 8  # fixed: the cut into training and test part belongs to the data set, not to a run


def load_digits() -> tuple[Table, Table]:
    """1,197 training and 600 test images (1, 8, 8) of grey levels 0 … 16; the test part has 60 of each class."""
    bunch = _bunch()
    x = torch.from_numpy(np.asarray(bunch.images).astype(np.uint8)).unsqueeze(1)
    labels = np.asarray(bunch.target).astype(np.int64)
    in_test = torch.from_numpy(_stratified_cut(labels))
    y = torch.from_numpy(labels)
    return Table(x[~in_test], y[~in_test]), Table(x[in_test], y[in_test])


def _bunch() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError("digits comes with scikit-learn, which is missing. Run: pip install scikit-learn") from error
    return datasets.load_digits()


def _stratified_cut(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks 60 rows of each class; by sorted uniform draws, whose bits NumPy keeps stable between versions."""
    order = np.argsort(np.random.default_rng(CUT_SEED).random(len(labels)), kind="stable")
    in_test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        in_test[order[labels[order] == label][:TEST_PER_CLASS]] = True
    return in_test
