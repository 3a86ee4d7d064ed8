"""Labels and sizes that the tests of splits share."""

import numpy as np

from fedmoe.partition.quotas import Labels

TRAIN = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 400))
TEST = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 60))
LABELS = Labels(TRAIN, TEST, 10)
SIZES = {
    "num_clients": 6,
    "num_unseen": 2,
    "train_size": 40,
    "validation_size": 10,
    "test_size": 20,
    "global_test_size": 100,
}
