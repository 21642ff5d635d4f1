"""Settings as data: dataclasses from nested dictionaries and back, strictly, with every problem named."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from typing import Any

from lockstep.errors import UsageError, nearest
from lockstep.ranges import Range

DEEPEST = 32  # tables and lists inside each other
TOO_DEEP = f"tables or lists nest more than {DEEPEST} deep."
LARGEST = 2**63 - 1  # TOML's whole numbers have 64 bits

# Which dataclass a table is for, where there is a choice, and the table without what made the choice.
Choose = Callable[[type, dict[str, Any]], tuple[type, dict[str, Any]]]


def build(cls: type, data: dict[str, Any], choose: Choose) -> Any:
    """`cls` with the values of `data`; defaults for the rest. A UsageError lists all that is wrong."""
    check_depth(data)
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


class NotToml(UsageError):
    """Bytes that are not TOML."""


def read(content: bytes) -> dict[str, Any]:
    """The tables of a TOML file; a UsageError says why there are none."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise NotToml(f"not TOML: {error}.") from error
    if max(key.count(".") for key in re.split(r"[=,{}\[\]\n]", text)) > 100 * DEEPEST:
        raise UsageError(TOO_DEEP)  # the parser would take hours
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise UsageError(TOO_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise NotToml(f"not TOML: {error}.") from error
    except ValueError:  # Python reads no number of more than some thousand digits
        raise UsageError("a number is too long to be read.") from None
    check_depth(data)
    return data


def check_depth(data: object) -> None:
    """Refuse what nests so deeply that functions which call themselves fail on it."""
    level, depth = [data], 0
    while level := [
        inner
        for value in level
        if isinstance(value, list | tuple | dict)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
        if depth > DEEPEST:
            raise UsageError(TOO_DEEP)


def parse(setting: str) -> tuple[str, Any]:
    """`key.path=value` as path and value; the value is read as TOML, or else as text."""
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise UsageError(f"--set takes KEY=VALUE, such as algo.clip=0.1; got '{setting}'.")
    try:
        values = read(f"value = {text.strip()}".encode())
    except NotToml:
        values = {}
    except UnicodeEncodeError as error:
        raise UsageError(f"--set {path.strip()}: its value is not UTF-8.") from error
    except UsageError as error:
        raise UsageError(f"--set {path.strip()}: {error}") from error
    return path.strip(), values["value"] if values.keys() == {"value"} else text.strip()


def assign(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`data` with the value at `key.path`."""
    names = path.split(".")
    if len(names) > DEEPEST:
        raise UsageError(f"'{brief(path)}' is no setting: none has so many parts.")
    for name in reversed(names):
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


def brief(text: str) -> str:
    """The same, cut where it is longer than anybody reads in a message."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def shown(value: object) -> str:
    """How a message shows a value that was given."""
    try:
        return brief(repr(value))
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of thousands of digits"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _table(cls: type, data: dict[str, Any], prefix: str, problems: list[str], choose: Choose) -> Any:
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for name, value in data.items():
        if name not in hints:
            path = brief(f"{prefix}{name}")
            known = keys(cls, choose, data)
            hint = nearest(name, known, prefix) or f" It takes {', '.join(prefix + key for key in known)}."
            problems.append(f"unknown setting '{path}'.{hint}")
            continue
        values[name] = _value(hints[name], value, f"{prefix}{name}", problems, choose)
    return None if problems else cls(**values)


def _value(hint: Any, value: Any, path: str, problems: list[str], choose: Choose) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            problems.append(f"'{path}' is a group of settings, not {shown(value)}.")
            return None
        chosen, table = choose(typing.cast(type, hint), value)
        return _table(chosen, table, f"{path}.", problems, choose)
    allowed = None
    if typing.get_origin(hint) is typing.Annotated:
        hint, allowed = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            problems.append(f"'{path}' must be a list such as [64, 64], not {shown(value)}.")
            return None
        item = typing.get_args(hint)[0]
        return tuple(_value(item, v, f"{path}[{i}]", problems, choose) for i, v in enumerate(value))
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            options = [str(option) for option in typing.get_args(hint)]
            problems.append(
                f"'{path}' must be one of {', '.join(options)}, not {shown(value)}.{nearest(shown(value), options)}"
            )
        return value
    return _scalar(hint, value, path, problems, allowed)


def _scalar(hint: Any, value: Any, path: str, problems: list[str], allowed: Range | None) -> Any:
    if typing.get_origin(hint) is dict:
        hint = dict
    if not isinstance(value, int | float):  # NumPy has numbers of its own
        plain = {numbers.Integral: int, numbers.Real: float}
        value = next((to(value) for kind, to in plain.items() if isinstance(value, kind)), value)
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
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
        problems.append(f"'{path}' must be {names.get(hint, hint)}, not {shown(value)}.")
    elif hint is int and abs(value) > LARGEST and (allowed is None or allowed.high == math.inf):
        problems.append(f"'{path}' must be at most {LARGEST}, not {shown(value)}.")
    elif hint is dict:
        kinds = "a number of at most 64 bits, text, true or false, or a list or table of these"
        problems += [
            f"'{path}.{brief(str(name))}' must be {kinds}, not {shown(given)}."
            for name, given in value.items()
            if not _in_toml({name: given})
        ]
    elif allowed is not None and value not in allowed:
        problems.append(f"'{path}' must be {allowed}, not {shown(value)}.")
    return value


def _in_toml(value: Any) -> bool:
    """Whether config.toml can hold it, and give the same back."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _in_toml(name) and _in_toml(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(_in_toml, value))
    if type(value) is str:
        return not re.search("[\ud800-\udfff]", value)  # halves of letters, which no file takes
    return type(value) in (bool, float) or (type(value) is int and abs(value) <= LARGEST)
