"""Reads and writes low-rank adapters in peft's format, on any number of ranks.

    adapter_config.json           rank (r), lora_alpha, target_modules, use_rslora, the model's name
    adapter_model.safetensors     base_model.model.MODULE.lora_A.weight [r, K] and .lora_B.weight [N, r]

MODULE is the linear's name in transformers' model, such as model.layers.0.self_attn.q_proj. Tensors keep
their dtype, so writing what was read gives the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pyruntime.any_model.save_pretrained import raise_everywhere
from pyruntime.llama.model import Llama
from pyruntime.llama.tensor_shards import TensorShard, gather_full
from pyruntime.nn.low_rank import LoRA
from pyruntime.nn.weight_files import listed, open_tensors, read_json
from pyruntime.text import short_repr

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None,),
    # Others, such as "pissa", take a part out of the base model's weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
}
"""Settings of peft that change what adapters compute, with their values here; a missing one has the first."""


def save_adapters(
    model: Llama,
    directory: str | os.PathLike[str],
    base: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the adapters of `model`, which has all layers, as a folder that `peft.PeftModel.from_pretrained`
    reads. Every rank calls it; rank 0 of the group writes.

    base: path or name of the model that they belong to. dtype: None keeps the model's. If rank 0 cannot
    write, it raises OSError and the others RuntimeError.
    """
    assert model.lora is not None
    tensors = {}
    for shard in model.adapter_shards():
        full = gather_full(shard)
        if model.group.is_first:
            tensors[_PREFIX + shard.name] = full.to("cpu", dtype or full.dtype, copy=True).contiguous()
    error = None
    if model.group.is_first:
        try:
            _write(Path(directory), tensors, config_of(model.lora, base))
        except (OSError, SafetensorError) as cause:
            error = OSError(f"The adapters could not be written to {directory}: {cause}")
            error.__cause__ = cause
    raise_everywhere(error, (model.group,), model.embed.weight.device, "write the adapters")


def config_of(lora: LoRA, base: str | None) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _write(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{WEIGHTS}.partial"
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    partial.replace(directory / WEIGHTS)
    partial = directory / f"{CONFIG}.partial"
    partial.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(directory / CONFIG)


def adapter_files(directory: Path) -> set[Path]:
    """Returns the files of adapters in peft's format. Raises FileNotFoundError if one is missing."""
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} holds no {name}; save the adapters as safetensors.")
    return {directory / CONFIG, directory / WEIGHTS}


@torch.no_grad()
def load_adapters(model: Llama, directory: str | os.PathLike[str]) -> None:
    """Fills the adapters of this part of `model` from a folder in peft's format; each rank reads its slices.

    Raises ValueError if the folder's settings are not those of the model's adapters, or its tensors do not
    fit; FileNotFoundError or OSError if a file cannot be read.
    """
    directory = Path(directory)
    assert model.lora is not None
    path = directory / WEIGHTS
    adapter_files(directory)
    _check_config(model.lora, read_json(directory / CONFIG), directory)
    shards = {_PREFIX + shard.name: shard for shard in model.adapter_shards()}
    with open_tensors(path) as file:
        names = set(file.keys())
        if missing := sorted(set(shards) - names):
            raise ValueError(f"{path} lacks {listed(missing)}, which the model's adapters need.")
        if foreign := sorted(each for each in names - set(shards) if not _is_of_other_layers(each, model)):
            raise ValueError(f"{path} holds {listed(foreign)}, which the model's adapters do not have.")
        for name, shard in shards.items():
            _read(shard, file.get_slice(name), name, path)


def _is_of_other_layers(name: str, model: Llama) -> bool:
    """Whether a tensor belongs to a layer that another pipeline rank has."""
    parts = name.removeprefix(f"{_PREFIX}model.layers.").split(".")
    number = int(parts[0]) if parts[0].isdecimal() else -1
    return 0 <= number < model.config.num_hidden_layers and number not in model.part.layers


def _read(shard: TensorShard, found: Any, name: str, path: Path) -> None:
    shape = tuple(found.get_shape())
    if shape != shard.shape:
        raise ValueError(f"{name} in {path} has shape {list(shape)}, but here it is {list(shard.shape)}.")
    index = [slice(None)] * len(shape)
    if shard.dim is not None:
        index[shard.dim] = slice(shard.start, shard.start + shard.local.shape[shard.dim])
    shard.local.copy_(found[tuple(index)])


def _check_config(lora: LoRA, found: Mapping[str, Any], directory: Path) -> None:
    for name, known in _PLAIN.items():
        value = found.get(name, known[0])
        if value not in known:
            raise ValueError(
                f"{CONFIG} of {directory} has {name}={short_repr(value)}, and only plain LoRA is supported "
                f"({name}={known[0]!r}); train or convert the adapters without it."
            )
    targets = found.get("target_modules")
    targets = (
        sorted(targets) if isinstance(targets, list) and all(isinstance(t, str) for t in targets) else targets
    )
    for name, value, own in (
        ("r", found.get("r"), lora.rank),
        ("lora_alpha", found.get("lora_alpha"), lora.alpha),
        ("target_modules", targets, sorted(lora.targets)),
        ("use_rslora", found.get("use_rslora", False), lora.rslora),
    ):
        if value != own:
            raise ValueError(
                f"{CONFIG} of {directory} has {name}={short_repr(value)}, but the adapters here have {own}; "
                "ask for the same."
            )
