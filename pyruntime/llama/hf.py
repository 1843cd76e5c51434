"""Reads and writes Hugging Face checkpoints of a Llama, or of a family like it (`families.py`), on any number
of ranks: `config.json` and safetensors."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pyruntime.any_model.save_pretrained import raise_everywhere
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import Llama
from pyruntime.llama.stored import Stored, stored
from pyruntime.llama.tensor_shards import ROUTER_BIAS, TensorShard, gather_full
from pyruntime.nn.parameters import Group
from pyruntime.nn.weight_files import INDEX, WEIGHTS, find_tensors, listed, open_tensors, read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_hf(
    directory: str | os.PathLike[str],
    group: Group | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Llama:
    """Loads the Llama of a Hugging Face checkpoint folder, cut over `group`; each rank reads only its slices.

    dtype: dtype of the parameters; None takes the one that config.json names. Options are those of `Llama`,
    without its seed.

    Raises FileNotFoundError for a missing folder or file; ValueError for a checkpoint that is not a Llama, is
    damaged, or whose tensors do not fit its config.json.
    """
    hf = read_config(directory)
    config = LlamaConfig.from_hf(hf)
    check_shapes(config, directory)
    model = Llama(config, group, dtype=dtype or saved_dtype(hf), seed=None, **options)
    load_weights(model, directory)
    return model


def check_shapes(config: LlamaConfig, directory: str | os.PathLike[str]) -> None:
    """Raises ValueError if the tensors of a checkpoint folder are not those of `config`. Reads only headers:
    a damaged config.json is found before it makes a model allocate too much memory."""
    directory = Path(directory)
    files = _find_tensors(directory, config)
    layers = {name.split(".")[2] for name in files if name.startswith("model.layers.")}
    if len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"{CONFIG} of {directory} says num_hidden_layers={config.num_hidden_layers}, but the folder has "
            f"tensors of {len(layers)} layers."
        )
    whole = stored_of(Llama(config, device="meta", seed=None))
    for path in sorted({files[name] for name in whole if name in files}):
        with open_tensors(path) as file:
            for name, parts in whole.items():
                if files.get(name) == path:
                    _slice_of(parts[0][1], file, path)


@torch.no_grad()
def load_weights(model: Llama, directory: str | os.PathLike[str]) -> None:
    """Fills `model` from the safetensors of a checkpoint folder; errors as in `load_hf`."""
    directory = Path(directory)
    files = _find_tensors(directory, model.config)
    held = {name: [each for each in parts if _is_held(*each)] for name, parts in stored_of(model).items()}
    wanted = {name: parts for name, parts in held.items() if parts}
    whole = set(stored_of(Llama(model.config, device="meta", seed=None)))
    _check_names(directory, wanted, whole, files, tied=model.config.tie_word_embeddings)
    for path in sorted({files[name] for name in wanted}):
        with open_tensors(path) as file:
            for name, parts in wanted.items():
                if files[name] == path:
                    for shard, part in parts:
                        _read(shard, part, file, path)


def stored_of(model: Llama) -> dict[str, list[tuple[TensorShard, Stored]]]:
    """Returns the tensors in a checkpoint folder that this part of the model has a part of, by name: the
    model's tensors in it, and where they are."""
    found: dict[str, list[tuple[TensorShard, Stored]]] = {}
    for shard in model.shards():
        for part in stored(model.config, shard.name, shard.shape):
            found.setdefault(part.name, []).append((shard, part))
    return found


def _is_held(shard: TensorShard, part: Stored) -> bool:
    """Whether this rank has some of that part: an expert's matrices are on one rank."""
    return part.expert is None or 0 <= part.expert - shard.start < len(shard.local)


