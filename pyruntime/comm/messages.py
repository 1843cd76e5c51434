"""Encodes messages between ranks as JSON that is read by a type: no received byte decides what is made.

A type is None, bool, int, float, str, a Path, a dataclass of such, or a list, tuple, dict or union (also
Literal) of them. Reading gives a value of that type or a ValueError; nothing is called but those types.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")


def encode(value: object) -> bytes:
    """Returns the value as bytes. Raises TypeError for any other type."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes, kind: type[Value]) -> Value:
    """Returns what encode() got, of the type `kind`. Raises ValueError if the bytes are something else."""
    try:
        return _typed(json.loads(data), kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no message: {type(error).__name__}") from error


def _plain(value: object) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Path():
            return str(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():  # keys may be of any type
            return [[_plain(key), _plain(each)] for key, each in value.items()]
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent between ranks; see pyruntime/comm/messages.py.")


def _typed(found: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _first_of(found, arguments)
    if origin is Literal:
        if found in arguments and any(type(found) is type(each) and found == each for each in arguments):
            return found
    elif kind is Path:
        if isinstance(found, str):
            return Path(found)
    elif kind is float:
        if type(found) in (int, float):
            return float(found)
    elif kind in (bool, int, str, types.NoneType, None):
        if type(found) is (types.NoneType if kind is None else kind):
            return found
    elif dataclasses.is_dataclass(kind):
        if isinstance(found, dict):
            return _dataclass(found, kind)
    elif origin in (list, tuple, dict) and isinstance(found, list):
        return _collection(found, origin, arguments)
    raise ValueError(f"it has {type(found).__name__}, and {kind} was expected")


def _first_of(found: Any, kinds: tuple[Any, ...]) -> Any:
    # In JSON an int is a float too, and a Path is text: the exact type comes first.
    exact = [kind for kind in kinds if type(found) is kind]
    for kind in (*exact, *kinds):
        try:
            return _typed(found, kind)
        except ValueError:
            continue
    raise ValueError(f"it has {type(found).__name__}, and one of {kinds} was expected")


def _dataclass(found: dict[str, Any], kind: Any) -> Any:
    hints = typing.get_type_hints(kind)
    names = {each.name for each in dataclasses.fields(kind)}
    if found.keys() != names:
        raise ValueError(f"{kind.__name__} has missing or unknown fields {sorted(found.keys() ^ names)}")
    values = {name: _typed(each, hints[name]) for name, each in found.items()}
    own = {each.name for each in dataclasses.fields(kind) if each.init}
    return kind(**{name: value for name, value in values.items() if name in own})


def _collection(found: list[Any], origin: Any, arguments: tuple[Any, ...]) -> Any:
    if origin is dict:
        key, value = arguments
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
            raise ValueError("it has no pairs, and a mapping was expected")
        return {_typed(one, key): _typed(other, value) for one, other in found}
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        if len(found) != len(arguments):
            raise ValueError(f"it has {len(found)} values, and {len(arguments)} were expected")
        return tuple(_typed(each, kind) for each, kind in zip(found, arguments, strict=True))
    return origin(_typed(each, arguments[0]) for each in found)
