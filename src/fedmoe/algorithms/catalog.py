"""The only list of algorithms: name -> its settings, its factory, and what it is.

Algorithms from outside are found by an import string or as an entry point of an installed package (`outside.py`).
"""

import difflib

from fedmoe import import_strings
from fedmoe.algorithms.apfl import ApflConfig, apfl
from fedmoe.algorithms.average_ensembles import average_ensembles
from fedmoe.algorithms.biased_fedavg import biased_fedavg
from fedmoe.algorithms.centralized import CentralizedConfig, centralized
from fedmoe.algorithms.common_expert import CommonExpertConfig, common_expert
from fedmoe.algorithms.ditto import DittoConfig, ditto
from fedmoe.algorithms.domain_experts import DomainExpertsConfig, domain_experts
from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg
from fedmoe.algorithms.fedem import FedEmConfig, fedem
from fedmoe.algorithms.fedjets.algorithm import fedjets
from fedmoe.algorithms.fedjets.states import FedJetsConfig
from fedmoe.algorithms.fedmix.algorithm import fedmix
from fedmoe.algorithms.fedmix.states import FedMixConfig
from fedmoe.algorithms.fedmix_common import FedMixCommonConfig, fedmix_common
from fedmoe.algorithms.fedprox import FedProxConfig, fedprox
from fedmoe.algorithms.fedrep import FedRepConfig, fedrep
from fedmoe.algorithms.fedrod import FedRodConfig, fedrod
from fedmoe.algorithms.fine_tuned import fine_tuned
from fedmoe.algorithms.ifca import IfcaConfig, ifca
from fedmoe.algorithms.knn_per import KnnPerConfig, knn_per
from fedmoe.algorithms.lg_fedavg import LgFedAvgConfig, lg_fedavg
from fedmoe.algorithms.local_global_mixture import local_global_mixture
from fedmoe.algorithms.local_only import LocalOnlyConfig, local_only
from fedmoe.algorithms.outside import KEY, Entry, entry_of, installed, load_installed
from fedmoe.algorithms.partial_personalization import PartialPersonalizationConfig
from fedmoe.algorithms.prior_mixture.algorithm import PriorMixtureConfig, prior_mixture
from fedmoe.algorithms.scaffold import ScaffoldConfig, scaffold
from fedmoe.algorithms.specialist_mixture import specialist_mixture
from fedmoe.errors import ConfigError

CATALOG = {
    "fedavg": Entry(FedAvgConfig, fedavg, "FedAvg", "fedavg"),
    "local_only": Entry(LocalOnlyConfig, local_only, "Local", None),
    "fine_tuned": Entry(FedAvgConfig, fine_tuned, "Fine-tuned", "fedavg"),
    "specialist_mixture": Entry(FedAvgConfig, specialist_mixture, "Specialist mixture", "fedavg"),
    "local_global_mixture": Entry(FedAvgConfig, local_global_mixture, "Local-global mixture", "fedavg"),
    "prior_mixture": Entry(PriorMixtureConfig, prior_mixture, "Prior mixture", None),
    "domain_experts": Entry(DomainExpertsConfig, domain_experts, "Domain experts", None),
    "fedmix": Entry(FedMixConfig, fedmix, "FedMix", None),
    "biased_fedavg": Entry(PartialPersonalizationConfig, biased_fedavg, "Biased FedAvg", None),
    "lg_fedavg": Entry(LgFedAvgConfig, lg_fedavg, "Local/Global", None),
    "fedprox": Entry(FedProxConfig, fedprox, "FedProx", None),
    "scaffold": Entry(ScaffoldConfig, scaffold, "SCAFFOLD", None),
    "ditto": Entry(DittoConfig, ditto, "Ditto", None),
    "apfl": Entry(ApflConfig, apfl, "APFL", None),
    "fedrep": Entry(FedRepConfig, fedrep, "FedRep", None),
    "ifca": Entry(IfcaConfig, ifca, "IFCA", None),
    "fedem": Entry(FedEmConfig, fedem, "FedEM", None),
    "fedrod": Entry(FedRodConfig, fedrod, "Fed-RoD", None),
    "knn_per": Entry(KnnPerConfig, knn_per, "kNN-Per", "fedavg"),
    "centralized": Entry(CentralizedConfig, centralized, "Centralized", None),
    "fedjets": Entry(FedJetsConfig, fedjets, "FedJETs", None),
    "fedmix_common": Entry(FedMixCommonConfig, fedmix_common, "FedMix, common gate", None),
    "average_ensembles": Entry(FedAvgConfig, average_ensembles, "Average ensembles", None),
    "common_expert": Entry(CommonExpertConfig, common_expert, "Common expert", None),
}


def find(name: str) -> Entry:
    """A name of the catalog, an import string, or a name that an installed package adds."""
    if name in CATALOG:
        return CATALOG[name]
    if import_strings.is_import_string(name):
        return entry_of(import_strings.load(KEY, name), name)
    others = installed()
    if name in others:
        return load_installed(name, others[name])
    known = [*CATALOG, *others]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(known)}, or 'package.module:name'."
    raise ConfigError(f"{KEY}={name!r} is not known. {hint}")
