"""Flower's programs: where they are, and what they are told through the environment: no telemetry, no updates."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fedmoe.errors import ConfigError

WITHOUT_TRAFFIC = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def program(name: str) -> str:
    """The path of one of Flower's programs, beside this Python or wherever the shell finds it."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise ConfigError(f"{name} is not installed. Install it: pip install 'fedmoe[flower]'.")
    return found


def quiet_environment() -> Mapping[str, str]:
    """For programs that are started."""
    return {**os.environ, **WITHOUT_TRAFFIC}


def prepare_environment() -> None:
    """For this program, before it imports Flower."""
    os.environ.update(WITHOUT_TRAFFIC)
