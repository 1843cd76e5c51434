"""Keeps the files and settings of a Hugging Face model that training does not change.

The run folder keeps all files of the model's folder except weights: tokenizer, chat templates, generation
settings, licence. An export copies them back. Only a few keys of config.json (`OURS`) are written anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pyruntime.nn.weight_files import find_tensors, open_tensors

FOLDER = "came_with"
"""Folder of a run with the files of its model.init_from, except weights."""
ADVICE = "copy it again from the model that the run began with, or move the folder away to do without"
"""End of the error message about a damaged file in that folder."""
TEMPLATES = "additional_chat_templates"
CONFIG = "config.json"
OURS = ("dtype", "torch_dtype", "max_position_embeddings", "vocab_size")
"""Keys of config.json that describe the written model; all others keep the original model's values."""
_READ = 1 << 12
"""Bytes at the end of each tensor that the fingerprint of weights is of."""
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)


def of_checkpoint(folder: Path) -> Path:
    """Returns the folder, in the checkpoint's run folder, with the files that came with the model."""
    return folder.resolve().parent.parent / FOLDER


def why_without(folder: Path) -> str:
    """Returns a sentence that says what is missing if the checkpoint `folder` was copied out of its run; else
    an empty string."""
    run_dir = folder.resolve().parent.parent
    if (run_dir / "config.toml").is_file() or (run_dir / FOLDER).is_dir():
        return ""
    return (
        f"{folder} is not in the folder of its run: the tokenizer that config.toml names there, and the "
        f"files of an imported model, in {FOLDER}/, are missing; copy both to {run_dir} to have them."
    )


def fingerprint(source: Path) -> str:
    """Returns a digest by which the weights in a model's folder are told from others: of their files' headers
    and each tensor's last bytes, of which any training changes some, also that of single layers or linears.
    Raises ValueError or OSError if the folder is damaged."""
    digest = hashlib.sha256()
    for path in sorted(set(find_tensors(source).values())):
        with open_tensors(path), open(path, "rb") as file:  # opened twice: the first one checks it
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            start = file.tell()
            tensors = [each for name, each in json.loads(header).items() if name != "__metadata__"]
            for begin, end in sorted(each["data_offsets"] for each in tensors):
                file.seek(start + max(begin, end - _READ))
                digest.update(file.read(min(end - begin, _READ)))
    return digest.hexdigest()[:16]


def keep(source: Path, target: Path) -> None:
    """Copies all but weights from the model's folder `source` to the new folder `target`. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES, dirs_exist_ok=True)


def give_back(kept: Path, target: Path) -> None:
    """Copies the files that `keep` put into `kept` beside the weights and config.json in `target`. Raises
    OSError; raises ValueError, before it changes anything, if the config.json in `kept` is damaged."""
    came = _came(kept / CONFIG)
    written = json.loads((target / CONFIG).read_text(encoding="utf-8"))
    for path in kept.iterdir():
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        elif path.name != CONFIG:
            shutil.copyfile(path, target / path.name)
    if not (kept / "generation_config.json").is_file():
        (target / "generation_config.json").unlink(missing_ok=True)
    dtype = "dtype" if "dtype" in came else "torch_dtype"
    changed = {key: written[key] for key in OURS if key in written and key in came} | {
        dtype: written["torch_dtype"]
    }
    changed |= _rope_of_longer(came, written)
    partial = target / f"{CONFIG}.partial"
    partial.write_text(json.dumps(came | changed, indent=2) + "\n", encoding="utf-8")
    partial.replace(target / CONFIG)


def _rope_of_longer(came: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings with the original context, where transformers would take the longer one of
    the written model for it."""
    key, longest = "original_max_position_embeddings", "max_position_embeddings"
    scaling = written.get("rope_scaling") or {}
    if came.get(longest) == written.get(longest) or key not in scaling or came.get(key):
        return {}
    names = ("rope_parameters", "rope_scaling")
    return {name: came[name] | {key: came[name].get(key, scaling[key])} for name in names if came.get(name)}


def _came(path: Path) -> dict[str, Any]:
    try:
        came = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); {ADVICE}.") from error
    if not isinstance(came, dict):
        raise ValueError(f"{path} is damaged: it holds no settings; {ADVICE}.")
    return came
