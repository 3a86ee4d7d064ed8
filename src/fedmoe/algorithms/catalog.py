"""The only list of algorithms: name -> its settings, its factory, and what it is."""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from fedmoe.algorithms.algorithm import Algorithm
from fedmoe.algorithms.biased_fedavg import biased_fedavg
from fedmoe.algorithms.centralized import CentralizedConfig, centralized
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedem import FedEmConfig, fedem
from fedmoe.algorithms.fedmix.algorithm import fedmix
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.algorithms.fedrod import FedRodConfig, fedrod
from fedmoe.algorithms.fine_tuned import fine_tuned
from fedmoe.algorithms.ifca import IfcaConfig, ifca
from fedmoe.algorithms.knn_per import KnnPerConfig, knn_per
from fedmoe.algorithms.lg_fedavg import LgFedAvgConfig, lg_fedavg
from fedmoe.algorithms.local_global_mixture import local_global_mixture
from fedmoe.algorithms.local_only import LocalOnlyConfig, local_only
from fedmoe.algorithms.partial_personalization import PartialPersonalizationConfig
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.algorithms.specialist_mixture import specialist_mixture
from fedmoe.errors import ConfigError


class Entry(NamedTuple):
    config: type[Any]
    factory: Callable[[Any, AlgorithmSetup], Algorithm]
    title: str
    rounds: str | None  # algorithms with the same word have the same rounds: `compare` trains them once


CATALOG = {
    "fedavg": Entry(FedAvgConfig, fedavg, "FedAvg", "fedavg"),
    "local_only": Entry(LocalOnlyConfig, local_only, "Local", None),
    "fine_tuned": Entry(FedAvgConfig, fine_tuned, "Fine-tuned", "fedavg"),
    "specialist_mixture": Entry(FedAvgConfig, specialist_mixture, "Specialist mixture", "fedavg"),
    "local_global_mixture": Entry(FedAvgConfig, local_global_mixture, "Local-global mixture", "fedavg"),
    "fedmix": Entry(FedMixConfig, fedmix, "FedMix", None),
    "biased_fedavg": Entry(PartialPersonalizationConfig, biased_fedavg, "Biased FedAvg", None),
    "lg_fedavg": Entry(LgFedAvgConfig, lg_fedavg, "Local/Global", None),
    "ifca": Entry(IfcaConfig, ifca, "IFCA", None),
    "fedem": Entry(FedEmConfig, fedem, "FedEM", None),
    "fedrod": Entry(FedRodConfig, fedrod, "Fed-RoD", None),
    "knn_per": Entry(KnnPerConfig, knn_per, "kNN-Per", "fedavg"),
    "centralized": Entry(CentralizedConfig, centralized, "Centralized", None),
}


def find(name: str) -> Entry:
    if name not in CATALOG:
        near = difflib.get_close_matches(name, CATALOG, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(CATALOG)}."
        raise ConfigError(f"algorithm.name={name!r} is not known. {hint}")
    return CATALOG[name]
