"""`fedmoe flower new DIR`: an app for Flower that runs as it is, in simulation and on nodes."""

import re
from importlib.resources import files
from pathlib import Path

from fedmoe.errors import ConfigError

TOP = ("pyproject.toml", "fedmoe.toml")
PACKAGE = ("data.py", "server_app.py", "client_app.py")


def write_app(folder: Path) -> list[Path]:
    """The files of a new app, named after its folder."""
    name = folder.absolute().name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        raise ConfigError(
            f"{name!r} cannot name an app, which is a Python package: use small letters, digits and _, at most 32, as "
            "in silo_app."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty. Name a new folder.")
    template = files("fedmoe.silos") / "template"
    texts = {one: (template / one).read_text(encoding="utf-8") for one in TOP}
    texts |= {f"{name}/{one}": (template / f"{one}.txt").read_text(encoding="utf-8") for one in PACKAGE}
    texts[f"{name}/__init__.py"] = ""
    (folder / name).mkdir(parents=True)
    for path, text in texts.items():
        named = text.replace("APP_NAME", name).replace("APP-NAME", name.replace("_", "-"))
        (folder / path).write_text(named, encoding="utf-8")
    return [folder / path for path in texts]
