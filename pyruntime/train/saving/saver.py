"""Saves the checkpoints of a run while training continues.

begin(), between two steps and on every rank, copies this rank's blocks into host memory that is reused (with
optimizer states in a file there is no room for a copy, so the run waits until they are written). Which
rank writes which block is settled once (`blocks`). A thread of each rank then hashes its copy and writes it,
and the threads exchange the outcome through the job's store. Once all files are on the disk, rank 0's thread
writes the manifest and renames the folder. So a step pays for the copy, and waits for a write only if the
next checkpoint is due before it ends.

Every rank learns of a failure in the same words: by `has_failed`, or in finish().
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from pyruntime.comm import CommError, post_failure
from pyruntime.comm.exchange import Exchange
from pyruntime.data_parallel import Sharded
from pyruntime.overlap import EntryKind
from pyruntime.overlap.record import entered
from pyruntime.replicas.sharded_outer import ShardedOuter
from pyruntime.train import manifest
from pyruntime.train.checkpoint import state_of, state_of_all
from pyruntime.train.checkpoint_folder import (
    FACTS_FILE,
    FOLDER,
    PARTIAL,
    CheckpointFacts,
    left_over,
    name_of,
    newest,
    to_json,
)
from pyruntime.train.config import Checkpoint
from pyruntime.train.disk import REMOVED, cannot_write, cause_of, publish_folder, remove_folder, remove_tree
from pyruntime.train.errors import TrainingError
from pyruntime.train.manifest import Checksum
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.saving import blocks
from pyruntime.train.saving.staging import SUFFIX, Staging, Unstaged

DISK_MAY_TAKE_S = 600.0
"""Seconds without progress of a write, after which the disk counts as lost. Writes are flushed every
FLUSH_EVERY bytes."""


class Saver:
    """Saves checkpoints of the run in `run_dir`, whose ranks are `group`. A context manager, which waits for
    the last write when it ends. keep: which checkpoints stay."""

    def __init__(
        self,
        run_dir: Path,
        sharded: Sharded,
        group: dist.ProcessGroup,
        keep: Checkpoint,
        outer: ShardedOuter | None = None,
    ):
        self._run_dir, self._sharded, self._group, self._keep = run_dir, sharded, group, keep
        self._outer = outer
        self._planner = DefaultSavePlanner()
        self._files: list[list[WriteItem]] = []
        """This rank's blocks, by file."""
        self._staging: list[Staging] = []
        """Each file has one."""
        self._write: Write | None = None
        self._newest: Path | None = None
        self._took: tuple[int, float] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.finish()
            return
        with contextlib.suppress(Exception):  # the error that ends the run comes first
            self.finish()

    def begin(self, facts: CheckpointFacts) -> None:
        """Waits for the previous write, copies the checkpoint of `facts.step` and starts to write it. Every
        rank calls it. Once it is complete, later checkpoints (of an abandoned branch) and those not to be
        kept are removed.

        Raises TrainingError if the previous one could not be written, or this one not started; CommTimeout
        and PeerLost if a rank stops or ends meanwhile. Older checkpoints stay then.
        """
        self.finish()
        began, final = time.monotonic(), self._run_dir / FOLDER / name_of(facts.step)
        doing = f"Writing the checkpoint {final}"
        try:
            staging = self._staged(final, doing)
            self._write = Write(self._run_dir, facts, self._keep, staging, self._group, doing, began)
        except CommError:
            raise
        except Exception as error:
            raise TrainingError(_refusal(self._run_dir, final, cause_of(error))) from error
        if isinstance(staging[0], Unstaged):  # the next step would change what is being written
            self.finish()

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the current write has failed; finish() raises the reason."""
        return self._write is not None and self._write.has_failed

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run, as far as this rank knows; None if it has saved
        none."""
        if self._write is not None and self._write.is_there:
            return self._write.final
        return self._newest

    @property
    def took(self) -> tuple[int, float] | None:
        """Step of the newest checkpoint that this run has saved, and the seconds from its copy until all
        ranks had it on disk; None if it has saved none."""
        if self._write is not None and self._write.is_there:
            return self._write.took
        return self._took

    def finish(self) -> None:
        """Waits for the current write. Every rank calls it. Raises as `begin` does."""
        write, self._write = self._write, None
        if write is None:
            return
        begin = time.monotonic()
        write.wait()
        entered(EntryKind.WAIT, "checkpoint", "write", begin)
        self._newest, self._took = write.final, write.took

    def _staged(self, final: Path, doing: str) -> list[Staging]:
        """Copies this rank's blocks into the staging memory."""
        if self._outer is None:
            state = state_of(self._sharded)
        else:
            state = state_of_all(self._sharded, self._outer, self._outer.state_dict())
            state["model"] = self._outer.weights()
        # A new compression plan changes the sizes of the residuals.
        if not self._staging or self._sharded.compressor is not None:
            self._settle(state, final, doing)
        begin = time.monotonic()
        self._planner.set_up_planner(state)
        for staging, items in zip(self._staging, self._files, strict=True):
            staging.copy({item.index.fqn: self._planner.resolve_data(item) for item in items})
        entered(EntryKind.COPY, "checkpoint", "copy", begin)
        return self._staging

    def _settle(self, state: dict, final: Path, doing: str) -> None:
        """Settles which rank writes which block, after removing unfinished checkpoints."""

        def clear() -> None:
            for left in final.parent.glob(f"*{PARTIAL}"):
                if left.name.endswith(REMOVED):
                    remove_folder(left)
                else:
                    remove_tree(left)
            final.parent.mkdir(parents=True, exist_ok=True)

        on_rank_0(self._group, doing, clear)
        found = blocks.held(state, self._planner, self._group.rank())
        self._files = blocks.in_files(blocks.settle(found, self._group, doing))
        pieces = [[blocks.piece_of(item) for item in items] for items in self._files]
        if [each.pieces for each in self._staging] != list(map(Staging.order, pieces)):
            assert self._sharded.optimizer is not None
            home, device = self._sharded.optimizer.home, self._sharded.buckets[0].device
            self._staging = [
                Unstaged(each, home.release) if home.is_in_file else Staging(each, device) for each in pieces
            ]


