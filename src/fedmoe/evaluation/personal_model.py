"""What a client ends with: an ordinary `nn.Module` that maps x to probabilities, or to the numbers of a regression.

It predicts by the functions of its algorithm over modules of its own, which PyTorch alone computes: so it is the same
model on every training backend, can be moved, traced and exported, and two of them share nothing.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmoe import trees
from fedmoe.algorithms.algorithm import Algorithm, LabelPriors
from fedmoe.algorithms.label_priors.answers import ESTIMATED
from fedmoe.algorithms.label_priors.frequencies import check_log_prior, uniform
from fedmoe.core_types import Tensors, Tree
from fedmoe.errors import ConfigError, DataError, RunError
from fedmoe.models.network import Network
from fedmoe.models.task import CLASSIFICATION, Regression, Task

Prior = Literal["own", "balanced", "estimated"]
ROLES = ("broadcast", "client", "personal")  # the states that an algorithm predicts with
ORIGIN = {"broadcast": "received", "client": "own", "personal": "own"}
PREFIX = {"broadcast": "shared", "client": "client", "personal": "personal"}  # where two states have one field name


class Predictor(NamedTuple):
    """An algorithm, and the networks that it was made with: plain copies, which no model of another client uses.

    It holds nothing of its own (a model gives it its tensors in every call), so copies of a model share it: the
    algorithm's functions would go on to call the networks that they were made with, not copies of these.
    """

    algorithm: Algorithm
    networks: tuple[Network, ...]

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Predictor":
        return self

    def __reduce__(self) -> NoReturn:
        raise RunError(
            "a personal model is not pickled, so torch.save(model) cannot store it. Store its tensors, "
            "torch.save(model.state_dict(), FILE), or a program that runs without fedmoe: fedmoe export RUN."
        )


class ModelFacts(NamedTuple):
    """What a personal model says of itself, and what it checks its inputs by."""

    client: str
    algorithm: str
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    input_dtype: torch.dtype = torch.float32  # whole numbers are token ids
    task: Task = CLASSIFICATION

    @property
    def answer(self) -> str:
        """What the model gives for each row."""
        return "numbers" if isinstance(self.task, Regression) else "probabilities"


class Weights(nn.Module):
    """A part of a state: holds tensors under the names that they have in the user's own module."""


