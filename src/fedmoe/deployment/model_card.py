"""The model card of an exported model: what it was trained on, how good it is, what left the client, how to use it."""

import json
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from fedmoe.evaluation.metric_catalog import class_in, title_of
from fedmoe.evaluation.metrics import Score
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.result import Result
from fedmoe.storage.files import read_bytes
from fedmoe.storage.rundir import RunDirectory

USES = {
    "model.pt2": """With PyTorch alone, for any number of rows:

```python
import torch

model = torch.export.load("model.pt2").module()
{answer} = model({names})  # {inputs}
```
""",
    "model.onnx": """With an ONNX runtime:

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
({answer},) = session.run(None, {{{named}}})  # {inputs}
```
""",
}


def model_card(
    result: Result, model: PersonalModel, files: Sequence[str], left_out: Mapping[str, str], checked_on: str
) -> str:
    sections = {
        "What it is": _what(result, model),
        "How good it is": _scores(result, model),
        "Opt-out and privacy": _privacy(result, model),
        "What is in the file": _tensors(model),
        "How to use it": _use(result, model, files, left_out, checked_on),
        "Versions": _versions(result),
    }
    title = f"# {model.facts.client}: a personal model by {model.facts.algorithm}"
    return "\n\n".join([title, *(f"## {name}\n\n{text.strip()}" for name, text in sections.items())]) + "\n"


def _what(result: Result, model: PersonalModel) -> str:
    federation = result.federation
    return (
        f"The model that client {model.facts.client!r} ended with in the run {result.data['name']!r}: "
        f"{result.data['rounds']} rounds of {model.facts.algorithm} with {federation.num_clients} clients, of which "
        f"{len(federation.participants)} sent updates, seed {result.data['seed']}. {_data(result)} "
        f"It maps x of shape (rows, {', '.join(map(str, model.facts.input_shape))}) to {_answers(result, model)}."
    )


def _answers(result: Result, model: PersonalModel) -> str:
    names = model.facts.class_names
    if not names:
        count = result.federation.num_outputs
        return "the number that is predicted" if count == 1 else f"the {count} numbers that are predicted"
    return f"the probabilities of {len(names)} classes: {_listed(names)}"


def _data(result: Result) -> str:
    if (table := result.federation.table) is not None:
        columns = _listed([column.name for column in table.features])
        return f"Clients held rows of a table, by its column {table.client!r}; {table.label!r} from {columns}."
    if RunDirectory(result.directory).split.exists():
        return f"Clients held parts of the data set {result.data['config']['data']['name']!r}."
    return "Clients brought data of their own."


def _scores(result: Result, model: PersonalModel) -> str:
    number = result.federation.number_of(model.facts.client)
    own = [score for score in result.scores if score.client == number]
    if not own:
        return "This client was not asked for its scores: it keeps them itself (`evaluation.clients_asked`)."
    classified = bool(model.facts.class_names)
    metrics = [name for name in own[0].metrics if class_in(name) is None]  # results.json has those of each class
    head = [*(["accuracy", "log loss"] if classified else ["loss"]), *map(title_of, metrics)]
    lines = [_row(["model", "data", *head]), "|---" * (2 + len(head)) + "|"]
    for score in sorted(own, key=lambda score: score.place):
        numbers = [*([score.accuracy] if classified else []), score.loss, *(score.metrics[name] for name in metrics)]
        lines.append(_row([_moment(score), score.data, *("–" if isnan(one) else f"{one:.3f}" for one in numbers)]))
    balanced = "rows that are balanced over classes" if classified else "rows of all clients"
    last = "after" if any(score.model == "after" for score in own) else "before"
    note = f"`own` are the client's own test rows, `global` {balanced}. The model in this folder is the one {last}"
    return "\n".join([*lines, "", f"{note} personalisation."])


