"""The corpus on every rank: one process of a host reads and tokenizes, all map what it wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from pyruntime.train import corpus
from pyruntime.train.config import RunConfig
from pyruntime.train.corpus import Corpus, Tokenized
from pyruntime.train.errors import ConfigError
from pyruntime.train.first_rank import on_first_rank, patience
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

    text = on_first_rank(group, build, slow=True)
    mine = corpus.cache_folder(data) / text.folder.name
    _build_on_other_hosts(mine, group, lambda: corpus.build(data, tokenizer))
    return corpus.open_corpus(Tokenized(mine, text.files, text.skipped), data.val_fraction, seq_len)


def _build_on_other_hosts(wanted: Path, group: dist.ProcessGroup, build: Callable[[], Tokenized]) -> None:
    host = host_name()
    hosts = _gather((host, wanted.is_dir()), group)
    if all(there for _, there in hosts):
        return
    refusal = ""
    if not wanted.is_dir() and [name for name, _ in hosts].index(host) == group.rank():
        try:
            if build().folder.name != wanted.name:
                refusal = (
                    f"data.paths hold another text on host {os.uname().nodename} than on that of rank 0."
                )
        except ConfigError as error:
            refusal = f"on host {os.uname().nodename}: {error}"
    with patience(group):
        refusals = _gather(refusal, group)
    for each in filter(None, refusals):
        raise ConfigError(each)


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
