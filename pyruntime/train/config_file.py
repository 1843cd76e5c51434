"""Reads a run's configuration from a TOML file or preset, and writes it back.

A file holds sections named as the fields of `RunConfig` (`[train] steps = 300`). Missing keys keep their
default. A file may hold tables [ranks.N] with what differs on N ranks; their keys are sections: `[ranks.16]`
and below it `parallel = {tp = 8, dp = 2}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from pathlib import Path

from pyruntime.text import short_repr, toml_value
from pyruntime.train.config import GONE, Grid, RunConfig, why_gone
from pyruntime.train.errors import ConfigError

PRESET_DIR = Path(__file__).parent / "presets"
BY_RANKS = "ranks"
"""Name of the tables [ranks.N]."""


def preset_names() -> list[str]:
    """Names that `--config` takes besides paths."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.toml"))


def find(name_or_path: str) -> Path:
    """Returns the TOML file of a preset's name or of a path. Raises ConfigError if there is neither."""
    preset = PRESET_DIR / f"{name_or_path}.toml"
    if "/" not in name_or_path and os.path.isfile(preset):
        return preset
    if os.path.isfile(name_or_path):
        return Path(name_or_path)
    raise ConfigError(
        f"--config {name_or_path}: there is no such file and no such preset; give the path of a TOML file or "
        f"one of {', '.join(preset_names())}."
    )


def load(path: Path, ranks: int = 1) -> RunConfig:
    """Returns the configuration that a TOML file gives for `ranks` ranks. Raises ConfigError with the file's
    name, the key and what was expected."""
    config = from_dict(_for_ranks(_values(path), ranks, str(path)), source=str(path))
    return _with_files_beside(config) if path.parent == PRESET_DIR else config


def _with_files_beside(config: RunConfig) -> RunConfig:
    """Returns the configuration of a preset with its own files, which lie beside it, by their whole paths."""
    data = config.data
    template = str(PRESET_DIR / data.chat_template) if data.chat_template else ""
    paths = tuple(str(PRESET_DIR / each) for each in data.paths)
    return dataclasses.replace(config, data=dataclasses.replace(data, paths=paths, chat_template=template))


def ranks_of(path: Path) -> list[int]:
    """Returns the numbers of ranks that a file has tables for, ascending; empty if it has none. Raises
    ConfigError if the file cannot be read or is not valid."""
    return sorted(map(int, _tables(_values(path), str(path))))


def _values(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _tables(values: dict, source: str) -> dict[str, dict]:
    """Returns the tables [ranks.N] by N."""
    found = values.get(BY_RANKS, {})
    numbers = isinstance(found, dict) and all(re.fullmatch("[1-9][0-9]{0,8}", key) for key in found)
    if not numbers or not all(isinstance(each, dict) for each in found.values()):
        raise ConfigError(
            f"{source}: {BY_RANKS} must hold a table for each number of ranks, as [{BY_RANKS}.8], found "
            f"{short_repr(found)}."
        )
    return found


def _for_ranks(values: dict, ranks: int, source: str) -> dict:
    """Returns `values` with those of [ranks.N] put over them."""
    tables = _tables(values, source)
    values = {section: content for section, content in values.items() if section != BY_RANKS}
    if not tables:
        return values
    if str(ranks) not in tables:
        numbers = ", ".join(sorted(tables, key=int))
        raise ConfigError(
            f"{source} has tables for {numbers} ranks, and none for {ranks}; start one of these numbers, or "
            f"write a file with `python -m pyruntime plan --gpus {ranks} --config FILE`."
        )
    for section, content in tables[str(ranks)].items():
        common = values.get(section)
        both = isinstance(common, dict) and isinstance(content, dict)
        values[section] = common | content if both else content
    return values


def grid(text: str) -> Grid:
    """Parses axes as a file writes them, {x=2,y=2}. Raises ValueError."""
    try:
        return _convert(tomllib.loads(f"tp = {text}")["tp"], Grid)
    except (ValueError, TypeError):
        raise ValueError(f"{short_repr(text)} is not {_describe(Grid)}, such as {{x=2,y=2}}") from None


def from_dict(values: dict, source: str) -> RunConfig:
    """Builds the configuration from nested dicts (section, key). `source` names their origin in errors."""
    hints = typing.get_type_hints(RunConfig)
    sections = {}
    for name, content in values.items():
        if name not in hints:
            raise ConfigError(f"{source}: there is no section [{name}]{_suggest(name, hints)}.")
        if not isinstance(content, dict):
            raise ConfigError(
                f"{source}: {name} must be a section of keys, as [{name}], found {short_repr(content)}."
            )
        sections[name] = _section(hints[name], name, content, source)
    return RunConfig(**sections)


def _section(cls: type, section: str, content: dict, source: str):
    hints = typing.get_type_hints(cls)
    fields = {}
    for key, value in content.items():
        if why := why_gone(f"{section}.{key}"):
            if value != GONE[f"{section}.{key}"][0]:
                raise ConfigError(f"{source}: {why} Delete the line from that file.")
            continue
        if key not in hints:
            raise ConfigError(f"{source}: [{section}] has no key {key}{_suggest(key, hints)}.")
        try:
            fields[key] = _convert(value, hints[key])
        except TypeError:
            raise ConfigError(
                f"{source}: {section}.{key} must be {_describe(hints[key])}, found {short_repr(value)}."
            ) from None
    return cls(**fields)


def _convert(value, hint):
    """Returns `value` as the type `hint`; converts only int to float, list to tuple. Raises TypeError."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        for each in _alternatives(hint):
            with contextlib.suppress(TypeError):
                return _convert(value, each)
        raise TypeError
    if origin is typing.Literal:
        if any(value == each and type(value) is type(each) for each in typing.get_args(hint)):
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_convert(item, typing.get_args(hint)[0]) for item in value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                return float(value)
    elif hint is Grid:
        kinds = typing.get_type_hints(Grid)
        if isinstance(value, dict) and value.keys() <= kinds.keys():
            return Grid(**{key: _convert(each, kinds[key]) for key, each in value.items()})
    elif type(value) is hint:
        return value
    raise TypeError


def _alternatives(hint) -> list:
    """The types of a union without None, which a file cannot write."""
    return [each for each in typing.get_args(hint) if each is not types.NoneType]


def _describe(hint) -> str:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_describe, _alternatives(hint)))
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(arg) for arg in typing.get_args(hint))
    if origin is tuple:
        return f"a list, each item {_describe(typing.get_args(hint)[0])}"
    if hint is Grid:
        return f"a table of {', '.join(field.name for field in dataclasses.fields(Grid))}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[hint]


def _suggest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {close[0]}" if close else f"; there are {', '.join(known)}"


def to_toml(config: RunConfig) -> str:
    """Returns the configuration as TOML, without fields that are None; `load` reads back an equal one."""
    lines = []
    for section, values in vars(config).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in vars(values).items() if value is not None]
        lines.append("")
    return "\n".join(lines)
