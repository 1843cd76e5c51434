"""Files and settings of a Hugging Face model that training does not change: they leave with it as they came.

All that a model's folder holds besides its weights is kept in the run folder: tokenizer, chat templates,
generation settings, licence. Of config.json the keys that are ours alone are written anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FOLDER = "came_with"
"""Of a run: what its model.init_from held besides weights."""
ADVICE = "copy it again from the model that the run began with, or move the folder away to do without"
"""Ends the sentence about a folder of what came that is damaged."""
TEMPLATES = "additional_chat_templates"
CONFIG = "config.json"
OURS = ("dtype", "torch_dtype", "max_position_embeddings", "vocab_size")
"""Keys of config.json that say what was written, and not what came."""
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
    """Where what came with the model of a checkpoint is: in its run's folder."""
    return folder.resolve().parent.parent / FOLDER


def why_without(folder: Path) -> str:
    """Where the checkpoint `folder` was copied out of its run, a sentence that says what does not go with it;
    else empty."""
    run_dir = folder.resolve().parent.parent
    if (run_dir / "config.toml").is_file() or (run_dir / FOLDER).is_dir():
        return ""
    return (
        f"{folder} is not in the folder of its run: the tokenizer that config.toml names there, and what "
        f"came with an imported model, in {FOLDER}/, are not with it; copy both to {run_dir} to have them."
    )


def keep(source: Path, target: Path) -> None:
    """Copies what the model's folder `source` holds besides weights to the new folder `target`. Raises
    OSError."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES, dirs_exist_ok=True)


def give_back(kept: Path, target: Path) -> None:
    """Puts what `keep` copied to `kept` beside the weights in `target`, whose config.json is there. Raises
    OSError, and ValueError, before anything is changed, where the config.json that came is damaged."""
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
    partial = target / f"{CONFIG}.partial"
    partial.write_text(json.dumps(came | changed, indent=2) + "\n", encoding="utf-8")
    partial.replace(target / CONFIG)


def _came(path: Path) -> dict[str, Any]:
    try:
        came = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); {ADVICE}.") from error
    if not isinstance(came, dict):
        raise ValueError(f"{path} is damaged: it holds no settings; {ADVICE}.")
    return came
