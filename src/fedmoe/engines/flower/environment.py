"""What Flower's programs are told through the environment: no telemetry, no look for updates."""

import os
from collections.abc import Mapping

WITHOUT_TRAFFIC = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def quiet_environment() -> Mapping[str, str]:
    """For programs that are started."""
    return {**os.environ, **WITHOUT_TRAFFIC}


def prepare_environment() -> None:
    """For this program, before it imports Flower."""
    os.environ.update(WITHOUT_TRAFFIC)
