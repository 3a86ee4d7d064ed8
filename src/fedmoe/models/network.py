"""Any `nn.Module` as a pure function of its parameters."""

import contextlib
import copy
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmoe.core_types import Tensors
from fedmoe.errors import ConfigError, MessageError
from fedmoe.models.dense import cohort_forward
from fedmoe.models.fingerprint import structure_fingerprint, tensors_digest
from fedmoe.models.module_checks import (
    build_module,
    cannot_read,
    layers_with_statistics,
    require_initialised,
    require_scores,
)
from fedmoe.models.parameters import (
    constant_places,
    frozen_parameters,
    inputs_of,
    parameter_places,
    trained_parameters,
)
from fedmoe.native.build import NoKernels
from fedmoe.native.kernel import Kernel
from fedmoe.native.layers import Program, Unsupported
from fedmoe.native.program import program_of, without_output
from fedmoe.streams import derive_seed

ModuleOrFactory = nn.Module | Callable[[], nn.Module]

# Layers whose batched kernels beat a loop over clients on a CPU. Convolutions turn into grouped ones, which lose;
# recurrent kernels have no batching rule at all.
BATCHING_PAYS = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.Flatten, nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU,
    nn.LogSoftmax, nn.Softmax,
)  # fmt: skip


class Network:
    """A module without state of its own: ``network(params, x)``.

    Built from a factory, every `init` draws fresh weights; built from a module, its weights start every copy.
    Parameters with ``requires_grad=False`` are no weights but constants: `frozen`, of the module as it was first built,
    the same for everyone. They are read in every forward, never trained, and no part of what clients send.

    A dict of parameters is never changed by replacing a tensor in it: parameters stay in the module until another dict
    is given, so a client that takes many steps with one dict pays for the exchange once;
    ``torch.func.functional_call`` would pay a tenth of a small CNN's step on each.
    """

    def __init__(
        self,
        source: ModuleOrFactory,
        name: str = "model",
        input_shape: tuple[int, ...] | None = None,
        *,
        nothing_to_train: bool = False,
    ) -> None:
        """`input_shape` of one example is what native kernels are made for; without it the module itself runs.

        A module without a parameter to train is refused, unless it is meant to have none.
        """
        self.name, self.input_shape, self._nothing_to_train = name, input_shape, nothing_to_train
        self._source = source
        self._module = copy.deepcopy(source) if isinstance(source, nn.Module) else self._build(0)
        require_initialised(self._module, name)
        self._with_statistics = layers_with_statistics(self._module, name)
        self._start = trained_parameters(self._module)
        if not isinstance(source, nn.Module):  # its values are never asked for: no copy of a large model
            self._start = {name: self._module.get_parameter(name).detach() for name in self._start}
        self.frozen: Tensors = frozen_parameters(self._module)
        self._refuse_nothing_to_train()
        self._places = parameter_places(self._module)
        self._constant_places = constant_places(self._module)
        self._constants_by_device: dict[torch.device, Tensors] = {}  # copies, each made once
        self._cohort_forward = cohort_forward(self._module)
        self._installed: Tensors | None = None
        self._output_input: list[Tensor] | None = None
        self.native: Kernel | None = None
        self._body: Kernel | None = None  # the kernels up to the output layer's input
        self._output_names: tuple[str, str | None] = ("", None)

    def __repr__(self) -> str:
        return f"<Network {self.name}: {self.num_weights:,} weights>"

    def __call__(self, params: Tensors, x: Tensor, *, training: bool = False) -> Tensor:
        if self.native:
            return self.native(self._weights_of(self.native, params), x)
        return self.call_module(params, x, training=training)

    def call_module(self, params: Tensors, x: Tensor, *, training: bool = False) -> Tensor:
        """The module itself, also where the kernels compute everything else: its hooks are called."""
        if params is not self._installed:
            self._install(params)
        if self._module.training != training:
            self._module.train(training)
            for layer in self._with_statistics:
                layer.eval()
        if self._constant_places:
            self._bring_constants(x.device)
        output: Tensor = self._module(x)
        return output

    def plain_copy(self) -> "Network":
        """The same network over a module of its own, which PyTorch computes on every backend."""
        return Network(self._source, self.name, self.input_shape, nothing_to_train=self._nothing_to_train)

    @property
    def constants(self) -> Tensors:
        """What the module reads besides its weights: frozen parameters and buffers."""
        return {name: places[0][0][places[0][1]].detach() for name, places in self._constant_places.items()}

    def set_constants(self, constants: Tensors) -> None:
        """Other tensors in their place: on another device, of another type, or those of a trace."""
        self._constants_by_device = {}
        self._place_constants(constants)

    def _bring_constants(self, device: torch.device) -> None:
        """To where the examples are."""
        owner, attribute = next(iter(self._constant_places.values()))[0]
        here = owner[attribute].device
        if here == device:
            return
        copies = self._constants_by_device
        copies.setdefault(here, self.constants)
        if device not in copies:
            copies[device] = {name: tensor.to(device) for name, tensor in copies[here].items()}
        self._place_constants(copies[device])

    def _place_constants(self, constants: Tensors) -> None:
        for name, places in self._constant_places.items():
            for owner, attribute in places:
                owner[attribute] = constants[name]

    def go_native(self) -> None:
        """From now on the native kernels compute it."""
        self.native = self._kernel(self.program)
        with contextlib.suppress(Unsupported):  # a single layer has no features but its input: the module gives them
            program, self._output_names = without_output(self.native.program)
            self._body = self._kernel(program)

    @cached_property
    def obstacle(self) -> str | None:
        """Why native kernels cannot run this network on this machine, or None."""
        try:
            self._kernel(self.program)
        except (Unsupported, NoKernels) as error:
            return str(error)
        return None

    @property
    def is_chain(self) -> bool:
        """Whether the kernels would know its layers, be they at hand or not."""
        try:
            return bool(self.program.layers)
        except Unsupported:
            return False

    @cached_property
    def program(self) -> Program:
        """The chain of layers that the kernels would run; raises Unsupported."""
        if self.input_shape is None:
            raise Unsupported("the shape of its inputs is not known")
        return program_of(self._module, self.input_shape)

    def _kernel(self, program: Program) -> Kernel:
        everything = {**self._start, **self.frozen}
        return Kernel(program, [tuple(everything[name].shape) for name in program.params], self.frozen)

    def _weights_of(self, kernel: Kernel, params: Tensors) -> list[Tensor]:
        self._require_own(params)
        return [params[name] for name in kernel.trained_names]

    @cached_property
    def frozen_digest(self) -> str:
        """Of the contents of all constants, buffers included; "" where there are none."""
        return tensors_digest({**self.frozen, **dict(self._fresh_module().named_buffers())})

    @cached_property
    def fingerprint(self) -> str:
        """Of what the module computes, apart from its weights: see `models.fingerprint`."""
        return structure_fingerprint(self._fresh_module())

    def _fresh_module(self) -> nn.Module:
        """Never called with weights of others, so that its parameters are still its own."""
        return copy.deepcopy(self._source) if isinstance(self._source, nn.Module) else self._build(0)

    @property
    def reads_cohorts(self) -> bool:
        """Whether `cohort` works: native kernels, or a chain of dense layers."""
        return self.native is not None or self._cohort_forward is not None

    def cohort(self, params_S: Tensors, x_SB: Tensor) -> Tensor:
        """The scores of S clients with parameters of their own at once: (S, B, outputs)."""
        if self.native:
            return self(params_S, x_SB)
        assert self._cohort_forward is not None
        frozen = self.frozen
        if frozen and not x_SB.is_cpu:
            self._bring_constants(x_SB.device)
            frozen = {name: self.constants[name] for name in frozen}
        frozen_S = {name: tensor.expand(len(x_SB), *tensor.shape) for name, tensor in frozen.items()}
        return self._cohort_forward({**frozen_S, **params_S}, x_SB)

    def with_features(self, params: Tensors, x: Tensor, *, training: bool = False) -> tuple[Tensor, Tensor]:
        """Scores, and the input of the output layer (B, F): what gates on an expert's own features read."""
        if self._body:
            features = self._body(self._weights_of(self._body, params), x)
            weight, bias = self._output_names
            own = {**self.frozen, **params}
            return F.linear(features, own[weight], own[bias] if bias else None), features
        if self._output_input is None:
            self._output_input = inputs_of(self._output_layer)
        scores = self.call_module(params, x, training=training)
        return scores, self._output_input.pop()

    @property
    def has_native_features(self) -> bool:
        """Whether the kernels have a layer before the output layer, whose output a gate can read."""
        return self._body is not None

    @property
    def num_features(self) -> int:
        return self._output_layer.in_features

    @property
    def _output_layer(self) -> nn.Linear:
        linear = [layer for layer in self._module.modules() if isinstance(layer, nn.Linear)]
        if not linear:
            raise ConfigError(f"the {self.name} has no nn.Linear, so no output layer. Let one give its scores.")
        return linear[-1]

    @property
    def output_bias_name(self) -> str:
        """The name of the output layer's bias: one number per class, the last that a score depends on."""
        names = {id(layer): name for name, layer in self._module.named_modules()}
        name = names[id(self._output_layer)]
        if self._output_layer.bias is None:
            raise ConfigError(f"the output layer {name!r} of the {self.name} has no bias. Make it with bias=True.")
        bias = f"{name}.bias" if name else "bias"
        if bias in self.frozen:
            raise ConfigError(f"{bias!r}, the output bias of the {self.name}, is frozen. Let it require a gradient.")
        return bias

    @property
    def module(self) -> nn.Module:
        """For its structure. Which weights it holds at the moment is an accident of the last call."""
        return self._module

    def init(self, *path: int | str) -> Tensors:
        """Fresh weights, without the frozen ones, for a path such as (run seed, "expert"): same path, same weights."""
        if isinstance(self._source, nn.Module):
            return {name: tensor.clone() for name, tensor in self._start.items()}
        return trained_parameters(self._build(derive_seed(*path)))

    @property
    def num_weights(self) -> int:
        """Of those that are trained."""
        return sum(tensor.numel() for tensor in self._start.values())

    def _install(self, params: Tensors) -> None:
        self._require_own(params)
        for name, places in self._places.items():
            for owner, attribute in places:
                owner[attribute] = params[name]
        self._installed = params

    def _require_own(self, params: Tensors) -> None:
        if params.keys() != self._start.keys():
            odd = sorted(params.keys() ^ self._start.keys())[0]
            raise MessageError(
                f"the {self.name} and the weights given to it differ in {odd!r}: they are of two models."
            )

    @property
    def batching_pays(self) -> bool:
        layers = [module for module in self._module.modules() if not list(module.children())]
        bare = any(
            list(m.parameters(recurse=False)) for m in self._module.modules() if not isinstance(m, BATCHING_PAYS)
        )
        return not bare and all(isinstance(layer, BATCHING_PAYS) for layer in layers)

    @cached_property
    def _is_recurrent(self) -> bool:
        return any(isinstance(layer, nn.RNNBase) for layer in self._module.modules())

    @property
    def can_be_mapped(self) -> bool:
        """Whether ``vmap`` knows what to do with it: PyTorch has no such rule for recurrent layers, the kernels do."""
        return self.native is not None or not self._is_recurrent

    def check_output(self, x: Tensor, num_outputs: int) -> None:
        """Refuse a module that does not return (B, num_outputs) for a batch of this client's inputs."""
        try:
            with torch.no_grad():
                output: object = self(self.init(0), x)
        except Exception as error:  # whatever a user's module raises
            raise ConfigError(cannot_read(self.name, x, error)) from error
        require_scores(self.name, output, x, num_outputs)

    def _build(self, seed: int) -> nn.Module:
        return build_module(self._source, self.name, seed)

    def _refuse_nothing_to_train(self) -> None:
        if self.frozen and not self._start and not self._nothing_to_train:
            raise ConfigError(
                f"all parameters of the {self.name} are frozen (requires_grad=False), so there is nothing to train. "
                "Let some of them require a gradient."
            )
