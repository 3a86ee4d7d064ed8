"""What a client takes home: a run that is loaded without data predicts the same, and its models can be exported."""

from pathlib import Path

import torch

from fedmoe.core_types import Tensors
from fedmoe.deployment.programs import Untraceable, inputs_of, traced
from fedmoe.evaluation.personal_model import PersonalModel
from fedmoe.loading import load
from fedmoe.testing.federation import SOME_OPTED_OUT, draw_examples, make_common_expert, make_expert, make_gate
from fedmoe.testing.resume import run
from fedmoe.testing.subject import Subject, require

ASKED = draw_examples(5, "asked").x
CLOSE = 1e-5  # between a model and what it was exported to


def a_loaded_run_predicts_the_same(subject: Subject, folder: Path) -> None:
    """Bit for bit, for every client, from what is on disk alone."""
    trained = run(subject, folder / "run", release=subject.make().release is not None)
    own = {"expert": make_expert, "gate": make_gate, "common_expert": make_common_expert()}
    loaded = load(folder / "run", **own, algorithm=subject.factory)  # type: ignore[arg-type]
    for client in trained.delivered:
        first, second = (result.personal_model(client) for result in (trained, loaded))
        require(torch.equal(first(ASKED), second(ASKED)), f"client {client} predicts otherwise once the run is loaded.")
        _require_weights(second, client)


def _require_weights(model: PersonalModel, client: int) -> None:
    weights = model.expert_weights(ASKED)
    if weights is None:
        return
    total = torch.stack(list(weights.values())).sum(0)
    fits = total.shape == (len(ASKED),) and all(bool((weight >= 0).all()) for weight in weights.values())
    require(
        fits and bool(torch.allclose(total, torch.ones(len(ASKED)))),
        f"expert_weights of client {client} are not one share of each row per expert that sum to 1: {_shown(weights)}.",
    )


def _shown(weights: Tensors) -> str:
    return ", ".join(f"{name}: {weight.tolist()}" for name, weight in weights.items())


def a_personal_model_can_be_exported(subject: Subject, folder: Path) -> None:
    """As a program for batches of any size, with the same probabilities."""
    trained = run(subject, folder / "run", release=subject.make().release is not None)
    model = trained.personal_model(SOME_OPTED_OUT)
    try:
        program = traced(model, ASKED[:3]).module()
    except Untraceable as error:
        raise AssertionError(
            f"the model of client {SOME_OPTED_OUT} cannot be exported: {error}. Let `predict` use tensor operations on "
            "x, and x.shape[0] in place of len(x)."
        ) from error
    for rows in (ASKED, ASKED[:1]):
        difference = float((program(*inputs_of(model, rows).values()) - model(rows)).abs().max())
        require(difference <= CLOSE, f"the exported model of client {SOME_OPTED_OUT} is off by {difference}.")
