"""Checks the messages that a rank sends to the service, before anything is decided by them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pyruntime.replicas.address import LARGEST_PORT

LARGEST = (1 << 53) - 1
"""Largest number in a message."""
SHOWN = 100
"""Characters of a wrong value that an error shows."""

Holds: TypeAlias = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return type(value) is str and bool(value)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_count(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_address(value: Any) -> bool:
    """Accepts only IP addresses: looking up a name could take long and delay others."""
    if not (type(value) is list and len(value) == 2 and type(value[0]) is str and _is_number(value[1])):
        return False
    try:
        ipaddress.ip_address(value[0])
    except ValueError:
        return False
    return value[1] <= LARGEST_PORT


def _is_job(value: Any) -> bool:
    if type(value) is not dict:
        return False
    late = value.get("late", 0)
    counts = _is_count(value.get("tau")) and _is_count(value.get("rounds"))
    return counts and type(late) is int and late in (0, 1)


def _is_deal(value: Any) -> bool:
    """Whether it has the form of `Deal.to_list`."""
    if not (type(value) is list and value and all(map(_is_number, value))):
        return False
    first, *again = value
    return len(set(again)) == len(again) and all(block < first for block in again)


OWN: dict[str, Holds] = {"step": _is_number, "weights": _is_number, "deal": _is_deal}
FIELDS: dict[str, dict[str, Holds]] = {
    "hello": {
        "replica": _is_text,
        "label": _is_text,
        "places": _is_count,
        "place": _is_number,
        "address": _is_address,
        "job": _is_job,
        **OWN,
    },
    "here": OWN,
    "ready": {"round": _is_number},
    "broken": {"donor": _is_text},
    "begun": {"round": _is_number},
    "arrived": {"round": _is_number},
    "done": {"attempt": _is_number},
    "failed": {"attempt": _is_number, "peer": _is_text},
    "alive": {},
}
"""The fields that each type of message must have."""


def check(message: Mapping[str, Any]) -> None:
    """Raises ValueError for a message that no rank of this version sends."""
    kind = message["type"]
    fields = FIELDS.get(kind) if type(kind) is str else None
    if fields is None:
        raise ValueError(f"unknown message type {_shown(kind)}; start it with the service's version")
    for name, holds in fields.items():
        if not holds(message.get(name)):
            raise ValueError(f"its {kind} says {name}={_shown(message.get(name))}")
    if kind == "hello":
        job = message["job"]
        if message["place"] >= message["places"]:
            raise ValueError(f"its hello says place={message['place']} of places={message['places']}")
        if message["step"] > job["tau"] * job["rounds"]:
            raise ValueError(f"its hello says step={message['step']}, more than its run has")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
