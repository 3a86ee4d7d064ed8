"""Names such as "my_package.my_module:my_function" in a config: what a user wrote outside this package.

Nothing is imported that the user did not name.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedmoe.errors import ConfigError, FedmoeError

EXAMPLE = "package.module:name"


def is_import_string(name: Any) -> bool:
    return isinstance(name, str) and ":" in name


def kind_by(key: str) -> Callable[[Any], Any]:
    """For sections of several kinds: the kind that a table or a section says under `key`, EXAMPLE if it is imported."""

    def kind(value: Any) -> Any:
        name = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        return EXAMPLE if is_import_string(name) else name

    return kind


def load(key: str, name: str) -> Callable[..., Any]:
    """What an import string names; `key` is the config key that holds it. Raises a ConfigError that says what fails."""
    module_name, _, attributes = name.partition(":")
    if not module_name or not attributes or ":" in attributes:
        raise ConfigError(f"{key}={name!r} is no import string. Write it as {EXAMPLE!r}.")
    if "<" in attributes:  # <locals>, <lambda>
        raise ConfigError(
            f"{key}={name!r} was made inside a function, so it cannot be imported. Pass it to fedmoe.run again, or "
            "define it in a module of its own."
        )
    found = _module(key, name, module_name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = difflib.get_close_matches(attribute, dir(found), 1)
            hint = f"Did you mean {near[0]!r}?" if near else "Check the name after the colon."
            raise ConfigError(f"{key}={name!r}: the module {module_name!r} has no {attribute!r}. {hint}")
        found = getattr(found, attribute)
    return require_callable(key, name, found)


def _module(key: str, name: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except FedmoeError:
        raise
    except ModuleNotFoundError as error:
        parents = [module_name.rsplit(".", cut)[0] for cut in range(module_name.count(".") + 1)]
        if error.name in parents:
            raise ConfigError(
                f"{key}={name!r}: there is no module {error.name!r}. Install it, or put the folder that has it on "
                "PYTHONPATH."
            ) from error
        raise _broken(key, name, module_name, error) from error
    except Exception as error:  # whatever a user's module does when it is imported
        raise _broken(key, name, module_name, error) from error


def _broken(key: str, name: str, module_name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{key}={name!r}: the module {module_name!r} exists, but its import fails with {type(error).__name__}: {error}."
    )


def require_callable(key: str, name: str, found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(f"{key}={name!r} is no function but {_kind(found)}. Name a function or a class.")
    result: Callable[..., Any] = found
    return result


def call(key: str, name: str, arguments: Mapping[str, Any], settings: Mapping[str, Any] | None, *returns: type) -> Any:
    """Call the function that `name` names with `arguments` by position and the settings beside `key` by name."""
    function, settings = load(key, name), settings or {}
    try:
        inspect.signature(function).bind(*arguments.values(), **settings)
    except ValueError:  # something built in that does not say its arguments
        pass
    except TypeError as error:
        shown = ", ".join([*arguments, *(f"{setting}=…" for setting in settings)])
        section = key.partition(".")[0]
        raise ConfigError(
            f"{key}={name!r} cannot be called as ({shown}): {error}. The other keys of [{section}] are its settings."
        ) from error
    made = function(*arguments.values(), **settings)
    if not isinstance(made, returns):
        wanted = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in returns)
        raise ConfigError(f"{key}={name!r} returned {_kind(made)}, not {wanted}.")
    return made


def name_of(function: Callable[..., Any]) -> str:
    """The import string of a function that was given as such; one without a name goes by its type."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__module__}.{type(value).__qualname__}"
