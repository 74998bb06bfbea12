"""Conversions of a configuration: the ConfigDict that flags edit, the typed `Config`, JSON, and dotted keys."""

import dataclasses
import functools
import json
import math
import numbers
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from reinforce_ada_jax.config import aliases
from reinforce_ada_jax.config.settings import Config

_hints = functools.cache(typing.get_type_hints)


def _type_of(owner: type, field: dataclasses.Field) -> tuple[Any, bool]:
    """Returns the type of a setting, and True if it may be None."""
    hint = _hints(owner)[field.name]
    if isinstance(hint, types.UnionType):
        (kind,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        return kind, True
    return hint, False


def settings(owner: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Yields every setting as (dotted key, field), in the order of the declarations."""
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(field.default):
            yield from settings(type(field.default), f"{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


def defaults() -> ConfigDict:
    """Returns a locked ConfigDict of every setting at its default, for config files and flags to edit."""

    def section(owner: Any) -> ConfigDict:
        result = ConfigDict()
        for field in dataclasses.fields(owner):
            kind, optional = _type_of(owner, field)
            if dataclasses.is_dataclass(kind):
                result[field.name] = section(kind)
            else:
                result[field.name] = config_dict.placeholder(kind) if optional else field.default
        return result

    return section(Config).lock()


def with_tuples(arguments: Sequence[str]) -> list[str]:
    """Returns arguments in which A,B for a setting of several texts is ('A', 'B'), as flags of tuples are read.

    An empty value is no text, in place of one empty text.
    """
    several = {key for key, field in settings() if field.type == tuple[str, ...]}

    def read(argument: str) -> str:
        found = re.fullmatch(r"--?config\.([\w.]+)=([^(\['\"].*,.*|)", argument, re.DOTALL)
        if found is None or found[1] not in several:
            return argument
        return f"--config.{found[1]}={tuple(part.strip() for part in found[2].split(',') if part.strip())}"

    return [*map(read, arguments)]


_ACCEPTED: dict[type, Any] = {int: numbers.Integral, float: numbers.Real}


def _check_type(key: str, value: Any, accepted: Any, name: str) -> None:
    if not isinstance(value, accepted):
        raise ValueError(f"{key} is {value!r:.80}, of the type {type(value).__name__}; its type must be {name}.")


def _converted(key: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        _check_type(key, value, (tuple, list), "tuple")  # a text is a sequence too, of letters
        each = typing.get_args(kind)[0]
        return tuple(_converted(f"{key}[{index}]", entry, each) for index, entry in enumerate(value))
    if kind is float and value == "inf":  # of `to_json`
        return math.inf
    _check_type(key, value, _ACCEPTED.get(kind, kind), kind.__name__)
    return kind(value)


def resolve(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Returns the typed configuration of a ConfigDict or of nested mappings; missing keys have their defaults.

    Raises:
      ValueError: an unknown key, or a value of another type.
    """

    def section(owner: Any, given: Mapping[str, Any], prefix: str) -> Any:
        known = {field.name: field for field in dataclasses.fields(owner)}
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            raise ValueError(f"unknown configuration key {prefix}{unknown[0]}. {aliases.hint(unknown[0])}".strip())
        values = {}
        for name, value in given.items():
            kind, optional = _type_of(owner, known[name])
            if dataclasses.is_dataclass(kind):
                _check_type(prefix + name, value, Mapping, "mapping")
                values[name] = section(kind, value, f"{prefix}{name}.")
            elif optional and value is None:
                values[name] = None
            else:
                values[name] = _converted(prefix + name, value, kind)
        return owner(**values)

    return section(Config, config.to_dict() if isinstance(config, ConfigDict) else config, "")


def replaced(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns `config` with some settings changed: replaced(config, {"seed": 1, "mesh.data": 2})."""
    tree = dataclasses.asdict(config)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return resolve(tree)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted key."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def changed(config: Config) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, by dotted key."""
    usual = flatten(defaults().to_dict())
    return {key: value for key, value in flatten(dataclasses.asdict(config)).items() if value != usual[key]}


def to_json(config: Config) -> str:
    """Returns the resolved configuration as indented JSON with sorted keys; infinity, which JSON lacks, is "inf"."""

    def values(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        return {name: "inf" if value == math.inf else value for name, value in pairs}

    return json.dumps(dataclasses.asdict(config, dict_factory=values), indent=2, sort_keys=True, allow_nan=False) + "\n"


def from_json(text: str) -> Config:
    return resolve(json.loads(text))
