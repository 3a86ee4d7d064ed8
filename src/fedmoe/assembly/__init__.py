"""From a config and what was given with it to the parts of a run."""

from fedmoe.assembly.build import build, build_without_data, rebuild
from fedmoe.assembly.parts import Given, Parts

__all__ = ["Given", "Parts", "build", "build_without_data", "rebuild"]
