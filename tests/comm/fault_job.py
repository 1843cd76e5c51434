"""What the ranks of test_netlab_faults.py run: ops without end, until one fails. Prints what it raised, how
long the failing op took and how long the slowest one before it."""

import sys
import time
from pathlib import Path

import torch

import pyruntime
from pyruntime import ops


def main(deadline_s: float, seconds: float, ready: Path) -> int:
    """Rank 0 makes the file `ready` when the ops go round, and all end `seconds` later."""
    end = float("inf")
    slowest, at_work = 0.0, False
    with pyruntime.Runtime.start(deadline_s=deadline_s) as runtime:
        torch.distributed.barrier()
        rank, size = runtime.rank, runtime.tp_size
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(-2, 3, (64, 32), generator=generator).float()
        weight = torch.randint(-2, 3, (16, 32), generator=generator).float()
        start = time.monotonic()
        try:
            # Rank 0 says in what it sends when it is time to end: all end after the same op.
            while True:
                start = time.monotonic()
                shard = x.tensor_split(size)[rank].clone()
                if rank == 0:
                    shard[0, 0] = time.monotonic() > end
                y, gathered = ops.all_gather_matmul(
                    shard, weight, runtime.tp, rows=64, return_gathered=True, tier="chunked"
                )
                assert torch.equal(y[1:], x[1:] @ weight.T)
                if gathered[0, 0]:
                    break
                z = ops.matmul_reduce_scatter(x, weight, runtime.tp, tier="chunked")
                assert torch.equal(z, (size * (x @ weight.T)).tensor_split(size)[rank])
                if not at_work:  # the first ops set up what they need
                    at_work = True
                    if rank == 0:
                        end = time.monotonic() + seconds
                        ready.touch()
                else:
                    slowest = max(slowest, time.monotonic() - start)
                time.sleep(1e-3)
        except pyruntime.CommError as error:
            waited = time.monotonic() - start
            say(f"rank {rank}: {type(error).__name__} after {waited:.2f} s, before {slowest:.2f} s: {error}")
            return 1
        say(f"rank {rank}: done")
        return 0


def say(line: str) -> None:
    """In one write, newline and all, so that the lines of several ranks do not run into each other, also
    where PYTHONUNBUFFERED is set."""
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])))
