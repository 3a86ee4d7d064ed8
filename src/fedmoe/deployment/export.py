"""A client's personal model as files that others can run: without fedmoe, without the federation, without its data.

model.safetensors has the tensors, model.pt2 a `torch.export` program, model.onnx the same for ONNX runtimes, model.json
what goes in and comes out, README.md is the model card. Every program is run against the model before it is left there.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from fedmoe.clients.federation import Federation
from fedmoe.core_types import ClientId
from fedmoe.deployment.model_card import model_card
from fedmoe.deployment.programs import Untraceable, inputs_of, to_onnx, traced, without_traces
from fedmoe.errors import RunError
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.result import Result
from fedmoe.storage.files import explained, make_private_folder, write_atomically
from fedmoe.streams import torch_stream

CLOSE = 1e-5  # the most that what a program answers may differ from what the model does
MOST_ROWS = 64  # that they are compared on
Run = Callable[..., Tensor]  # of the inputs of a program


class Export(NamedTuple):
    """`files` are there; `left_out` says why of each that is not; `checked_on` what the programs were compared on."""

    folder: Path
    files: list[str]
    left_out: dict[str, str]
    checked_on: str


def export(result: Result, client: ClientId | str, folder: Path, rows: Tensor | None = None) -> Export:
    """`rows` are what programs are checked on; default: the client's own, where they are at hand, or random ones."""
    model = result.personal_model(client)
    x, checked_on = _rows_to_check(result.federation, result.federation.number_of(client), rows)
    try:
        make_private_folder(folder)
    except OSError as error:
        reason, remedy = explained(error)
        raise RunError(f"{folder} cannot be made: {reason}. To go on, {remedy}, or choose another --to.") from error
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    write_atomically(folder / "model.json", json.dumps(_inputs_and_outputs(result, model), indent=1).encode())
    left_out = _write_programs(model, x, folder)
    written = ["model.safetensors", "model.json", "model.pt2", "model.onnx", "README.md"]
    made = Export(folder, [name for name in written if name not in left_out], left_out, checked_on)
    card = model_card(result, model, made.files, left_out, checked_on)
    write_atomically(folder / "README.md", card.encode())
    return made


def _write_programs(model: PersonalModel, x: Tensor, folder: Path) -> dict[str, str]:
    """The programs that could be made and agree with the model; why not, of the others."""
    left_out = {}
    try:
        program = without_traces(traced(model, _two_rows(x)))
    except Untraceable as error:
        return dict.fromkeys(("model.pt2", "model.onnx"), f"it cannot be written as a program: {error}")

    def pt2(path: Path) -> Run:
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
        return lambda *inputs: loaded(*inputs)

    def onnx(path: Path) -> Run:
        names = list(inputs_of(model, x))
        to_onnx(program, path, names, model.facts.answer)
        return _onnx_session(path, names)

    for name, write in {"model.pt2": pt2, "model.onnx": onnx}.items():
        aside = folder / f".part-{name}"  # with its ending, by which readers know it
        try:
            _require_agreement(model, write(aside), x)
            aside.chmod(0o600)
            aside.replace(folder / name)
        except Untraceable as error:
            left_out[name] = str(error)
            (folder / name).unlink(missing_ok=True)  # of an earlier export, and not of this model
        finally:
            aside.unlink(missing_ok=True)
    return left_out


def _onnx_session(path: Path, names: Sequence[str]) -> Run:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise Untraceable("onnxruntime is not installed: pip install 'fedmoe[export]'") from error
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        named = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(np.asarray(session.run(None, named)[0]))

    return run


def _require_agreement(model: PersonalModel, run: Run, x: Tensor) -> None:
    """On all rows together, and on the first alone; under own and under even label frequencies."""
    priors = [(model.log_prior("own"),), (model.log_prior("balanced"),)] if model.adds_prior else [()]
    for inputs in [(rows, *prior) for rows in (x, x[:1]) for prior in priors]:
        try:
            found = run(*inputs)
        except Exception as error:  # whatever a runtime raises for a program that it does not understand
            raise Untraceable(f"it does not run: {str(error).strip().splitlines()[0]}") from error
        difference = float((found - model(*inputs)).abs().max())
        if not difference <= CLOSE:  # NaN is no agreement
            raise Untraceable(f"its {model.facts.answer} are off by {difference:.2g}, more than {CLOSE:g}")


def _rows_to_check(federation: Federation, client: ClientId, given: Tensor | None) -> tuple[Tensor, str]:
    if given is not None:
        return given[:MOST_ROWS], f"{len(given[:MOST_ROWS])} rows that were given"
    try:
        own = federation.load(client).test.x[:MOST_ROWS]
    except RunError:
        own = torch.zeros(0)
    if len(own):
        return own, f"{len(own)} of the client's own test rows"
    shape, seed = (MOST_ROWS, *federation.input_shape), torch_stream("export", "rows")
    if federation.input_dtype.is_floating_point:
        return torch.randn(shape, generator=seed, dtype=federation.input_dtype), f"{MOST_ROWS} random rows"
    highest = federation.vocabulary_size or 2
    random = torch.randint(0, highest, shape, generator=seed)
    return random.to(federation.input_dtype), f"{MOST_ROWS} random rows"


def _two_rows(x: Tensor) -> Tensor:
    """A trace of one row would fix the number of rows."""
    return torch.cat([x[:2], x[:1]])[:2] if len(x) < 2 else x[:2]


def _inputs_and_outputs(result: Result, model: PersonalModel) -> dict[str, Any]:
    """What a program needs to be told, and what its answers mean."""
    facts, table = model.facts, result.federation.table
    return {
        "client": facts.client,
        "algorithm": facts.algorithm,
        "input": {"name": "x", "shape": ["rows", *facts.input_shape], "dtype": str(facts.input_dtype)[6:]},
        **({"log_prior": _log_priors(model)} if model.adds_prior else {}),
        "output": {
            "name": facts.answer,
            "shape": ["rows", result.federation.num_outputs],
            "classes": facts.class_names,
        },
        "table": None if table is None else {**table.to_dict(), "input_names": table.input_names},
        "run_id": result.data.get("run_id"),
    }


def _log_priors(model: PersonalModel) -> dict[str, Any]:
    """The second input of its programs, and what is known of it: the client's own label frequencies, and even ones."""
    known = {name: model.log_prior(name).tolist() for name in ("own", "balanced")}
    return {"name": "log_prior", "shape": [len(known["own"])], "dtype": "float32", **known}
