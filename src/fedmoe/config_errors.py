"""What is wrong with a config, in the user's words: key, value, why, and what to write instead."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fedmoe.errors import ConfigError

CHOICES = {"data": "name", "split": "kind", "model": "name"}  # sections of several kinds, and the key that says which
UNION_MEMBER = re.compile(r"int|str|(tuple|dict|literal)\[.*\]")  # where pydantic says which of several types it tried

# Renamed since version 0.1. Consulted where a key or value is not known, so a name that comes back is no trouble.
OLD_KEYS = {
    "engine.way": "engine.backend",
    "evaluation.union": "evaluation.pooled",
    "algorithm.newcomers": "algorithm.new_clients",
}
OLD_VALUES = {
    "engine.backend": {"stacked": "batched", "looped": "sequential"},
    "algorithm.name": {"local_global": "lg_fedavg"},
    "algorithm.objective": {"bound": "variational"},
}


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first error of a validation."""
    first = _first(error)
    place = [part for part in map(str, first["loc"]) if not UNION_MEMBER.fullmatch(part)]
    choice = place.pop(1) if not prefix and len(place) > 1 and place[0] in CHOICES else None
    key, value = prefix + ".".join(place), first.get("input")
    if first["type"] == "union_tag_invalid":
        named = first["ctx"]
        options = re.findall(r"'([^']+)'", named["expected_tags"])
        return f"{key}.{CHOICES[key]}={named['tag']!r} is not known. {nearest(named['tag'], options)}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        if key in OLD_KEYS:
            return renamed_key(key, value)
        if choice:
            beside = f"beside {place[0]}.{CHOICES[place[0]]}={choice!r}"
            return f"the config key {key!r} is not known {beside}. {nearest(key, _keys_beside(model, key, choice))}"
        return f"the config key {key!r} is not known. {nearest(key, known_keys(model))}"
    if (new := renamed_value(key, value)) is not None:
        return f"{key}={value!r} is now called {new!r}. Write {key} = {new!r}."
    shown = "" if isinstance(value, dict) else f"={value!r}"
    return f"{key}{shown}: {first['msg'][0].lower()}{first['msg'][1:]}."


def _first(error: ValidationError) -> Any:
    """Of a value that may be of several kinds, what is wrong by the kind that was recognised furthest."""
    errors = error.errors()
    place = errors[0]["loc"]
    tried = next((at for at, part in enumerate(place) if UNION_MEMBER.fullmatch(str(part))), len(place))
    return max((one for one in errors if one["loc"][:tried] == place[:tried]), key=lambda one: len(one["loc"]))


def renamed_key(key: str, value: Any) -> str:
    """
    >>> renamed_key("engine.way", "stacked")
    "the config key 'engine.way' is now called 'engine.backend'. Write engine.backend = 'batched'."
    """
    new = OLD_KEYS[key]
    now = renamed_value(new, value) or value
    return f"the config key {key!r} is now called {new!r}. Write {new} = {now!r}."


def renamed_value(key: str, value: Any) -> str | None:
    return OLD_VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def nearest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, cutoff=0.4)
    return f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known) or 'none'}."


def require_finite(value: Any, key: str = "") -> None:
    """No setting of any algorithm may be infinite or NaN: whatever it was to mean, the scores would be of nothing."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            require_finite(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            require_finite(inner, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not a finite number. Set one.")


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key that a config file may hold, dotted."""
    keys: list[str] = [prefix + name for name in getattr(model, "more_keys", list)()]
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *_kinds(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
            else:
                keys += _keys_of_dataclass(kind, f"{prefix}{name}.")
    return sorted(set(keys))


def _keys_of_dataclass(kind: Any, prefix: str) -> list[str]:
    keys: list[str] = []
    for name, field in getattr(kind, "__dataclass_fields__", {}).items():
        inner = [key for member in get_args(field.type) for key in _keys_of_dataclass(member, f"{prefix}{name}.")]
        keys += [prefix + name, *inner]
    return keys


def _keys_beside(model: type[BaseModel], key: str, choice: str) -> list[str]:
    section = key.split(".")[0]
    chosen = [
        kind
        for kind in _kinds(model.model_fields[section].annotation)
        if kind.model_fields[CHOICES[section]].default == choice
    ]
    return [known for kind in chosen for known in known_keys(kind, f"{section}.")]


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, without the tags that tell them apart."""
    return [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(annotation)]