class PersonalModel(nn.Module):
    """``model(x)``: probabilities (B, classes) of a batch, (classes,) of one row; tensors or NumPy arrays. Of a
    regression it gives numbers (B, targets).

    Parameters are named as in the expert and the gate, below the part of the algorithm's state that they belong to:
    ``specialist.conv1.weight``. A stack of experts has a leading axis. All other numbers of a state are buffers. The
    model comes ready to predict, in eval mode and without gradients; to train it further call ``requires_grad_()``.
    """

    def __init__(self, predictor: Predictor, states: Mapping[str, Tree | None], facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self._predictor = predictor
        self._kinds = {role: type(states[role]) for role in ROLES if states[role] is not None}
        named = {role: trees.to_named(states[role]) for role in self._kinds}
        fields = Counter(field for leaves in named.values() for field in {_field(path) for path in leaves})
        self._names: dict[str, dict[str, str]] = {}  # role -> path in its tree -> name in this module
        for role, leaves in named.items():
            self._names[role] = {}
            for path, tensor in leaves.items():
                front = f"{PREFIX[role]}_" if fields[_field(path)] > 1 else ""
                self._names[role][path] = self._hold(f"{front}{path}", tensor, is_weight="/" in path)
        self._constants = [
            {name: self._hold(f"constants/{network.name}/{name}", tensor) for name, tensor in network.constants.items()}
            for network in predictor.networks
        ]
        self.eval()

    def forward(self, x: Tensor | NDArray[Any], log_prior: Tensor | None = None) -> Tensor:
        """With a log-prior (classes,): the answer under these label frequencies, where the algorithm has such."""
        if log_prior is not None:
            check_log_prior(log_prior, len(self.log_prior("own")))
        return self.unchecked(x, log_prior)

    def unchecked(self, x: Tensor | NDArray[Any], log_prior: Tensor | None = None) -> Tensor:
        """The same, whatever numbers the log-prior has: a program cannot look at them."""
        batch, one_row = self._batch(x if isinstance(x, Tensor) else self.as_inputs(x))
        states = self._states()
        if log_prior is None:
            answer_BC = self.facts.task.answer(self._predictor.algorithm.predict(*states, batch))
        else:
            answer_BC = self._priors.answer(*states, batch, log_prior).exp()
        return answer_BC[0] if one_row else answer_BC

    @property
    def adds_prior(self) -> bool:
        """Whether its answer is made of scores and a log-prior, so that a program of it takes both."""
        algorithm = self._predictor.algorithm
        return algorithm.priors is not None and algorithm.headline == ESTIMATED

    def log_prior(self, prior: Prior, x: Tensor | NDArray[Any] | None = None) -> Tensor:
        """(classes,): the client's own label frequencies, even ones, or those estimated from the questions `x`."""
        own_C = self._priors.own(*self._states())
        if prior == "own":
            return own_C
        if prior == "balanced":
            return uniform(len(own_C)).to(own_C)
        if x is None:
            raise DataError("prior='estimated' is estimated from questions: give them as x.")
        return self.estimate_prior(x)

    def estimate_prior(self, x: Tensor | NDArray[Any]) -> Tensor:
        """(classes,): the log-prior of a batch of unlabelled questions; of a single one it stays near the own."""
        with torch.no_grad():
            batch, _ = self._batch(self.as_inputs(x))
            states = self._states()
            return self._priors.estimate(self._priors.prior_free(*states, batch), self._priors.own(*states))

    @property
    def has_even_prior(self) -> bool:
        """Whether its own label frequencies are even: of a client without labels, or with too few to tell."""
        own_C = self._priors.own(*self._states())
        return torch.equal(own_C, uniform(len(own_C)).to(own_C))

    @property
    def _priors(self) -> LabelPriors:
        if self._predictor.algorithm.priors is None:
            raise ConfigError(
                f"{self.facts.algorithm} answers under no other label frequencies than those that it learnt. Train "
                "prior_mixture, or any algorithm with evaluation.priors = true."
            )
        return self._predictor.algorithm.priors

    def expert_weights(self, x: Tensor | NDArray[Any]) -> Tensors | None:
        """How much each expert has to say of each row: name -> (B,); None where the algorithm has no experts."""
        weights_of = self._predictor.algorithm.expert_weights
        if weights_of is None:
            return None
        with torch.no_grad():
            batch, one_row = self._batch(self.as_inputs(x))
            weights = weights_of(*self._states(), batch)
        return {name: weight_B[0] if one_row else weight_B for name, weight_B in weights.items()}

    def as_inputs(self, x: Any) -> Tensor:
        """Rows of numbers as the tensor that this model reads, on its device."""
        tensor = torch.as_tensor(x)
        like = next((p for p in self.parameters() if p.is_floating_point()), torch.zeros(()))
        dtype = like.dtype if self.facts.input_dtype.is_floating_point else self.facts.input_dtype
        return tensor.to(device=like.device, dtype=dtype)

    def state_names(self) -> dict[str, list[str]]:
        """The names of all tensors by where they come from: received from the server, or the client's own."""
        found: dict[str, list[str]] = {}
        for role, names in self._names.items():
            found.setdefault(ORIGIN[role], []).extend(names.values())
        constants = [name for names in self._constants for name in names.values()]
        return {**found, **({"frozen": constants} if constants else {})}

    def __repr__(self) -> str:
        shape = ", ".join(map(str, ("B", *self.facts.input_shape)))
        head = f"PersonalModel of client {self.facts.client!r} by {self.facts.algorithm}: "
        lines = [f"{head}x ({shape}) -> {self.facts.answer} (B, {len(self.facts.class_names) or 'targets'})"]
        for origin, names in self.state_names().items():
            for part in dict.fromkeys(name.partition(".")[0] for name in names):
                held = [self._tensor(name) for name in names if name.partition(".")[0] == part]
                lines.append(f"  ({part}): {len(held)} tensors, {sum(t.numel() for t in held)} numbers, {origin}")
        modules = [f"{network.name}: {network.module!r}" for network in self._predictor.networks]
        return "\n".join([*lines, *modules])

    def _hold(self, path: str, tensor: Tensor, *, is_weight: bool = False) -> str:
        """Register a copy; the name that it has from now on."""
        *parents, last = [_attribute(level) for level in path.replace("/", ".").split(".")]
        owner: nn.Module = self
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, Weights())
            owner = owner.get_submodule(parent)
        if is_weight and tensor.is_floating_point():
            owner.register_parameter(last, nn.Parameter(tensor.detach().clone(), requires_grad=False))
        else:
            owner.register_buffer(last, tensor.detach().clone())
        return ".".join([*parents, last])

    def _tensor(self, name: str) -> Tensor:
        parent, _, last = name.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(parent), last)
        return tensor

    def _states(self) -> tuple[Tree, Tree, Tree]:
        """The trees that the algorithm knows, made of what this module holds now."""
        for network, names in zip(self._predictor.networks, self._constants, strict=True):
            network.set_constants({name: self._tensor(held) for name, held in names.items()})
        broadcast, client, personal = (self._state(role) if role in self._kinds else None for role in ROLES)
        return broadcast, client, personal

    def _state(self, role: str) -> Tree:
        named = {path: self._tensor(name) for path, name in self._names[role].items()}
        return trees.from_named(self._kinds[role], named)

    def _batch(self, x: Tensor) -> tuple[Tensor, bool]:
        """A batch of at least one row, and whether x was a single row."""
        shape = self.facts.input_shape
        one_row = x.dim() == len(shape)  # by rank: a traced batch may have any number of rows
        if tuple(x.shape if one_row else x.shape[1:]) != shape:
            wanted = f"({', '.join(map(str, ('B', *shape)))})"
            raise DataError(f"x has shape {tuple(x.shape)}; this model reads {wanted}, or one row of shape {shape}.")
        return (x[None] if one_row else x), one_row


def _field(path: str) -> str:
    return path.partition("/")[0]


def _attribute(name: str) -> str:
    """A name that nn.Module does not use itself."""
    return f"{name}_" if hasattr(PersonalModel, name) else name
