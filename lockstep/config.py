"""Settings as data: dataclasses from nested dictionaries and back, strictly, with every problem named."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from typing import Any

from lockstep.errors import UsageError, nearest
from lockstep.ranges import Range

# Which dataclass a table is for, where there is a choice, and the table without what made the choice.
Choose = Callable[[type, dict[str, Any]], tuple[type, dict[str, Any]]]


def build(cls: type, data: dict[str, Any], choose: Choose) -> Any:
    """`cls` with the values of `data`; defaults for the rest. A UsageError lists all that is wrong."""
    problems: list[str] = []
    built = _table(cls, data, "", problems, choose)
    if problems:
        raise UsageError("\n".join(problems))
    return built


# Metadata of a setting that came after runs were made without it: `field(default=..., metadata=LATER)`.
LATER = {"later": True}


def dump(settings: Any, fields: Callable[[Any], Iterable[Field]] = dataclasses.fields) -> dict[str, Any]:
    """The nested dictionary that `build` takes back."""
    return {
        field.name: dump(value, fields) if dataclasses.is_dataclass(value) else _plain(value)
        for field in fields(settings)
        for value in [getattr(settings, field.name)]
    }


def counted(settings: Any) -> list[Field]:
    """The fields that tell an experiment from others: a later one only where it differs from its default.

    So what an older version wrote is still of the same experiment.
    """
    return [field for field in dataclasses.fields(settings) if not _is_unused_later(field, settings)]


def _is_unused_later(field: Field, settings: Any) -> bool:
    if "later" not in field.metadata:
        return False
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return bool(getattr(settings, field.name) == default)


def keys(cls: type, choose: Choose, data: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all settings of `cls`."""
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            inner = data.get(name)
            table = inner if isinstance(inner, dict) else {}
            chosen, table = choose(typing.cast(type, hint), table)
            names += keys(chosen, choose, table, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def parse(setting: str) -> tuple[str, Any]:
    """`key.path=value` as path and value; the value is read as TOML, or else as text."""
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise UsageError(f"--set takes KEY=VALUE, such as algo.clip=0.1; got '{setting}'.")
    try:
        return path.strip(), tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), text.strip()


def assign(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`data` with the value at `key.path`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return merged(data, value)


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `more` laid over it, table by table.

    A value that stands where a table belongs is not hidden by one, so that `build` names it.
    """
    out = dict(base)
    for name, value in more.items():
        old = out.get(name)
        if isinstance(value, dict) and old is not None:
            out[name] = merged(old, value) if isinstance(old, dict) else old
        else:
            out[name] = value
    return out


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The dotted name and value of every setting, however tables were nested. An empty table counts as a value."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        table = isinstance(value, dict) and value
        found |= leaves(value, f"{prefix}{name}.") if table else {f"{prefix}{name}": value}
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _table(cls: type, data: dict[str, Any], prefix: str, problems: list[str], choose: Choose) -> Any:
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for name, value in data.items():
        if name not in hints:
            path = f"{prefix}{name}"
            known = keys(cls, choose, data)
            hint = nearest(name, known, prefix) or f" It takes {', '.join(prefix + key for key in known)}."
            problems.append(f"unknown setting '{path}'.{hint}")
            continue
        values[name] = _value(hints[name], value, f"{prefix}{name}", problems, choose)
    return None if problems else cls(**values)


def _value(hint: Any, value: Any, path: str, problems: list[str], choose: Choose) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            problems.append(f"'{path}' is a group of settings, not {value!r}.")
            return None
        chosen, table = choose(typing.cast(type, hint), value)
        return _table(chosen, table, f"{path}.", problems, choose)
    allowed = None
    if typing.get_origin(hint) is typing.Annotated:
        hint, allowed = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            problems.append(f"'{path}' must be a list such as [64, 64], not {value!r}.")
            return None
        item = typing.get_args(hint)[0]
        return tuple(_value(item, v, f"{path}[{i}]", problems, choose) for i, v in enumerate(value))
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            options = [str(option) for option in typing.get_args(hint)]
            problems.append(
                f"'{path}' must be one of {', '.join(options)}, not {value!r}.{nearest(str(value), options)}"
            )
        return value
    return _scalar(hint, value, path, problems, allowed)


def _scalar(hint: Any, value: Any, path: str, problems: list[str], allowed: Range | None) -> Any:
    if typing.get_origin(hint) is dict:
        hint = dict
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wrong = (isinstance(value, bool) and hint is not bool) or (value != value and allowed is None)
    if wrong or not isinstance(value, hint):
        names: dict[Any, str] = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "text",
            dict: "a table",
        }
        problems.append(f"'{path}' must be {names[hint]}, not {value!r}.")
    elif hint is dict:
        problems += [
            f"'{path}.{name}' must be a number, text, true or false, or a list or table of these, not {given!r}."
            for name, given in value.items()
            if not _in_toml(given)
        ]
    elif allowed is not None and value not in allowed:
        problems.append(f"'{path}' must be {allowed}, not {value!r}.")
    return value


def _in_toml(value: Any) -> bool:
    """Whether config.toml can hold it, and give the same back."""
    if isinstance(value, list | dict):
        return all(map(_in_toml, value.values() if isinstance(value, dict) else value))
    return type(value) in (bool, int, float, str)
