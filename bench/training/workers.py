"""The processes that bench/training measures: each trains one variant in its turn."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.common.plain_llama import PlainLlama, PlainStep, Shape, shard_with_dtensor

if TYPE_CHECKING:
    from pyruntime.llama import LlamaConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LEAD_S = 0.005  # from sending the orders of a turn to its start
LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP = 1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
SEED = 0

# Above these sizes glibc returns freed tensors to the system, and must then fault them in page by page.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


@dataclass(frozen=True)
class Variant:
    """A way to train a model: by `ranks` processes, with `environment` set before they start."""

    name: str
    ours: bool
    ranks: int
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """The orders that one process gets when it starts."""

    variant: Variant
    shape: Shape
    dtype: str
    rank: int
    store: str
    """File through which the ranks of a variant find each other."""


@dataclass(frozen=True)
class Turn:
    """A process's report of its turn; moments are of `time.perf_counter`, one clock for all processes."""

    start: float
    end: float
    cpu_s: float
    """User and system time of the process, all threads."""
    loss: float
    """Loss of the last step, in nats per token."""


class Team:
    """The processes of one variant."""

    def __init__(self, variant: Variant, shape: Shape, dtype: str, folder: Path) -> None:
        self.variant = variant
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        context = multiprocessing.get_context("spawn")
        store = str(folder / variant.name.replace(" ", "_"))
        for rank in range(variant.ranks):
            ours, theirs = context.Pipe()
            job = Job(variant, shape, dtype, rank, store)
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            with environment({"OMP_NUM_THREADS": "1", **variant.environment}):
                process.start()
            theirs.close()
            self._members.append((process, ours))

    def order(self, steps: int, start: float) -> None:
        """Tells all processes to train `steps` steps, beginning at the moment `start`."""
        for _, connection in self._members:
            connection.send((steps, start))

    def turns(self, timeout_s: float) -> list[Turn]:
        """Returns the processes' reports, in rank order.

        Raises RuntimeError with a process's traceback, or if one has died or does not answer in time.
        """
        reports: dict[int, Turn] = {}
        deadline = time.monotonic() + timeout_s
        connections = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        while len(reports) < len(connections):
            waiting = [connection for connection, rank in connections.items() if rank not in reports]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{self.variant.name}: no answer within {timeout_s:.0f} s.")
            for connection in ready:
                rank = connections[connection]
                try:
                    answer = connection.recv()
                except EOFError:
                    raise RuntimeError(f"{self.variant.name}: the process of rank {rank} died.") from None
                if isinstance(answer, str):
                    raise RuntimeError(f"{self.variant.name}, rank {rank}:\n{answer}")
                reports[rank] = answer
        return [reports[rank] for rank in range(len(connections))]

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.terminate()
        for process, _ in self._members:
            process.join()


@contextmanager
def environment(extra: dict[str, str]) -> Iterator[None]:
    """Sets variables for the processes started inside: malloc reads its variables when a process starts."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _work(orders: Connection, job: Job) -> None:
    """Runs a process: builds its model, then trains on order until the pipe closes."""
    with ExitStack() as stack:
        try:
            torch.set_num_threads(1)
            step = _our_step(job, stack) if job.variant.ours else _plain_step(job, stack)
            ids, labels = _tokens(job.shape)
            while True:
                steps, start = orders.recv()
                time.sleep(max(0.0, start - time.perf_counter()))
                started, cpu = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    loss = step(ids, labels)
                orders.send(Turn(started, time.perf_counter(), time.process_time() - cpu, loss))
        except EOFError:
            pass  # the parent has closed the pipe: there are no more turns
        except Exception:  # sent to the parent, which ends the benchmark with it
            orders.send(traceback.format_exc())


def _tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns random ids and labels [micro-batches, B, S], the same in every process."""
    draw = torch.Generator().manual_seed(SEED)
    size = (shape.accumulate, shape.micro_batch, shape.seq)
    return tuple(torch.randint(shape.vocab, size, generator=draw) for _ in range(2))


