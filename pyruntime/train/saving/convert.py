"""Converts checkpoints to Hugging Face folders and back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pyruntime.choices import Dtype
from pyruntime.comm import CommError, Runtime
from pyruntime.data_parallel import shard
from pyruntime.llama import Llama, LlamaConfig, adapters, load_hf, load_weights, origin, save_hf
from pyruntime.llama.adapter_files import save_adapters
from pyruntime.llama.hf import read_config, saved_dtype
from pyruntime.train import checkpoint, checkpoint_folder, config_file, manifest
from pyruntime.train.checkpoint_folder import CheckpointFacts
from pyruntime.train.config import Checkpoint, Model, RunConfig, Train, spelled_out
from pyruntime.train.data import tokenizing
from pyruntime.train.data.chat_template import give_template
from pyruntime.train.data.tokenizer import FILE_NAME, ByteTokenizer, Tokenizer, open_tokenizer
from pyruntime.train.disk import cannot_write, cause_of
from pyruntime.train.errors import ConfigError, TrainingError, refusing
from pyruntime.train.model_of_run import DTYPES, lora_of
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.resolved import adapters_in_words
from pyruntime.train.saving.saver import Saver
from pyruntime.train.shape import padded_vocabulary


def to_hf(
    folder: Path,
    target: Path,
    runtime: Runtime,
    dtype: Dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    *,
    merge: bool = False,
) -> CheckpointFacts:
    """Writes the weights of the checkpoint `folder` as a folder that transformers reads, with the run's
    tokenizer if its config.toml names one. Every rank calls it. Returns the facts of the checkpoint.

    Of a run that trained adapters it writes these, as peft reads them; merge: the model that they belong to
    with the adapters added to its weights. dtype: to convert to; None keeps the checkpoint's. Raises
    ConfigError if the checkpoint is damaged or does not fit the ranks, or if merge is asked for and it has no
    adapters; TrainingError if the target cannot be written.
    """
    facts = checkpoint.check_files(folder, runtime.world)
    if merge and not facts.adapters:
        raise ConfigError(f"--merge: {folder} has all weights and no adapters; leave out --merge.")
    shape = shape_of(folder, facts)
    tokenizer: Tokenizer | None = None  # on rank 0

    def read_tokenizer() -> tuple[int | None, int | None]:
        nonlocal tokenizer
        tokenizer = _tokenizer(folder, shape)
        return (None, None) if tokenizer is None else (tokenizer.separator, next(iter(tokenizer.begin), None))

    separator, begin = on_rank_0(
        runtime.world, "Reading the tokenizer", read_tokenizer, tuple[int | None, int | None]
    )
    model, source = _model(folder, facts, shape, runtime)
    checkpoint.load_weights(folder, model, runtime.world)
    to_dtype = None if dtype is None else DTYPES[dtype]
    if facts.adapters and not merge:
        with _writing(target):
            save_adapters(model, target, source or None, to_dtype)
            if tokenizer is not None:
                tokenizer.save(target)
        return facts
    adapters.merge(model)
    with _writing(target):
        save_hf(
            model,
            target,
            dtype=to_dtype,
            max_file_bytes=max_file_bytes,
            separator=separator,
            begin=begin,
        )
        kept = origin.of_checkpoint(folder)
        if runtime.rank == 0 and kept.is_dir():
            with refusing("--source: "):
                origin.give_back(kept, target)
        if tokenizer is not None and not (kept / FILE_NAME).is_file():
            tokenizer.save(target)
        if runtime.rank == 0:
            give_template(kept.parent, target)
    return facts


def _model(folder: Path, facts: CheckpointFacts, shape: LlamaConfig, runtime: Runtime) -> tuple[Llama, str]:
    """Makes the model of a checkpoint. If that has only adapters, the model has the weights that they belong
    to, by the run's config.toml. Returns it, and the folder of these weights."""
    options: dict[str, Any] = {"dtype": DTYPES[facts.dtype], "tier": "chunked"}
    if not facts.adapters:
        with refusing():
            return Llama(shape, runtime.tp, seed=None, **options), ""
    path = folder.resolve().parent.parent / "config.toml"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has only adapters, and {path}, which names the model that they belong to, is missing; "
            "convert it in the folder of its run."
        )
    config = spelled_out(config_file.load(path))
    if (found := adapters_in_words(config)) != facts.adapters:
        raise ConfigError(
            f"{folder} has the adapters {facts.adapters}, but {path} describes {found or 'none'}; restore "
            "the model that model.init_from names there."
        )
    source, seed = config.model.init_from, config.train.seed
    with refusing(f"{path}: ", (ValueError, OSError)):
        model = Llama(shape, runtime.tp, seed=None if source else seed, lora=lora_of(config), **options)
        if source:
            load_weights(model, source)
    return model, str(Path(source).resolve()) if source else ""


