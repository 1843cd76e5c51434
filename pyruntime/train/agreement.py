"""Checks at the start that all ranks of a job train one model on one text.

Ranks compare configuration, shape and versions first; then digests of tokens and first weights as these are
opened. A difference ends all ranks with one sentence that names the key, the ranks and the values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pyruntime
from pyruntime.comm.exchange import Exchange
from pyruntime.llama.config import LlamaConfig
from pyruntime.text import LONGEST, short_repr
from pyruntime.train import manifest
from pyruntime.train.config import RunConfig
from pyruntime.train.errors import ConfigError

MAY_DIFFER = {
    "train.threads": "hosts may have other numbers of cores",
    "output.progress": "only rank 0 prints",
    "output.log_every": "only rank 0 prints",
}
"""Configuration keys that may differ between ranks, and why. Paths must be alike: a run uses rank 0's."""
MOST_NAMED = 3
Facts = Mapping[str, str]
"""Values that ranks compare, by key, as text: equal if the values are."""


def of_config(config: RunConfig) -> dict[str, str]:
    """Returns the facts of a rank's configuration and of the versions it runs."""
    found = {"pyruntime": pyruntime.__version__, "torch": str(torch.__version__)}
    found |= _digests_of_code()
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(values := getattr(config, section.name)):
            key = f"{section.name}.{field.name}"
            if key not in MAY_DIFFER:
                found[key] = _words(getattr(values, field.name))
    return found


def _digests_of_code() -> dict[str, str]:
    """Digests of the Python files of each folder, since commits of one version may differ. Compiled code is
    left out: each host may build its own."""
    root = Path(pyruntime.__file__).parent
    digests: dict[Path, Any] = {}
    for path in sorted(root.rglob("*.py")):
        if path.is_file() and not path.name.startswith("."):  # as editors leave them
            digest = digests.setdefault(path.parent.relative_to(root), hashlib.sha256())
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return {f"Python files in {'pyruntime' / name}": each.hexdigest()[:16] for name, each in digests.items()}


def of_shape(shape: LlamaConfig, fingerprint: bytes) -> dict[str, str]:
    """Returns the facts of the model that a rank would make, and of its tokenizer."""
    sizes = {f"the model's {key}": _words(value) for key, value in dataclasses.asdict(shape).items()}
    return sizes | {"the tokenizer's fingerprint": fingerprint.hex()}


def check(group: dist.ProcessGroup, doing: str, mine: Facts) -> None:
    """Raises ConfigError on every rank of `group` if a key has different values on different ranks, and
    CommTimeout or PeerLost if a rank stops or ends. A rank need not have all keys."""
    if group.size() == 1:
        return
    exchange = Exchange(group, doing)
    if group.rank() > 0:
        exchange.tell((os.uname().nodename, dict(mine)))
        refusal = exchange.hear(0, str)
    else:
        kind = tuple[str, dict[str, str]]
        others = [exchange.hear(rank, kind) for rank in range(1, group.size())]
        hosts, facts = zip((os.uname().nodename, mine), *others, strict=True)
        refusal = difference(facts, hosts)
        exchange.tell(refusal)
    if refusal:
        raise ConfigError(refusal)


def difference(facts: Sequence[Facts], hosts: Sequence[str]) -> str:
    """Returns a sentence about the keys whose values differ between ranks; empty if none do."""
    differing = []
    for key in dict.fromkeys(key for each in facts for key in each):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            if key in each:
                by_value.setdefault(each[key], []).append(rank)
        if len(by_value) > 1:
            values = (f"{_short(value)} on {_places(ranks, hosts)}" for value, ranks in by_value.items())
            differing.append(f"{key} is {', '.join(values)}")
    if not differing:
        return ""
    named = "; ".join(differing[:MOST_NAMED])
    more = f"; {len(differing) - MOST_NAMED} more differ" if len(differing) > MOST_NAMED else ""
    return f"The ranks do not train one model: {named}{more}. Start all of them alike, from the same files."


def _words(value: object) -> str:
    try:
        return ascii(value)
    except ValueError:  # an int of more digits than Python prints
        return short_repr(value)


def _short(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}.."


def _places(ranks: list[int], hosts: Sequence[str]) -> str:
    """Formats `ranks` as in: ranks 0 to 3 and 6 (host a)."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    shown = words if len(words) <= 8 else [*words[:7], f"{len(words) - 7} more"]
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    on = sorted({hosts[rank] for rank in ranks})
    where = f"host {on[0]}" if len(on) == 1 else f"{len(on)} hosts, as {on[0]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {text} ({where})"


def check_files(group: dist.ProcessGroup, doing: str, what: str, files: Sequence[Path]) -> None:
    """Raises ConfigError on every rank if files of the same name have different content on some ranks.

    Ranks of one host that open the very same files (device, inode, size and time of change) share the
    reading. If all ranks do, nothing is read; else each host reads its files once (SHA-256). Raises OSError
    for a file that cannot be read.
    """
    if group.size() == 1:
        return
    stats = {path.name: path.stat() for path in files}
    same = [[each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns] for _, each in sorted(stats.items())]
    who = f"{os.uname().nodename} {_boot()} {same}"
    places = _told_by_all(group, doing, who)
    sizes = {name: each.st_size for name, each in stats.items()}
    mine = {
        f"{what}, its files": ", ".join(f"{name} of {size} bytes" for name, size in sorted(sizes.items()))
    }
    if len(set(places)) > 1:
        beside = [rank for rank, place in enumerate(places) if place == who]
        share = manifest.share(sizes, beside.index(group.rank()), len(beside))
        by_name = {path.name: path for path in files}
        mine |= {f"{what}, the SHA-256 of {name}": manifest.checksum(by_name[name]).sha256 for name in share}
    check(group, doing, mine)


def _told_by_all(group: dist.ProcessGroup, doing: str, value: str) -> list[str]:
    """Returns every rank's value on every rank, through rank 0, so that n ranks cost n reads."""
    exchange = Exchange(group, doing)
    if group.rank() > 0:
        exchange.tell(value)
        return exchange.hear(0, list[str])
    everyone = [value, *(exchange.hear(rank, str) for rank in range(1, group.size()))]
    exchange.tell(everyone)
    return everyone


def _boot() -> str:
    """Identifies this machine, since hosts may share a name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
