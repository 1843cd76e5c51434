"""The reference of a run that learns preferences: its log-probabilities of all pairs, computed once.

They are kept in a file in the format of safetensors, so that no second model is in memory: for each source
and each validation set an fp64 tensor [pairs, 2], and in the header what they belong to. Another run with the
same weights, pairs and options reads them there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyruntime import comm, ops
from pyruntime.comm import Runtime
from pyruntime.llama import origin
from pyruntime.train import disk
from pyruntime.train.data.batches import Batch, batch_of_pairs
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.ranks import on_every_rank, on_rank_0
from pyruntime.train.resolved import ResolvedRun

FILE_NAME = "reference.safetensors"
FORMAT = "1"
BLOCK = 2**16
"""Numbers that ranks exchange at a time."""


def give_reference(
    run: ResolvedRun,
    corpus: Corpus,
    runtime: Runtime,
    run_dir: Path,
    evaluate: Callable[[Batch], Tensor],
    say: Callable[[str], None],
) -> None:
    """Gives the pairs of `corpus` the reference's log-probabilities: those of the run's file, or computed and
    written there. Every rank calls it, before the model is trained or loaded from a checkpoint.

    evaluate: returns the log-probabilities [pairs, 2] of this rank's batch, fp64, 0 on stages of a pipeline
    that do not have them; called as often on every rank. say: prints a line. Raises ConfigError on every rank
    if the file is of another model, text or tokenizer, or damaged, or cannot be written."""
    path, ranks = Path(run.config.dpo.reference or run_dir / FILE_NAME), runtime.world
    facts = facts_of(run, corpus)
    sizes = {name: each.pairs for name, each in corpus.pairs.items()}
    what = f"pairs  the reference's log-probabilities of {sum(sizes.values()):,} pairs"
    if on_rank_0(ranks, "Finding the reference", path.exists, bool):
        found = on_every_rank(ranks, "Reading the reference", lambda: read(path, facts, sizes))
        say(f"{what} are those in {path}")
    else:
        say(f"{what} are computed and kept in {path}")
        found = _computed(run, corpus, runtime, evaluate)
        on_rank_0(ranks, "Writing the reference", lambda: write(path, facts, found))
    for name, packed in corpus.pairs.items():
        packed.reference = found[name].numpy()


def facts_of(run: ResolvedRun, corpus: Corpus) -> dict[str, str]:
    """Returns what log-probabilities belong to: the weights, how they compute, and the text."""
    config, source = run.config, run.config.model.init_from
    shape = json.dumps(dataclasses.asdict(run.shape), sort_keys=True, default=str)
    shape = hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()
    with refusing("model.init_from: ", (ValueError, OSError)):
        weights = origin.fingerprint(Path(source)) if source else f"random, of seed {config.train.seed}"
    facts = {"weights": f"{weights} of shape {shape}", "train.dtype": config.train.dtype}
    tokenizers = sorted({each.text.facts.fingerprint for each in corpus.sources})
    facts |= {"the tokenizer": " ".join(tokenizers), "train.seq_len": str(config.train.seq_len)}
    return facts | corpus.digests()


def write(path: Path, facts: Mapping[str, str], found: Mapping[str, Tensor]) -> None:
    """Writes the file whole or not at all. Raises ConfigError."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # another run may write the same
    held = {"format": FORMAT, "facts": json.dumps(dict(facts)), "digest": _digest(found)}
    try:
        save_file(dict(found), partial, held)
        disk.flush(partial)
        partial.replace(path)
        disk.flush(path.parent)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"dpo.reference: {path} cannot be written: {disk.cause_of(error)}; name another file."
        ) from error


def read(path: Path, facts: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns what `write` wrote. Raises ConfigError if it belongs to something else, or is damaged."""
    remove = "name another file, or remove it and it is computed again"
    try:
        with safe_open(path, "pt") as file:
            held = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        theirs = json.loads(held["facts"]) if held.get("format") == FORMAT else {}
        is_whole = isinstance(theirs, dict) and bool(theirs) and held.get("digest") == _digest(found)
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError) as error:
        if not os.path.isfile(path):
            raise ConfigError(
                f"dpo.reference: {path} is not a file here; name one that all ranks see."
            ) from error
        is_whole, theirs = False, {}
    if not is_whole:
        raise ConfigError(f"dpo.reference: {path} is damaged, or no reference; {remove}.")
    for what in (*facts, *(name for name in theirs if name not in facts)):
        if theirs.get(what) != facts.get(what):
            raise ConfigError(
                f"dpo.reference: {path} is not of this run: {what} is {facts.get(what, 'not there')} here "
                f"and {theirs.get(what, 'not there')} in the file; {remove}."
            )
    if {name: tuple(each.shape) for name, each in found.items()} != {n: (c, 2) for n, c in sizes.items()}:
        raise ConfigError(f"dpo.reference: {path} is damaged: it holds other pairs than it says; {remove}.")
    return found


def _digest(found: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(found):
        digest.update(f"{name} {list(found[name].shape)} {found[name].dtype}".encode())
        digest.update(found[name].numpy().tobytes())
    return digest.hexdigest()


def _computed(
    run: ResolvedRun, corpus: Corpus, runtime: Runtime, evaluate: Callable[[Batch], Tensor]
) -> dict[str, Tensor]:
    """Returns the log-probabilities on every rank, 0 for pairs that no sample has."""
    rows, dp, pairs = run.config.train.micro_batch_size, runtime.sizes.dp, corpus.pairs
    found = {name: torch.zeros(each.pairs, 2, dtype=torch.float64) for name, each in pairs.items()}
    work = [
        (name, range(first, min(first + rows, len(each))))
        for name, each in pairs.items()
        for first in range(0, len(each), rows)
    ]
    for first in range(0, len(work), dp):
        # Every rank makes the same number of forward passes, since they may gather weights.
        number = first + runtime.coordinate.dp
        name, samples = work[min(number, len(work) - 1)]
        values = evaluate(batch_of_pairs(pairs[name], samples)).cpu()
        if number < len(work):
            members = torch.cat([torch.from_numpy(pairs[name].members(sample)) for sample in samples])
            found[name][members] = values
    return {name: _of_all(each.flatten(), runtime).view(-1, 2) for name, each in found.items()}


def _of_all(mine: Tensor, runtime: Runtime) -> Tensor:
    """Returns the numbers of the ranks that have them, 0 on all others of other sequences and stages."""
    parts = [
        runtime.by_axes(ops.all_gather_stats(block, comm.group_name(runtime.world)))
        for block in mine.split(BLOCK)
    ]
    return torch.cat([part[:, :, 0, 0].sum((0, 1)) for part in parts])