def save_hf(
    model: Llama,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    separator: int | None = None,
    begin: int | None = None,
) -> None:
    """Writes a folder that `load_hf` reads at any tp, and `from_pretrained` of transformers'
    `LlamaForCausalLM`, or of the class of the model's family.

    Every rank of the model's group must call this, and those of its group of experts, if that is another
    one, with the ranks of their groups. Tensors are gathered one at a time and written by rank 0 of both
    (`Llama.writes`), which needs memory for one file of `max_file_bytes` and one tensor more. A file gets its
    final name only when it is complete.

    dtype: dtype of the files; None keeps the model's. separator: the token after documents of the training
    text, where transformers then ends texts (eos); None: no such token. begin: the token before documents
    (bos); None: the separator. If rank 0 cannot write, it raises OSError and the others RuntimeError.
    """
    directory = Path(directory)
    dtype = dtype or model.embed.weight.dtype
    writer = _Writer(directory, dtype) if model.writes else None
    for name, content in plan_files(model.config, list(model.shards()), dtype, max_file_bytes).items():
        tensors: dict[str, torch.Tensor] = {}
        for shard in content:
            full = gather_full(shard)
            if writer is not None and writer.error is None:
                for part in stored(model.config, shard.name, shard.shape):
                    own = full if part.expert is None else full[part.expert, part.rows]
                    if part.name not in tensors:
                        kept = torch.float32 if part.name.endswith(ROUTER_BIAS) else dtype
                        tensors[part.name] = torch.empty(part.shape_in_folder, dtype=kept)
                    tensors[part.name][part.first : part.first + len(own)].copy_(own)
            del full
        if writer is not None:
            writer.write(name, tensors)
    if writer is not None:
        writer.finish(model.config, separator, separator if begin is None else begin)
    error = None
    if writer is not None and writer.error is not None:
        error = OSError(f"The checkpoint could not be written to {directory}: {writer.error}")
        error.__cause__ = writer.error
    groups = (model.group, model.experts_over)
    raise_everywhere(error, groups, model.embed.weight.device, "write the checkpoint")


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the parsed config.json of a checkpoint folder. Raises FileNotFoundError, or ValueError if it is
    damaged."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {directory}.")
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {CONFIG}, so it is not a Hugging Face checkpoint folder."
        )
    return read_json(path)


def plan_files(
    config: LlamaConfig, content: list[TensorShard], dtype: torch.dtype, max_file_bytes: int
) -> dict[str, list[TensorShard]]:
    """Returns the model's tensors of each file, in order. Only a single tensor of the file may exceed
    `max_file_bytes`."""
    groups: list[list[TensorShard]] = []
    room = 0
    # Tensors of the model that are one in the file follow each other.
    for _, each in itertools.groupby(content, lambda shard: stored(config, shard.name, shard.shape)[0].name):
        shards = list(each)
        size = sum(torch.Size(shard.shape).numel() for shard in shards) * dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = max_file_bytes
        groups[-1] += shards
        room -= size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": part for i, part in enumerate(groups, start=1)}


class _Writer:
    """Writes the files on rank 0. Keeps its first error until the other ranks have gathered all tensors."""

    def __init__(self, directory: Path, dtype: torch.dtype):
        self.directory = directory
        self.dtype = dtype
        self.error: Exception | None = None
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0
        with self._keep_error():
            directory.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if self.error is not None:
            return
        self._weight_map.update(dict.fromkeys(tensors, name))
        self._total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        with self._keep_error():
            partial = self.directory / f"{name}.partial"
            save_file(tensors, partial, metadata={"format": "pt"})
            partial.replace(self.directory / name)

    def finish(self, config: LlamaConfig, separator: int | None, begin: int | None) -> None:
        """Writes config.json, generation_config.json and, for several files, their index. Removes the files
        of an older checkpoint."""
        if self.error is not None:
            return
        with self._keep_error():
            written = set(self._weight_map.values())
            if len(written) > 1:
                index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
                self._write_json(INDEX, index)
                written.add(INDEX)
            self._write_json(CONFIG, config.to_hf(str(self.dtype).removeprefix("torch."), separator, begin))
            tokens = {"bos_token_id": begin, "eos_token_id": separator, "pad_token_id": None}
            self._write_json(GENERATION_CONFIG, tokens)
            for path in self.directory.iterdir():
                if _OURS.fullmatch(path.name) and path.name not in written:
                    path.unlink()

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        partial = self.directory / f"{name}.partial"
        partial.write_text(json.dumps(value, indent=2) + "\n")
        partial.replace(self.directory / name)

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.error = error


