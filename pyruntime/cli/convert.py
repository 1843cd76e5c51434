"""`python -m pyruntime convert`: between a run's checkpoints and Hugging Face models."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from pyruntime.choices import Dtype
from pyruntime.cli.arguments import check_at_least, parse
from pyruntime.cli.environment import check_started, started_ranks
from pyruntime.train import checkpoint_folder, validate
from pyruntime.train.errors import ConfigError

DESCRIPTION = """Writes the weights of a run's checkpoint as a Hugging Face model, or turns a Hugging Face
Llama into a checkpoint that a run can resume from. The contents of --source decide which. Under torchrun the
model is cut over all ranks."""


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    source: str
    """Run folder (its newest checkpoint), one of its checkpoints/step-N folders, or a Hugging Face folder
    with config.json and safetensors."""
    target: str
    """Folder to write, new or empty."""
    dtype: Literal["auto"] | Dtype = "auto"
    """Type of the written weights; auto: unchanged, but fp16 from Hugging Face becomes fp32."""
    merge: bool = False
    """Whether a run that trained low-rank adapters becomes a whole model, with the adapters in its weights;
    false: the adapters alone, as peft reads them."""
    max_file_bytes: int = 5_000_000_000
    """Largest safetensors file of a Hugging Face model, in bytes; larger models are cut into several."""
    deadline_s: float = 120.0
    """Longest wait for a peer, in seconds."""


def main(argv: list[str]) -> None:
    options = parse(ConvertOptions, argv, "convert", DESCRIPTION)
    check(options)
    check_started()
    world_size = started_ranks()

    from pyruntime.comm import Runtime
    from pyruntime.llama import origin
    from pyruntime.train.saving.convert import from_hf, to_hf

    source, target = Path(options.source), Path(options.target)
    dtype = None if options.dtype == "auto" else options.dtype
    with Runtime.start(tp=world_size, deadline_s=options.deadline_s) as runtime:
        if (source / "config.json").is_file():
            if options.merge:
                raise ConfigError(
                    f"--merge: {source} is a Hugging Face model without adapters; give the run that "
                    "trained them."
                )
            facts = from_hf(source, target, runtime, dtype)
            said = f"resume it with --checkpoint.resume {target}"
        else:
            try:
                folder = checkpoint_folder.find(source)
                facts = to_hf(folder, target, runtime, dtype, options.max_file_bytes, merge=options.merge)
            except ConfigError as error:
                raise ConfigError(str(error).replace("checkpoint.resume: ", "--source: ", 1)) from error
            notes = [origin.why_without(folder), _better(source, folder)]
            if runtime.rank == 0:
                print(*(f"{note}\n" for note in notes if note), sep="", end="")
            said = f"weights of step {facts.step}, for transformers and --model.init_from {target}"
            if facts.adapters and not options.merge:
                said = f"adapters of step {facts.step}, for peft and --lora.init_from {target}"
        if runtime.rank == 0:
            print(f"{target}: {said}")


def _better(source: Path, folder: Path) -> str:
    """Names the checkpoint of the run `source` with the lowest validation loss; empty if it is `folder`, or
    if that was named itself."""
    if source == folder:
        return ""
    lowest = checkpoint_folder.read(folder).lowest_loss
    found = [] if lowest is None else checkpoint_folder.by_loss(source, lowest)
    best = found[0][0] if found else folder
    if best == folder:
        return ""
    return f"{best} has a lower validation loss than {folder.name}; give it as --source to convert that one."


def check(options: ConvertOptions) -> None:
    """Raises ConfigError for options that are wrong by themselves."""
    if not os.path.isdir(options.source):
        raise ConfigError(f"--source {options.source}: there is no such folder.")
    if os.path.exists(options.target) and not (
        os.path.isdir(options.target) and not os.listdir(options.target)
    ):
        raise ConfigError(f"--target {options.target} exists and is not an empty folder; name a new folder.")
    check_at_least(options, 1, "max_file_bytes")
    validate.check_seconds("--deadline_s", options.deadline_s)
