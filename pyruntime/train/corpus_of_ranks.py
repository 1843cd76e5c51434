"""The corpus on every rank: one process of a host reads and tokenizes, all map what it wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from pyruntime.comm import named_failures
from pyruntime.train import corpus
from pyruntime.train.config import RunConfig
from pyruntime.train.corpus import Corpus, Tokenized
from pyruntime.train.errors import ConfigError
from pyruntime.train.first_rank import on_every_rank, on_first_rank
from pyruntime.train.tokenizer import Tokenizer


def open_everywhere(
    config: RunConfig, tokenizer: Tokenizer, group: dist.ProcessGroup, say: Callable[[str], None]
) -> Corpus:
    """Every rank of `group` calls this. Rank 0 tokenizes where the cache has nothing; then so does the first
    rank of each host that does not see what rank 0 wrote, because the cache lies on a disk of its own. `say`
    prints a line on rank 0. Raises the same ConfigError on every rank."""
    data, seq_len = config.data, config.train.seq_len

    def build() -> Tokenized:
        text = corpus.build(data, tokenizer, say)
        corpus.open_corpus(text, data.val_fraction, seq_len)  # what is too short is refused by one rank
        return text

    doing = "Building the corpus"
    text = on_first_rank(group, doing, build)
    mine = corpus.cache_folder(data) / text.folder.name
    with named_failures(group, doing):
        hosts = _gather((host_name(), mine.is_dir()), group)
    # Containers may share a host's name and not its disks, so it is the first that does not see it.
    unseen = (rank for rank, (name, seen) in enumerate(hosts) if name == host_name() and not seen)
    first = next(unseen, -1)

    def build_here() -> None:
        if first == group.rank():
            _build_the_same(mine, lambda: corpus.build(data, tokenizer))

    on_every_rank(group, doing, build_here)
    here = Tokenized(mine, text.files, text.skipped)
    return on_every_rank(
        group, "Opening the corpus", lambda: corpus.open_corpus(here, data.val_fraction, seq_len)
    )


def _build_the_same(wanted: Path, build: Callable[[], Tokenized]) -> None:
    host = os.uname().nodename
    try:
        built = build()
    except ConfigError as error:
        raise ConfigError(f"on host {host}: {error}") from error
    if built.folder.name != wanted.name:
        raise ConfigError(f"data.paths hold another text on host {host} than on that of rank 0.")


def host_name() -> str:
    """The same for ranks whose files are the same: the name and the boot of their machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}"


def _gather(mine, group: dist.ProcessGroup) -> list:
    if group.size() == 1:
        return [mine]
    found = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found
