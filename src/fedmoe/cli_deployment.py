"""Commands that put a personal model to work: predict, export, serve. None of them needs a client's training data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedmoe.cli_options import console, path
from fedmoe.errors import ConfigError

if TYPE_CHECKING:
    from fedmoe.result import Result

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", parser=path, help="The folder of a finished run.")]
Client = Annotated[str, typer.Option(help="Whose model: the client's name, or its number where it has none.")]
Expert = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FACTORY", help="The expert that was passed to fedmoe.run, if one was."),
]
Gate = Annotated[str | None, typer.Option(metavar="MODULE:FACTORY", help="The gate, likewise.")]
Algorithm = Annotated[str | None, typer.Option(metavar="MODULE:FACTORY", help="The algorithm, likewise.")]


def predict_command(
    run: RunFolder,
    client: Client,
    data: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="Rows: .csv, .parquet, or .npz with x.")],
    to: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="A .csv or .parquet file; default: a table here.")
    ] = None,
    prior: Annotated[
        Literal["own", "balanced", "estimated"] | None,
        typer.Option(help="Label frequencies to answer under; estimated: from these rows. Default: as the model does."),
    ] = None,
    expert: Expert = None,
    gate: Gate = None,
    algorithm: Algorithm = None,
) -> None:
    """What a client's personal model says of new rows: the class, and the probability of each.

    Rows of a CSV or parquet file are read as the table was that the run was trained on; other columns do not matter.

    Example: fedmoe predict runs/wards --client north --data new_patients.csv --to predicted.csv
    """
    from fedmoe.deployment.predictions import predict, reader_of, write_predictions
    from fedmoe.display.tables import prediction_table

    result = open_run(run, expert, gate, algorithm)
    model = result.personal_model(client)
    predictions = predict(model, reader_of(result).file(data), prior)
    if prior is not None and model.has_even_prior:
        note = f"{model.facts.client} has no labels, or too few to tell: its own label frequencies are even."
        console.print(note, highlight=False, markup=False)
    if to is None:
        console.print(prediction_table(predictions.columns(), f"{model.facts.client}: {data.name}"))
    else:
        write_predictions(predictions, to)
        console.print(f"{len(predictions.answers_NC)} rows: {to}", highlight=False, markup=False)


def export_command(
    run: RunFolder,
    client: Client,
    to: Annotated[Path, typer.Option(parser=path, metavar="FOLDER", help="Where the files go.")],
    data: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="Rows to check the programs on; default: random ones."),
    ] = None,
    expert: Expert = None,
    gate: Gate = None,
    algorithm: Algorithm = None,
) -> None:
    r"""A client's model as files that run without fedmoe: safetensors, a torch.export program, ONNX, a model card.

    Every program is run against the run's own model before it is left there. ONNX needs
    `pip install 'fedmoe\[export]'`.

    Example: fedmoe export runs/wards --client north --to models/north --data new_patients.csv
    """
    from fedmoe.deployment.export import export
    from fedmoe.deployment.predictions import reader_of

    result = open_run(run, expert, gate, algorithm)
    made = export(result, client, to, reader_of(result).file(data) if data else None)
    for name in made.files:
        console.print(str(made.folder / name), highlight=False, markup=False)
    for name, why in made.left_out.items():
        console.print(f"{name} is left out: {why}.", style="yellow", highlight=False, markup=False)
    if not {"model.pt2", "model.onnx"} <= made.left_out.keys():
        console.print(f"Their answers agree with the run's own model on {made.checked_on}.", highlight=False)


def serve_command(
    run: RunFolder,
    client: Client,
    port: Annotated[int, typer.Option(help="Of this machine; 0: any that is free.", min=0, max=65535)] = 8000,
    expert: Expert = None,
    gate: Gate = None,
    algorithm: Algorithm = None,
) -> None:
    r"""Answer rows over HTTP with a client's model, for programs on this machine alone. Ctrl-C ends it.

    POST /predict takes {"rows": [...]} and, if wished, "prior": "own", "balanced" or "estimated" (from these rows).
    GET / tells what the model is. Needs `pip install 'fedmoe\[serve]'`.

    Example: fedmoe serve runs/wards --client north --port 8000
    """
    try:
        from fedmoe.deployment.serving import app_of, listen, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed. Install it with: pip install 'fedmoe[serve]'.") from error

    result = open_run(run, expert, gate, algorithm)
    model = result.personal_model(client)
    listener = listen(port)
    where = f"http://127.0.0.1:{listener.getsockname()[1]}"
    console.print(f"{model.facts.client} answers at {where}; Ctrl-C ends it.", highlight=False, markup=False)
    serve(app_of(result, model), listener)


def open_run(run: Path, expert: str | None, gate: str | None, algorithm: str | None) -> "Result":
    """A finished run; parts of the user's own by import strings."""
    from fedmoe import import_strings
    from fedmoe.loading import load

    given = {"expert": expert, "gate": gate, "algorithm": algorithm}
    parts = {name: import_strings.load(f"--{name}", text) for name, text in given.items() if text is not None}
    return load(run, **parts)  # type: ignore[arg-type]


def add_commands(app: typer.Typer) -> None:
    app.command(name="predict")(predict_command)
    app.command(name="export")(export_command)
    app.command(name="serve")(serve_command)
