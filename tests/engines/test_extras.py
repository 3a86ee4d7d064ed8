import pytest

from fedmoe.engines.extras import require
from fedmoe.errors import ConfigError


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"engine.name='ray' needs the package 'no_such_package'.*'fedmoe\[ray\]'"):
        require("no_such_package.inside", "ray")


def test_a_module_that_is_there_is_given() -> None:
    assert require("json.decoder", "ray").JSONDecoder
