"""Trains torchtitan's debug Llama tensor parallel over CPU ranks: by its own DTensor path, and in two ways by
ours.

    torchrun --nproc-per-node 2 examples/torchtitan/train.py [--dim 256] [--layers 6] [--only NAME ..]

Every way starts from the same weights, sees the same text (Python's standard library, byte by byte) and runs
torchtitan's Trainer. The ways take steps in turns, in a new random order for every step, so that a slow
minute of the machine affects all ways. For the steps after the first three it prints the median of the
slowest rank's tokens a second, the speed relative to the first way (median and quartiles over steps), and
losses. It ends with code 1 if a loss curve differs from the first way's. README.md beside this file has the
rest.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist
from torch._dynamo import register_backend
from torch._inductor.compile_fx import compile_fx
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

# torchtitan looks for an accelerator once, at import, and assumes "cuda" if it finds none.
torch._utils._get_available_device_type = lambda: "cpu"

try:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import Transformer, get_train_spec, llama3_args
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.utils import NoColor
    from torchtitan.train import Trainer
except ModuleNotFoundError as error:
    name = str(error.name).partition(".")[0]
    sys.exit(f"{name} is not installed: run the two lines of pip in README.md beside this program first.")

import pyruntime  # noqa: E402
from pyruntime.comm.exchange import gather  # noqa: E402

WAYS = {
    "dtensor": "torchtitan's own path",
    "dtensor-compiled": "the same under torch.compile, its collectives gloo's",
    "symm-mem": "the same with async TP, which import pyruntime.symm_mem makes ours",
    "parallelize": "pyruntime.parallelize as the model's transform, not compiled",
}
PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention.w[qkv]": "column",
    "layers.*.attention.wo": "row",
    "layers.*.feed_forward.w[13]": "column",
    "layers.*.feed_forward.w2": "row",
    "output": "column_gather",
}
HEADS = 16
WARM = 3
TOLERANCE = 2e-3


class Text(BaseDataLoader):
    """Batches of one text: ({"input": ids [B, S]}, the next ids [B, S]); ids are bytes."""

    def __init__(self, job_config: JobConfig, **_: object) -> None:
        self.batch, self.seq_len = job_config.training.local_batch_size, job_config.training.seq_len
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        self.ids = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        draw = torch.Generator().manual_seed(0)
        while True:
            starts = torch.randint(len(self.ids) - self.seq_len - 1, (self.batch,), generator=draw)
            rows = torch.stack(
                [self.ids[start : start + self.seq_len + 1] for start in starts.tolist()]
            ).long()
            yield {"input": rows[:, :-1]}, rows[:, 1:]

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, _: dict[str, object]) -> None:
        pass


class Losses:
    """Metrics that record the Trainer's losses; torchtitan's own read the device's memory, which torch.cpu
    does not report."""

    def __init__(self, *_: object) -> None:
        stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats)
        self.color, self.ntokens_since_last_log, self.data_loading_times = NoColor(), 0, []
        self.losses: list[float] = []

    def should_log(self, _: int) -> bool:
        return True

    def log(self, _: int, loss: float, *__: object, **___: object) -> None:
        self.losses.append(loss)

    def close(self) -> None:
        pass


@register_backend(name="async-tp")
def async_tp(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
    """Compiles by inductor with torch's async TP. A separate backend, because a setting of inductor would
    apply to all ways: their blocks are the same code to torch.compile."""
    return compile_fx(graph, inputs, config_patches={"_micro_pipeline_tp": True})


BACKENDS = {"dtensor-compiled": "inductor", "symm-mem": "async-tp"}


def parallelize(model: torch.nn.Module, parallel_dims, _: JobConfig) -> torch.nn.Module:
    return pyruntime.parallelize(model, parallel_dims.get_mesh("tp"), PLAN)


def configured(way: str, args: argparse.Namespace, folder: str) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = way, "debugmodel"
    config.training.local_batch_size, config.training.seq_len = args.batch, args.seq
    config.training.steps, config.lr_scheduler.warmup_steps = args.steps, 2
    config.parallelism.tensor_parallel_degree = dist.get_world_size()
    config.activation_checkpoint.mode = "none"
    if way in BACKENDS:
        config.compile.enable, config.compile.components = True, ["model"]
        config.compile.backend = BACKENDS[way]
    config.comm.trace_buf_size = 0
    return config


def load(model: torch.nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Loads the same weights into every way's shards."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(whole)


@dataclass
class Way:
    """A Trainer, the seconds of its steps on this rank, and the number of our ops in a step."""

    trainer: Trainer
    batches: Iterator
    seconds: list[float] = field(default_factory=list)
    ops: int = 0

    def step(self) -> None:
        group = self.trainer.parallel_dims.get_mesh("tp")
        before = pyruntime.comm.stats(group).ops
        self.trainer.step += 1
        dist.barrier()
        began = time.perf_counter()
        self.trainer.train_step(self.batches)
        self.seconds.append(time.perf_counter() - began)
        self.ops = pyruntime.comm.stats(group).ops - before


def made(way: str, args: argparse.Namespace, whole: dict[str, torch.Tensor], folder: str) -> Way:
    spec = replace(
        get_train_spec(),
        model_args={"debugmodel": model_args(args)},
        build_dataloader_fn=Text,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Losses,
        state_dict_adapter=None,
    )
    if way == "parallelize":
        spec.parallelize_fn = parallelize
    register_train_spec(way, spec)
    trainer = Trainer(configured(way, args, folder))
    load(trainer.model_parts[0], whole)
    if way in BACKENDS:
        # Under torch 2.13, if a compiled block waits for a collective, that collective's gradient is no
        # DTensor; so the clone waits for it before the first block.
        trainer.model_parts[0].tok_embeddings.register_forward_hook(lambda _, __, out: out.clone())
    return Way(trainer, trainer.batch_generator(trainer.dataloader))


def model_args(args: argparse.Namespace):
    """Returns the debug model's arguments with the sizes of the command line."""
    return replace(
        llama3_args["debugmodel"], dim=args.dim, n_layers=args.layers, n_heads=HEADS, max_seq_len=args.seq
    )