def from_hf(source: Path, target: Path, runtime: Runtime, dtype: Dtype | None = None) -> CheckpointFacts:
    """Writes target/checkpoints/step-000000 with the weights of the Hugging Face Llama `source`, to resume
    from on any mesh, and target/config.toml for `train --checkpoint.resume target`. Every rank calls it.

    dtype: of the weights; None: bf16 if they were saved so, else fp32. Raises ConfigError if the source is no
    such model, is damaged or does not fit the ranks, TrainingError if the target cannot be written.
    """
    with refusing("--source: ", (ValueError, OSError)):
        if dtype is None:
            dtype = "bf16" if saved_dtype(read_config(source)) == torch.bfloat16 else "fp32"
        model = load_hf(source, runtime.tp, dtype=DTYPES[dtype], tier="chunked")
    sharded = shard(model, None, stage=0)
    sharded.adamw()
    facts = CheckpointFacts(0, dtype, dataclasses.asdict(model.config))
    config = RunConfig(model=Model(init_from=str(source.resolve())), train=Train(dtype=dtype))

    def write_config() -> None:
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
        origin.keep(source, target / origin.FOLDER)

    with _writing(target):
        on_rank_0(runtime.world, f"Writing {target}", write_config)
    with Saver(target, sharded, runtime.world, Checkpoint()) as saver:
        saver.begin(facts)
    sharded.close()
    return facts


def shape_of(folder: Path, facts: CheckpointFacts) -> LlamaConfig:
    """The shape of the model in the checkpoint. Raises DamagedError if its facts describe none."""
    try:
        shape = LlamaConfig.from_dict(facts.model)
        DTYPES[facts.dtype]
    except (TypeError, ValueError, KeyError) as error:
        finding = f"it does not describe a model ({str(error).splitlines()[0].rstrip('.')})"
        raise manifest.refusal(folder, checkpoint_folder.FACTS_FILE, finding) from error
    return shape


def _tokenizer(folder: Path, shape: LlamaConfig) -> Tokenizer | None:
    """Returns the tokenizer of the run that saved the checkpoint. None if the run's configuration is missing,
    or if it began with a Hugging Face model that came without a tokenizer and does not read bytes."""
    path = folder.resolve().parent.parent / "config.toml"
    if not path.is_file():
        return None
    config = config_file.load(path)
    model, data = config.model, config.data
    elsewhere = "copy the checkpoint elsewhere to convert it without a tokenizer"
    began = Path(model.init_from)
    came_with = bool(model.init_from) and (began / FILE_NAME).is_file()
    is_said = data.tokenizer or came_with or any(tokenizing.is_tokens(Path(each)) for each in data.paths)
    gone = next((each for each in data.paths if not Path(each).exists()), "")
    if not is_said and gone:
        raise ConfigError(
            f"{path} names no tokenizer, and data.paths {gone}, which may have held tokens with theirs, is "
            f"gone; restore it, set data.tokenizer in {path}, or {elsewhere}."
        )
    if not is_said and model.init_from and began.is_dir():
        return ByteTokenizer() if shape.vocab_size == ByteTokenizer.vocab_size else None
    tokenizer = open_tokenizer(data.tokenizer, model.init_from, data.paths)
    fits = tokenizer.vocab_size <= shape.vocab_size
    if not model.init_from:
        fits = fits and shape.vocab_size == (model.vocab_size or padded_vocabulary(tokenizer.vocab_size))
    if not fits:
        raise ConfigError(
            f"{path} leads to a tokenizer of {tokenizer.vocab_size} tokens, but the model in {folder} has "
            f"{shape.vocab_size}, so it was trained with another; {elsewhere}."
        )
    return tokenizer


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except (CommError, ConfigError):
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: on the ranks that do not write
        raise TrainingError(cannot_write(target, cause_of(error))) from error
