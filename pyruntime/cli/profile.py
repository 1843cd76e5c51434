"""`python -m pyruntime profile`: finds the fastest slices of a sequence for a pipeline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from pyruntime.choices import Dtype
from pyruntime.cli.arguments import check_at_least, parse, writing
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.presets import preset
from pyruntime.llama.stage_profile import Ends, Profile, costed, profile_stage, time_ends
from pyruntime.plan.slice_cost import fit, table
from pyruntime.plan.stage_costs import StageCosts
from pyruntime.plan.terapipe import best_slicing, best_uniform_slicing, uniform_slicing
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.model_of_run import DTYPES

DESCRIPTION = """Times a stage of a Llama, forward and backward, on this machine for several slice lengths and
numbers of earlier tokens. Fits TeraPipe's cost model and finds, by TeraPipe's dynamic program, the slices
with which a sequence passes a pipeline fastest."""


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    preset: str = "3m"
    """Shape of the model, as in train --model.preset."""
    layers: int = 2
    """Layers of a stage."""
    seq_len: int = 1024
    """Tokens of a sequence."""
    step: int = 64
    """Tokens that slice lengths are multiples of; divides seq_len."""
    stages: int = 4
    """Ranks of the pipeline."""
    dtype: Dtype = "bf16"
    """Type of weights and activations."""
    threads: int = 1
    """CPU threads."""
    vocab_size: int = 0
    """Tokens of the vocabulary; the head's time is proportional to it. 0: the preset's."""
    json: str = ""
    """File to write costs and slices to, for train --pipeline.costs; empty: none."""


def main(argv: list[str]) -> None:
    options = parse(ProfileOptions, argv, "profile", DESCRIPTION)
    check_at_least(options, 1, "layers", "seq_len", "step", "stages", "threads")
    if options.seq_len % options.step or options.seq_len // options.step < 4:
        raise ConfigError(
            f"--step={options.step} must divide --seq_len={options.seq_len} into at least 4 parts."
        )
    if options.json and not Path(options.json).absolute().parent.is_dir():  # before minutes of measuring
        raise ConfigError(f"--json: {options.json} is in a folder that does not exist; make it first.")
    torch.set_num_threads(options.threads)
    with refusing("--preset: "):
        changes = {"vocab_size": options.vocab_size} if options.vocab_size else {}
        shape = preset(options.preset, max_position_embeddings=2 * options.seq_len, **changes)
        if shape.mixture is not None:
            raise ValueError(
                f"{options.preset} has experts, which are not measured yet; set pipeline.layers by hand."
            )
    lengths = list(range(options.step, options.seq_len + 1, options.step))
    contexts = lengths[:: max(1, len(lengths) // 8)]
    dtype = DTYPES[options.dtype]
    found = profile_stage(shape, options.layers, dtype, lengths, contexts)
    print(_report(options, shape, found, time_ends(shape, dtype, options.seq_len)))


def _report(options: ProfileOptions, shape: LlamaConfig, found: Profile, ends: Ends) -> str:
    lengths, contexts, seconds = zip(*found.contexts, strict=True)
    fitted = fit(lengths, contexts, seconds, found.lengths, found.seconds)
    cost = fitted.cost
    costs = table(cost, options.seq_len, options.step)
    best = best_slicing(costs, options.stages)
    uniform = best_uniform_slicing(costs, options.stages)
    whole = uniform_slicing(costs, options.stages, 1)
    layer = found.seconds[-1] / options.layers
    if options.json:
        costs_of_parts = StageCosts(
            seq_len=options.seq_len,
            model=costed(shape, options.dtype),
            stages=options.stages,
            layer=layer,
            embedding=ends.embedding,
            head=ends.head,
            slices=tuple(length * options.step for length in best.lengths),
        )
        document = {
            "options": dataclasses.asdict(options),
            "cost": dataclasses.asdict(cost),
            **dataclasses.asdict(costs_of_parts),
            "seconds": best.total,
        }
        with writing(f"--json: {options.json}"):
            Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    of_share = found.seconds[0] * len(found.lengths) / found.seconds[-1]
    rows = [
        ("a whole sequence through a stage", f"{found.seconds[-1] * 1e3:.1f} ms"),
        (
            "a layer, embedding, head",
            f"{layer * 1e3:.1f}, {ends.embedding * 1e3:.1f}, {ends.head * 1e3:.1f} ms",
        ),
        ("its first slice", f"{found.seconds[0] * 1e3:.2f} ms, {of_share:.2f} times its share"),
        (
            "what context adds",
            f"{cost.a0:.2e} + {cost.a1:.2e} i + {cost.a2:.2e} j + {cost.a3:.2e} i j seconds",
        ),
        (
            "error of the fit",
            f"{fitted.error:.1%} of a slice's time, {fitted.context_error:.1%} of what context "
            "adds, on points that were held out",
        ),
        (f"whole through {options.stages} stages", f"{whole.total * 1e3:.1f} ms"),
        ("best equal slices", f"{uniform.total * 1e3:.1f} ms, {_lengths(uniform.lengths, options.step)}"),
        ("best slices", f"{best.total * 1e3:.1f} ms, {_lengths(best.lengths, options.step)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _lengths(lengths: tuple[int, ...], step: int) -> str:
    return " + ".join(str(length * step) for length in lengths) + " tokens"
