"""What an author of an algorithm needs, under one name. `docs/own_algorithm.md` writes one with it, step by step.

The contract
    Algorithm       what a factory returns: states, exchanges, delivery, personalisation, prediction
    AlgorithmSetup  what a factory is given: networks, trainers, and what is known of the federation
    AlgorithmFactory  factory(setup), or factory(config, setup) where a dataclass annotates config
    Exchange        one trip server → clients → server
    Validation      an exchange by which the server chooses a model
    Answer          one of several ways in which a client answers, each scored
    LabelPriors     how an algorithm answers under label frequencies of the user's choice
    NoReport        the report of clients that report no numbers
    Nothing         a state with nothing in it
    message         declares a NamedTuple as something that may be sent
    uniform_sample  who takes part in a round: so many at random
Data and trees
    ClientId        the number of a client
    ClientData      train and validation examples, of one client or of a cohort
    Examples        x, y, counts and side information of examples
    Tensors         a dict of tensors by name: the parameters of a network
    Tree            a Tensor, a dict of trees, or a NamedTuple of trees
    Indices         an array of client ids
    trees           stack, pick, tree_map: one client's trees to a cohort's and back
    Streams         the random streams of a cohort, one for each client
Networks
    Network         a module without state: network(params, x), network.init(seed, ...)
    log_probs       log-probabilities of a network on a batch
    predictions     what the task makes of its outputs: log-probabilities, or the numbers of a regression
    log_mix         log of a gated mixture of two predictions
    gate_shares     how much each of the two has to say: for Algorithm.expert_weights
    negative_log_likelihood  one loss per example
Local training
    LocalTrainer    what setup.federated, setup.local and setup.personal are
    LocalTraining   the settings of one: epochs, batch size, learning rate, …
    Batch           what a loss sees of one client's examples
    Loss            losses_B = loss(trainable, frozen, batch)
    BatchTerm       a term of a whole batch beside the losses of its examples
    Trainable       the parameters of every group, by the group's name
    ClassifierLoss  cross-entropy of a network; whole epochs in the native kernels
    MixtureLoss     the same for a gated mixture of two experts
    Group           parameters that follow one loss on one set of examples
    Proximal        a pull of the parameters towards given ones
    EarlyStopping   the best copy by validation loss
    Schedule        how long: epochs or steps
    Fitted          what training returns
    fit             train a cohort; LocalTrainer.fit calls it with its settings and backend
    Sgd, Adam       optimizers of a group, where those of the settings will not do
Aggregation
    weighted_mean   of trees by client, summed in the order of ids
    ServerOptimizer, Moments, init_moments, server_step  a server-side optimizer (Reddi et al. 2021)
    Observation, ExpertSubset, observe_experts  what the server can say of its experts after a round

A published method is there to build on as well: `from fedmoe.algorithms.fedavg import FedAvgConfig, fedavg`.
"""

from fedmoe import trees
from fedmoe.aggregation.averaging import weighted_mean
from fedmoe.aggregation.expert_observation import ExpertSubset, Observation, observe_experts
from fedmoe.aggregation.server_optimizer import Moments, ServerOptimizer, init_moments, server_step
from fedmoe.algorithms.algorithm import (
    Algorithm,
    Answer,
    Exchange,
    LabelPriors,
    NoReport,
    Nothing,
    Validation,
    uniform_sample,
)
from fedmoe.algorithms.setup import AlgorithmFactory, AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Examples, Tensors, Tree
from fedmoe.models.mixture import gate_shares, log_mix, negative_log_likelihood
from fedmoe.models.network import Network
from fedmoe.partition.split import Indices
from fedmoe.streams import Streams
from fedmoe.training.batch import Batch, BatchTerm, Loss, Trainable
from fedmoe.training.classifier import ClassifierLoss, MixtureLoss, log_probs, predictions
from fedmoe.training.corrections import Proximal
from fedmoe.training.early_stopping import EarlyStopping
from fedmoe.training.fit import fit
from fedmoe.training.group import Fitted, Group, Schedule
from fedmoe.training.local import LocalTrainer
from fedmoe.training.optimizers import Adam, Sgd
from fedmoe.training.settings import LocalTraining
from fedmoe.wire import message

__all__ = [
    "Adam",
    "Algorithm",
    "AlgorithmFactory",
    "AlgorithmSetup",
    "Answer",
    "Batch",
    "BatchTerm",
    "ClassifierLoss",
    "ClientData",
    "ClientId",
    "EarlyStopping",
    "Examples",
    "Exchange",
    "ExpertSubset",
    "Fitted",
    "Group",
    "Indices",
    "LabelPriors",
    "LocalTrainer",
    "LocalTraining",
    "Loss",
    "MixtureLoss",
    "Moments",
    "Network",
    "NoReport",
    "Nothing",
    "Observation",
    "Proximal",
    "Schedule",
    "ServerOptimizer",
    "Sgd",
    "Streams",
    "Tensors",
    "Trainable",
    "Tree",
    "Validation",
    "fit",
    "gate_shares",
    "init_moments",
    "log_mix",
    "log_probs",
    "message",
    "negative_log_likelihood",
    "observe_experts",
    "predictions",
    "server_step",
    "trees",
    "uniform_sample",
    "weighted_mean",
]