def weight_files(directory: str | Path) -> set[Path]:
    """Returns the files with the tensors of a checkpoint. Raises ValueError or OSError if it is damaged."""
    return set(find_tensors(Path(directory)).values())


def _find_tensors(directory: Path, config: LlamaConfig) -> dict[str, Path]:
    """Returns {tensor: its file} of a folder, without the layers behind the model's that predict further
    tokens (DeepSeek-V3's num_nextn_predict_layers), which this model does not have."""
    files, first = find_tensors(directory), config.num_hidden_layers
    further = 0 if config.latent is None else read_config(directory).get("num_nextn_predict_layers")
    if type(further) is not int or further < 1:
        return files
    numbers = {name: name.split(".")[2] for name in files if name.startswith("model.layers.")}
    left_out = {
        name
        for name, number in numbers.items()
        if number.isdecimal() and first <= int(number) < first + further
    }
    return {name: path for name, path in files.items() if name not in left_out}


def _check_names(
    directory: Path,
    wanted: Mapping[str, Any],
    whole: set[str],
    files: Mapping[str, Path],
    *,
    tied: bool,
) -> None:
    """wanted: the tensors of this rank's part of the model; whole: the names of all tensors."""
    missing = [name for name in wanted if name not in files]
    # Old transformers saved the rotary tables, which are computed here, and a tied head may be saved too.
    unexpected = [
        name
        for name in files
        if name not in whole
        and not name.endswith("rotary_emb.inv_freq")
        and not (tied and name == "lm_head.weight")
    ]
    if missing:
        raise ValueError(
            f"The checkpoint in {directory} lacks {listed(missing)}, which its {CONFIG} requires."
        )
    if unexpected:
        raise ValueError(
            f"The checkpoint in {directory} holds {listed(unexpected)}, which a Llama does not have."
        )


def _slice_of(part: Stored, file: Any, path: Path) -> Any:
    """Returns a tensor in a file, still unread. Raises ValueError if it is missing or has another shape."""
    try:
        found = file.get_slice(part.name)
    except SafetensorError as error:
        raise ValueError(f"{path} does not hold {part.name}, though {INDEX} says so: {error}") from error
    shape = tuple(found.get_shape())
    if shape != part.shape_in_folder:
        raise ValueError(
            f"{part.name} in {path} has shape {list(shape)}, but by {CONFIG} it is "
            f"{list(part.shape_in_folder)}."
        )
    return found


def _read(shard: TensorShard, part: Stored, file: Any, path: Path) -> None:
    """Copies this rank's slice of one tensor, without reading the rest."""
    found = _slice_of(part, file, path)
    if part.expert is not None:
        shard.local[part.expert - shard.start, part.rows].copy_(found[:])
        return
    starts = [0] * len(shard.shape)
    starts[0] = part.first
    for dim, start in ((shard.dim, shard.start), (shard.dim_y, shard.start_y)):
        if dim is not None:
            starts[dim] += start
    index = [slice(start, start + size) for start, size in zip(starts, shard.local.shape, strict=True)]
    shard.local.copy_(found[tuple(index)])


def saved_dtype(hf: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype in a parsed config.json. Raises ValueError unless it is fp32, bf16 or fp16."""
    name = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(
            f"{CONFIG} says dtype {ascii(name)[:60]}; pass dtype=, one of {', '.join(_DTYPES)}, to convert."
        )
    return _DTYPES[name]
