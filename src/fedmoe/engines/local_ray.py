"""A Ray of this machine alone, for the engines that need one: quiet, on the loopback interface, without a dashboard."""

import os
from typing import Any

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",  # a busy machine takes longer than the 30 seconds that Ray gives itself
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what a later version will do; without it each start warns of that
}


def start_local_ray(ray: Any, num_cpus: int) -> None:
    """Nobody else can reach it. It ends with `ray.shutdown()`, or with this process."""
    prepare_environment()
    here = {"num_cpus": num_cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address="local", log_to_driver=False, logging_level="ERROR", **here)


def prepare_environment() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