def _mesh(job: Job) -> DeviceMesh:
    store = dist.FileStore(job.store, job.variant.ranks)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.variant.ranks)
    return init_device_mesh("cpu", (job.variant.ranks,), mesh_dim_names=("tp",))


def _plain_step(job: Job, stack: ExitStack) -> Callable[[Tensor, Tensor], float]:
    model = PlainLlama(job.shape, DTYPES[job.dtype], SEED)
    loss_context: Callable[[], AbstractContextManager] = nullcontext
    if job.variant.ranks > 1:
        mesh = _mesh(job)
        stack.callback(dist.destroy_process_group)
        loss_context = shard_with_dtensor(model, mesh)
    settings = {"lr": LEARNING_RATE, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return PlainStep(model, settings, clip=CLIP, loss_context=loss_context)


def _our_step(job: Job, stack: ExitStack) -> Callable[[Tensor, Tensor], float]:
    import pyruntime

    pyruntime.keep_freed_memory()
    mesh = _mesh(job)
    stack.callback(dist.destroy_process_group)
    return OurStep(job.shape, DTYPES[job.dtype], stack.enter_context(pyruntime.Runtime(mesh)).tp.mesh)


def llama_config(shape: Shape) -> LlamaConfig:
    """Returns the configuration of pyruntime's Llama of that shape."""
    from pyruntime.llama import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq,
    )


def our_model(shape: Shape, dtype: torch.dtype, group: DeviceMesh, **options: Any) -> nn.Module:
    """Returns pyruntime's Llama of that shape with the plain model's weights; `options` go to Llama."""
    from pyruntime.llama import Llama

    model = Llama(llama_config(shape), group, dtype=dtype, seed=None, **options)
    model.load_state_dict(our_names(PlainLlama(shape, dtype, SEED).state_dict()))
    return model


class OurStep:
    """A step of our Llama as in its trainer, from the plain model's weights; `options` go to Llama."""

    def __init__(self, shape: Shape, dtype: torch.dtype, group: DeviceMesh, **options: Any) -> None:
        from pyruntime import shard
        from pyruntime.nn.parameters import TensorGroup

        self.model = our_model(shape, dtype, group, **options)
        self.group = TensorGroup.of(group)
        self.optimizer = shard(self.model, None).adamw(
            lr=LEARNING_RATE,
            betas=(BETA1, BETA2),
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            max_norm=CLIP,
        )

    def __call__(self, ids: Tensor, labels: Tensor) -> float:
        from pyruntime.ops import all_gather_stats

        share = torch.tensor(1.0 / len(ids))
        total = torch.zeros(())
        for micro_ids, micro_labels in zip(ids, labels, strict=True):
            loss = self.model(micro_ids, micro_labels)
            loss.backward(share)
            total += loss.detach() * share
        squares = all_gather_stats(self.optimizer.squared_norm(), self.group.name)
        self.optimizer.step(math.sqrt(math.fsum(squares.tolist())))
        return float(total)


def our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the plain model's state dict under the names of pyruntime's Llama."""
    modules = {
        "blocks": "layers",
        "embedding": "embed",
        "attention.q": "qkv.q",
        "attention.k": "qkv.k",
        "attention.v": "qkv.v",
        "attention.o": "out",
        "ffn_norm": "mlp_norm",
        "ffn.gate": "gate_up.gate",
        "ffn.up": "gate_up.up",
        "ffn.down": "down",
    }
    return renamed(state, {f"{theirs}.": f"{ours}." for theirs, ours in modules.items()})


def renamed(state: dict[str, Tensor], parts: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the state dict with each of these parts of a name replaced, in order."""
    found = {}
    for name, tensor in state.items():
        for theirs, new in parts.items():
            name = name.replace(theirs, new)
        found[name] = tensor
    return found
