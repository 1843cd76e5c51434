"""Finds the tensors of a Hugging Face checkpoint in its files, and opens files so that slices can be read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_tensors(directory: Path) -> dict[str, Path]:
    """Returns {tensor of the checkpoint: path of the file that holds it}."""
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file():
        with open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pth", ".pt"))
        hint = f" (it has {found[0]}; save it as safetensors first)" if found else ""
        raise FileNotFoundError(f"{directory} holds neither {WEIGHTS} nor {INDEX}{hint}.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names.")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is no file of its own folder; name files only.")
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, but {directory} does not hold it; fetch it too.")
    return {tensor: directory / name for tensor, name in weight_map.items()}


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    try:
        opened = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); fetch or save it again."
        ) from error
    with opened as file:
        yield file


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch or save it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def listed(names: list[str]) -> str:
    """Joins the first three names, and counts the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
