"""Frozen dataclasses from and to plain data, TOML and JSON, with errors that name field, value and rule.

A configuration is a frozen dataclass whose `__post_init__` calls `require` for each rule. Nothing is guessed: an
unknown key, a wrong type or a value outside its range raises `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, the value and the rule."""


def require(condition: bool, field: str, value: object, rule: str) -> None:
    """Raise `ConfigError` "field: got value; must be rule" unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field}: got {value!r}; must be {rule}")


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from plain data.

    Args:
        cls: a frozen dataclass; nested dataclasses, `X | None`, `tuple[X, ...]`, `Literal` and scalars are understood.
        data: mapping of field names to values; lists become tuples, an int is taken where a float is asked for.
        where: prefix of the field's name in messages.

    Raises:
        ConfigError: an unknown key, a missing one, a wrong type, or a value that the dataclass refuses.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__}: got {data!r}; must be a table of settings")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{_join(where, str(key))}: unknown key; known are {', '.join(fields)}{hint}")
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in data.items()}
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise ConfigError(f"{_join(where, name)}: missing; must be given")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_join(where, str(error))) from None


def to_dict(obj: Any) -> dict[str, Any]:
    """Plain, JSON-ready data of a dataclass; fields that are None are left out."""
    return {f.name: _plain(value) for f in dataclasses.fields(obj) if (value := getattr(obj, f.name)) is not None}


def load_file(cls: type[T], path: str | os.PathLike[str]) -> T:
    """Read a `.toml` or `.json` file into the dataclass `cls`.

    Raises:
        ConfigError: another suffix, a file that cannot be parsed, or settings that `from_dict` refuses.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    require(suffix in (".toml", ".json"), "path", str(path), "a .toml or .json file")
    text = path.read_text(encoding="utf-8")
    try:
        data = tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {suffix[1:].upper()}: {error}") from None
    return from_dict(cls, data)


def save_file(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write a dataclass as `.toml` or `.json`, complete or not at all."""
    path = Path(path)
    suffix = path.suffix.lower()
    require(suffix in (".toml", ".json"), "path", str(path), "a .toml or .json file")
    data = to_dict(obj)
    text = _toml(data) if suffix == ".toml" else json.dumps(data, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [a for a in arguments if a is not type(None)]
        if len(options) == 1:
            return _convert(options[0], value, where)
        raise TypeError(f"{where}: unions of several types are not supported")
    if origin is typing.Literal:
        require(value in arguments and type(value) in {type(a) for a in arguments}, where, value, f"one of {arguments}")
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, where)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, where)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    require(isinstance(value, (list, tuple)), where, value, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    require(len(value) == len(arguments), where, value, f"a list of {len(arguments)} values")
    return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True)))


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if hint not in names:
        raise TypeError(f"{where}: fields of type {hint!r} are not supported")
    is_bool_for_number = isinstance(value, bool) and hint is not bool
    require(isinstance(value, hint) and not is_bool_for_number, where, value, names[hint])
    return value


def _toml(data: Mapping[str, Any], prefix: str = "") -> str:
    """Settings first, then tables: the subset of TOML that these dataclasses need."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in data.items() if not isinstance(value, Mapping)]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in data.items():
        if isinstance(value, Mapping):
            name = f"{prefix}.{key}" if prefix else key
            text += ("\n" if text else "") + f"[{name}]\n" + _toml(value, name)
    return text


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)