class Write:
    """One checkpoint that a thread of every rank writes, from `staging`."""

    def __init__(
        self,
        run_dir: Path,
        facts: CheckpointFacts,
        keep: Checkpoint,
        staging: Sequence[Staging],
        group: dist.ProcessGroup,
        doing: str,
        began: float,
    ):
        self.final = run_dir / FOLDER / name_of(facts.step)
        self._step, self._began, self._ended = facts.step, began, began
        self._partial = self.final.with_name(self.final.name + PARTIAL)
        self._run_dir, self._keep, self._staging, self._group = run_dir, keep, staging, group
        self._facts = dataclasses.replace(facts, saved_at=time.time())
        # Made here, not in the thread: all ranks must number their exchanges in the same order.
        self._exchange = Exchange(group, doing) if group.size() > 1 else None
        self._refusal = ""
        self._failure: BaseException | None = None
        self._is_at_disk = True
        """Whether the thread waits for this rank's disk, not for other ranks."""
        self._published = 0
        """Files, renames and removals that the disk has taken since all blocks were written."""
        self._sent: tuple[float, float, int] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="pyr-checkpoint")
        self._thread.start()

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint is complete."""
        return not self._thread.is_alive() and not self._refusal and self._failure is None

    @property
    def took(self) -> tuple[int, float]:
        return self._step, self._ended - self._began

    @property
    def has_failed(self) -> bool:
        return bool(self._refusal) or self._failure is not None

    def wait(self) -> None:
        """Waits until all ranks are done. Raises TrainingError if it failed, or if this rank's disk took
        nothing for DISK_MAY_TAKE_S; CommTimeout and PeerLost."""
        seen, since = (-1, -1), time.monotonic()
        while self._thread.is_alive():
            self._thread.join(1.0)
            now = time.monotonic()
            taken = sum(each.written for each in self._staging), self._published
            if not self._is_at_disk or taken != seen:  # the exchange has its own deadline
                seen, since = taken, now
            elif now - since > DISK_MAY_TAKE_S:
                refusal = _refusal(
                    self._run_dir, self.final, f"the disk has taken nothing for {DISK_MAY_TAKE_S:.0f} s"
                )
                post_failure(refusal)
                raise TrainingError(refusal)
        if self._sent is not None:  # entered by this thread, whose ledger it belongs to
            began, ended, size = self._sent
            entered(EntryKind.SENT, "checkpoint", "save", began, size, end=ended)
        if self._failure is not None:
            raise self._failure
        if self._refusal:
            raise TrainingError(self._refusal)

    def _run(self) -> None:
        try:
            sums, problem = self._write_own()
            self._is_at_disk = False
            self._refusal = self._settle(sums, problem)
            self._ended = time.monotonic()
        except BaseException as error:  # a lost peer, or a defect: wait() raises it
            self._failure = error

    def _write_own(self) -> tuple[dict[str, Checksum], str]:
        """Writes this rank's files. Returns their checksums, or the reason why there are none."""
        found: dict[str, Checksum] = {}
        begin = time.monotonic()
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            if self._partial.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, f"{self._partial} is a link that leads elsewhere")
            for number, staging in enumerate(self._staging):
                name = f"rank-{self._group.rank():05}{f'-{number}' if number else ''}{SUFFIX}"
                found[name] = staging.write(self._partial / name)
        except Exception as error:
            return {}, cause_of(error)
        self._sent = begin, time.monotonic(), sum(each.size for each in found.values())
        return found, ""

    def _settle(self, sums: dict[str, Checksum], problem: str) -> str:
        """Publishes the checkpoint. Returns the refusal that all ranks get; empty on success."""
        if self._exchange is not None and self._group.rank() > 0:
            self._exchange.tell((sums, problem))
            return self._exchange.hear(0, str, beside=True)
        for rank in range(1, self._group.size()):
            assert self._exchange is not None
            theirs, their_problem = self._exchange.hear(rank, tuple[dict[str, Checksum], str], beside=True)
            sums |= theirs
            problem = problem or their_problem
        if not problem:
            self._is_at_disk = True
            try:
                self._publish(sums)
            except Exception as error:
                problem = cause_of(error)
        refusal = ""
        if problem:
            # The partial folder is no checkpoint, and the disk may be full.
            shutil.rmtree(self._partial, ignore_errors=True)
            refusal = _refusal(self._run_dir, self.final, problem)
        self._is_at_disk = False
        if self._exchange is not None:
            self._exchange.tell(refusal)
        return refusal

    def _publish(self, sums: dict[str, Checksum]) -> None:
        facts = self._partial / FACTS_FILE
        facts.write_text(to_json(self._facts), encoding="utf-8")
        manifest.write(self._partial, sums | {FACTS_FILE: manifest.checksum(facts)})
        publish_folder(self._partial, self.final, self._count)
        for old in left_over(self.final.parent, self._facts.step, self._keep):
            if not (old / FACTS_FILE).is_file():
                logging.getLogger("pyruntime").warning(
                    f"{old} is damaged (it holds no {FACTS_FILE}) and belongs to an abandoned branch of the "
                    "run: it is removed."
                )
            remove_folder(old)
            self._count()

    def _count(self) -> None:
        self._published += 1


def _refusal(run_dir: Path, final: Path, cause: str) -> str:
    kept = newest(run_dir)
    so = f"go on with --checkpoint.resume {run_dir}, which holds {kept.name}" if kept else "nothing is saved"
    return "The checkpoint " + cannot_write(final, cause, so)
