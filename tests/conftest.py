"""The same examples in every run: `make test` must not pass by luck. `make fuzz` searches at random instead.

FEDMOE_TEST_PROFILE=fuzz gives every property test other examples each time, and more of them where it names no number.
"""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("fuzz", derandomize=False, database=None, deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("FEDMOE_TEST_PROFILE", "same"))

# Threads inside small kernels gain nothing, and on a busy machine they wait for one another: 20 times as long.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


def seed_everything() -> None:
    """Tests that draw from a global generator draw the same alone, in another order, and in any number of workers."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global one, for whoever reads it)
    random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):  # about to be imported: some build modules right away
        seed_everything()


def pytest_runtest_setup() -> None:
    seed_everything()
