"""`fedmoe flower`: an app for Flower on real silos, from its files to a resumed run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmoe.cli_options import console, path

flower_app = typer.Typer(no_args_is_help=True, help="Train on real silos with Flower (extra `flower`).")

AppFolder = Annotated[
    Path, typer.Argument(metavar="APP", parser=path, help="The folder that `fedmoe flower new` wrote.")
]
SuperLink = Annotated[str, typer.Argument(help="The SuperLink's name in Flower's config.toml. Default: its default.")]
ServerFolder = Annotated[str, typer.Option("--dir", help="The server's run, if it is not in the default folder.")]


@flower_app.command(name="new")
def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=path, help="A new folder; its name is the app's.")],
) -> None:
    """Write an app that runs as it is: then change its data.py and fedmoe.toml.

    Example: fedmoe flower new silo_app && flwr run silo_app
    """
    from fedmoe.silos.app_files import write_app

    for written in write_app(folder):
        console.print(escape(str(written)), highlight=False)
    console.print("Next: put your data into data.py, its form into fedmoe.toml, and `flwr run` it. See docs/deploy.md.")


@flower_app.command(name="certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=path, help="A new folder for keys and certificates.")],
    host: Annotated[list[str], typer.Option(help="A name or address of the server; repeatable.")],
    nodes: Annotated[int, typer.Option(min=0, help="How many nodes get a key.")] = 0,
) -> None:
    """An authority, the server's certificate and a key for each node, for their owners' eyes only.

    Example: fedmoe flower certs keys --host fed.example.org --nodes 3
    """
    from fedmoe.silos.certificates import write_certificates

    for written in write_certificates(folder, host, nodes):
        console.print(escape(str(written)), highlight=False)


@flower_app.command(name="node")
def node_command(
    superlink: Annotated[str, typer.Option(help="host:port of the SuperLink, or of the proxy in front of it.")],
    root_certificates: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="The authority's certificate.")],
    key: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="This node's private key, registered before.")],
    client: Annotated[int, typer.Option(min=0, help="The number of the client that this node serves.")],
    directory: Annotated[Path, typer.Option("--dir", parser=path, metavar="FOLDER", help="What stays on this node.")],
    send_scores: Annotated[bool, typer.Option(help="Send scores where the config asks for them.")] = False,
    release: Annotated[bool, typer.Option(help="Send private parts where the config asks for their release.")] = False,
    node_config: Annotated[str, typer.Option(help="More for client_data: 'key=value key=\"text\"'.")] = "",
    tries: Annotated[int, typer.Option(min=1, help="Give up after so many failures in a row.")] = 30,
) -> None:
    """Run this silo's SuperNode, and start it again when it ends.

    Example: fedmoe flower node --superlink fed.example.org:443 --root-certificates ca.crt --key node-0 --client 0
    --dir /var/lib/fedmoe
    """
    from fedmoe.silos.supervisor import NodeSettings, supervise

    settings = NodeSettings(
        superlink, root_certificates, key, client, directory, send_scores, release, node_config, tries
    )
    supervise(settings)


@flower_app.command(name="resume")
def resume_command(app: AppFolder, superlink: SuperLink = "", directory: ServerFolder = "") -> None:
    """Go on with a run whose server was stopped or killed, after its last whole round.

    Example: fedmoe flower resume silo_app
    """
    from fedmoe.silos.flwr_run import run_app

    run_app(app, superlink, directory, "resume=true")


@flower_app.command(name="personalize")
def personalize_command(app: AppFolder, superlink: SuperLink = "", directory: ServerFolder = "") -> None:
    """Run the local stage of a trained run on the nodes, and leave each personal model there, as model.pt2.

    Only scores come back, of nodes that agreed to send them.

    Example: fedmoe flower personalize silo_app
    """
    from fedmoe.silos.flwr_run import run_app

    run_app(app, superlink, directory, "personalize=true")