def _moment(score: Score) -> str:
    """The model, and which of its answers where there are several."""
    return f"{score.model} personalisation{score.answer and f', {score.answer}'}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _privacy(result: Result, model: PersonalModel) -> str:
    federation = result.federation
    number = federation.number_of(model.facts.client)
    if number >= federation.num_clients:
        took_part = "This client is new: it never trained with the others."
    elif federation.participates(number):
        took_part = "This client took part. Records that it opted out changed no byte that it sent."
    else:
        took_part = "This client opted out: it received the model and sent nothing in training."
    lines = _messages(_manifest(result), str(number))
    left = "What left the client (manifest.json of the run):" if lines else "Nothing left the client."
    own = len(model.state_names().get("own", []))
    warning = (
        f"{own} of the tensors in this folder are the client's own and were computed from its records, opted-out ones "
        "included: give the folder only to whom the client would show its data."
        if own
        else "No tensor in this folder is the client's own: all were received from the server."
    )
    return "\n".join([took_part, "", left, *([""] if lines else []), *lines, "", warning])


def _messages(manifest: Mapping[str, Any], client: str) -> list[str]:
    """A line for each exchange in which this client sent something, and for its scores."""
    lines = []
    for exchange, row in sorted(manifest.get("messages_of_client", {}).get(client, {}).items()):
        names = _listed(list(manifest["sent_by_clients"].get(exchange, ())))
        lines.append(f"- {exchange}: {_counted(row)} ({names})")
    if scores := manifest.get("score_messages_of_client", {}).get(client):
        lines.append(f"- scores after training: {_counted(scores)}")
    return lines


def _counted(row: Mapping[str, int]) -> str:
    return f"{row['messages']} message{'s' if row['messages'] != 1 else ''}, {row['bytes']} bytes"


def _tensors(model: PersonalModel) -> str:
    origin = {name: origin for origin, names in model.state_names().items() for name in names}
    lines = ["| tensor | shape | type | origin |", "|---|---|---|---|"]
    for name, tensor in model.state_dict().items():
        shape = "×".join(map(str, tensor.shape)) or "one number"
        lines.append(f"| `{name}` | {shape} | {str(tensor.dtype)[6:]} | {origin[name]} |")
    return "\n".join(lines)


def _use(
    result: Result, model: PersonalModel, files: Sequence[str], left_out: Mapping[str, str], checked_on: str
) -> str:
    shape = ", ".join(map(str, ("rows", *model.facts.input_shape)))
    takes = {"x": f"({shape}) of {str(model.facts.input_dtype)[6:]}"}
    if model.adds_prior:
        takes["log_prior"] = f"({len(model.facts.class_names)},) of float32"
    blanks = {
        "inputs": "; ".join(f"{name}: {what}" for name, what in takes.items()), "answer": model.facts.answer,
        "names": ", ".join(takes), "named": ", ".join(f'"{name}": {name}' for name in takes),
    }  # fmt: skip
    parts = [text.format(**blanks).strip() for name, text in USES.items() if name in files]
    checked = [name for name in USES if name in files]
    if checked:
        parts.append(f"{' and '.join(checked)} gave the run's own {model.facts.answer} within 1e-5 on {checked_on}.")
    if model.adds_prior:
        parts.append(
            "log_prior are the logs of the label frequencies to answer under: `own` and `balanced` in model.json, or "
            "those that fedmoe estimates from a batch of unlabelled rows, `estimate_prior(x)` of the personal model."
        )
    parts += [f"{name} is not here: {why}." for name, why in left_out.items()]
    if result.federation.table is not None:
        names = _listed(result.federation.table.input_names)
        parts.append(
            f"x is made of a table's columns: {names}. A category is 1 where the row has it and else 0; numbers are "
            "(value - mean) / scale. model.json has these figures and the names of the classes."
        )
    command = f"fedmoe predict RUN --client {model.facts.client} --data FILE"
    parts.append(f"With fedmoe and the folder RUN of the run: `{command}`, or `fedmoe.load(RUN).personal_model(...)`.")
    return "\n\n".join(parts)


def _versions(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.data["versions"].items())
    return f"Trained with {versions}. Run id {result.data.get('run_id', 'not recorded')}."


def _manifest(result: Result) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(read_bytes(RunDirectory(result.directory).manifest))
    except FileNotFoundError:
        return {}
    return found


def _listed(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