def slowest(ways: dict[str, Way]) -> dict[str, list[float]]:
    """Returns the slowest rank's seconds, step by step, without the warm-up steps."""
    mine = [way.seconds[WARM:] for way in ways.values()]
    everyone = gather(dist.group.WORLD, "Gathering seconds", mine, list[list[float]])
    return {
        name: [max(steps) for steps in zip(*(each[i] for each in everyone), strict=True)]
        for i, name in enumerate(ways)
    }


def report(ways: dict[str, Way], tokens: int) -> int:
    """Prints a line for each way on rank 0. Returns 1 if a loss curve differs from the first way's."""
    seconds = slowest(ways)
    first = next(iter(ways))
    status = 0
    for name, way in ways.items():
        losses = way.trainer.metrics_processor.losses
        expected = ways[first].trainer.metrics_processor.losses
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        status |= apart > TOLERANCE
        ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        shown = " ".join(f"{loss:.4f}" for loss in (*losses[:3], *losses[-2:]))
        if dist.get_rank() == 0:
            print(
                f"{name:18}{tokens / statistics.median(seconds[name]):8.0f} tokens/s  "
                f"{middle:.2f} times {first} ({low:.2f} to {high:.2f}) {way.ops:5} ops a step   "
                f"losses {shown}   apart {apart:.1e}",
                flush=True,
            )
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step; default 2")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence; default 512")
    parser.add_argument("--dim", type=int, default=256, help="features; default 256")
    parser.add_argument("--layers", type=int, default=6, help="default 6")
    parser.add_argument(
        "--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME", help=", ".join(WAYS)
    )
    args = parser.parse_args()
    if args.steps < WARM + 2:
        parser.error(f"--steps {args.steps}: the first {WARM} are not timed; ask for {WARM + 2} or more.")
    if "RANK" not in os.environ:
        parser.error("no ranks were started: torchrun --nproc-per-node 2 examples/torchtitan/train.py")
    if HEADS % (ranks := int(os.environ["WORLD_SIZE"])):
        parser.error(f"{ranks} ranks do not divide the {HEADS} heads; start 1, 2, 4, 8 or 16.")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "symm-mem" in args.only:
        importlib.import_module("pyruntime.symm_mem")
    torch.manual_seed(0)
    whole_model = Transformer(model_args(args))
    with torch.no_grad():
        whole_model.init_weights()
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: made(name, args, whole_model.state_dict(), folder) for name in args.only}
        order = random.Random(0)  # the same on every rank
        for _ in range(args.steps):
            for name in order.sample(list(ways), len(ways)):
                ways[name].step()
        status = report(ways, args.batch * args.seq)
        for way in ways.values():
            way.trainer.close()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
