"""torchtitan's debug Llama, tensor parallel over CPU ranks: by its own DTensor path, and by ours in two ways.

    torchrun --nproc-per-node 2 examples/torchtitan/train.py [--steps 20] [--only NAME ..]

Every way starts from the same weights, sees the same text (Python's standard library, byte by byte) and
runs torchtitan's Trainer. Printed: losses, and tokens a second of the steps after the first three. Ends
with code 1 where a loss curve is not that of the first way. README.md beside this file tells the rest.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

# torchtitan looks for an accelerator once, when it is imported, and takes "cuda" where it finds none.
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.llama3 import Transformer, get_train_spec, llama3_args  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.tools.utils import NoColor  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

import pyruntime  # noqa: E402

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
WARM = 3
TOLERANCE = 2e-3


class Text(BaseDataLoader):
    """Batches of one text: ({"input": ids [B, S]}, the ids after them [B, S]), ids being its bytes."""

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
    """What the Trainer tells its metrics; torchtitan's own asks the device for its memory, which a CPU's
    module of torch does not tell."""

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
    config.compile.enable, config.compile.components = way in ("dtensor-compiled", "symm-mem"), ["model"]
    config.parallelism.enable_async_tensor_parallel = way == "symm-mem"
    config.comm.trace_buf_size = 0
    return config


def load(model: torch.nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """The same weights into every way's shards."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(whole)


def run(
    way: str, args: argparse.Namespace, whole: dict[str, torch.Tensor]
) -> tuple[list[float], float, float]:
    """Losses, tokens a second, and how many of our ops a step begins on this rank."""
    torch._dynamo.reset()
    if way == "symm-mem":
        importlib.import_module("pyruntime.symm_mem")
    spec = replace(
        get_train_spec(),
        model_args={"debugmodel": replace(llama3_args["debugmodel"])},
        build_dataloader_fn=Text,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=Losses,
        state_dict_adapter=None,
    )
    if way == "parallelize":
        spec.parallelize_fn = parallelize
    register_train_spec(way, spec)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(configured(way, args, folder))
        load(trainer.model_parts[0], whole)
        if trainer.job_config.compile.enable:
            # Under torch 2.13 the gradient of a collective whose result a compiled block waits for comes back
            # as no DTensor; so it is waited for before the first block.
            trainer.model_parts[0].tok_embeddings.register_forward_hook(lambda _, __, out: out.clone())
        group = trainer.parallel_dims.get_mesh("tp")
        batches = trainer.batch_generator(trainer.dataloader)
        seconds, ops = [], 0
        for step in range(args.steps):
            trainer.step += 1
            if step == WARM:
                ops = pyruntime.comm.stats(group).ops
            dist.barrier()
            began = time.perf_counter()
            trainer.train_step(batches)
            seconds.append(time.perf_counter() - began)
        ops = pyruntime.comm.stats(group).ops - ops
        trainer.close()
    torch._inductor.config._micro_pipeline_tp = False
    tokens = args.batch * args.seq / statistics.median(seconds[WARM:])
    return trainer.metrics_processor.losses, tokens, ops / (args.steps - WARM)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step; default 2")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence; default 512")
    parser.add_argument(
        "--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME", help=", ".join(WAYS)
    )
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(f"--steps {args.steps}: the first {WARM} are not timed; ask for more.")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole_model = Transformer(replace(llama3_args["debugmodel"], max_seq_len=args.seq))
    with torch.no_grad():
        whole_model.init_weights()
    whole = whole_model.state_dict()
    first: list[float] = []
    status = 0
    for way in args.only:
        losses, tokens, ops = run(way, args, whole)
        first = first or losses
        apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        status |= apart > TOLERANCE
        if dist.get_rank() == 0:
            shown = " ".join(f"{loss:.4f}" for loss in (*losses[:3], *losses[-2:]))
            print(
                f"{way:18}{tokens:8.0f} tokens/s {ops:5.0f} ops a step   losses {shown}   apart {apart:.1e}",
                flush=True,
            )
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
