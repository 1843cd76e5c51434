"""`python -m pyruntime doctor`: reports the build, the hardware and the tier of every operation.

It never fails because something is missing: each part says what it could not find out, and why.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pyruntime import machine
from pyruntime.choices import Dtype
from pyruntime.cli.arguments import check_at_least, parse
from pyruntime.cli.environment import started_rank, started_ranks
from pyruntime.machine import Rows
from pyruntime.train import validate
from pyruntime.train.errors import refusing

DESCRIPTION = """Prints what was built, the hardware and fabric, whether ranks can reach each other's memory,
and which tier each operation takes. For the tiers it uses the ranks of torchrun; without torchrun it starts
its own."""


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    only: Literal["all", "tiers"] = "all"
    """Part of the report to print."""
    ranks: int = 2
    """Ranks to start for the tiers if torchrun started none; 0: leave the tiers out."""
    rows: int = 2048
    """Rows (tokens) of the activation, over all ranks, for which tiers are shown."""
    hidden_size: int = 1024
    """Features of the residual stream for which tiers are shown."""
    intermediate_size: int = 2816
    """Features of the feed-forward network for which tiers are shown."""
    dtype: Dtype | Literal["fp16"] = "bf16"
    """Type of weights and activations for which tiers are shown."""
    timeout_s: float = 120.0
    """Longest time that the started ranks may take, in seconds."""


def main(argv: list[str]) -> None:
    options = parse(DoctorOptions, argv, "doctor", DESCRIPTION)
    check_at_least(options, 1, "rows", "hidden_size", "intermediate_size")
    check_at_least(options, 0, "ranks")
    validate.check_seconds("--timeout_s", options.timeout_s)
    below_torchrun = started_ranks() > 1
    if started_rank() == 0 and options.only == "all":
        show("Built", built)
        show("Tuning", tuning)
        show("Hardware", lambda: machine.processor() + machine.memory() + machine.accelerators())
        show("Fabric", lambda: backends() + machine.network())
        if not below_torchrun:
            show("Symmetric memory", lambda: [*symmetric_memory(), ("multicast (NVLS)", multicast())])
    if below_torchrun:
        show_tiers(options)
    elif options.ranks:
        start_tiers(options, argv)


def show(title: str, rows: Callable[[], Rows]) -> None:
    """Prints a part of the report, or the error that it ended with."""
    print(title)
    try:
        found = rows()
    except Exception as error:
        found = [("not found out", f"{type(error).__name__}: {error}")]
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"  {name:<{width}}  {value}")
    print(flush=True)


def built() -> Rows:
    import torch

    import pyruntime
    import pyruntime._C as core
    from pyruntime.ops import gemm_tables

    extension, asked = Path(core.__file__), os.environ.get("OMP_NUM_THREADS", "not set")
    return [
        ("pyruntime", f"{pyruntime.__version__} in {Path(pyruntime.__file__).parent}"),
        ("extension", f"{extension.name}, {compiler(extension)}"),
        (f"{'HIP' if torch.version.hip else 'CUDA'} kernels", kernels()),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, {torch_kind()}"),
        ("torch's CPU kernels", torch.backends.cpu.get_cpu_capability()),
        ("GEMM libraries", ", ".join(gemm_libraries())),
        ("GEMMs in bf16", gemm_tables.read().describe()),
        ("NVTX ranges", nvtx_ranges()),
        ("threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS={asked})"),
    ]


def kernels() -> str:
    """Says whether the kernels for this torch's kind of GPU were built, and why they are not used here."""
    import torch

    from pyruntime.cuda import architectures_in, library_path, why_not

    path, rocm = library_path(), bool(torch.version.hip)
    if path.exists():
        gpus = f" for {', '.join(architectures_in(path))}" if rocm else ""
        used = f"not used here: {reason}" if (reason := why_not()) else "used by ops on GPUs"
        return f"{path.name}{gpus}, {path.stat().st_size / 1e6:.0f} MB; {used}"
    name, target = ("hipcc", "hip") if rocm else ("nvcc", "cuda")
    if compiler := _compiler(name):
        return f"not built: `make {target}` builds them with {compiler}"
    return f"none (CPU-only build: {name} was not found)"


def _compiler(name: str) -> str | None:
    """Returns the path of nvcc or hipcc, searched where the build searches."""
    homes = {"nvcc": ("CUDA_HOME", "CUDA_PATH"), "hipcc": ("ROCM_HOME", "ROCM_PATH", "HIP_PATH")}[name]
    folders = [os.environ[home] for home in homes if os.environ.get(home)]
    usual = {"nvcc": "/usr/local/cuda", "hipcc": "/opt/rocm"}[name]
    places = [*(f"{folder}/bin" for folder in folders), os.environ.get("PATH", ""), f"{usual}/bin"]
    return shutil.which(name, path=os.pathsep.join(places))


def nvtx_ranges() -> str:
    """Says whether a profiler of NVIDIA receives our NVTX ranges."""
    from pyruntime.comm.ranges import nvtx_domain

    try:
        version = importlib.metadata.version("nvtx")
    except importlib.metadata.PackageNotFoundError:
        return "none: `pip install nvtx` gives them, for Nsight Systems"
    heard = "a tool listens" if nvtx_domain() else "no tool listens (`nsys profile ..` does)"
    return f"by nvtx {version}; {heard}"


def tuning() -> Rows:
    """Returns the tuning file, and where its choices were measured."""
    from pyruntime.tuning import cache
    from pyruntime.tuning.apply import dates

    path = cache.default_path()
    try:
        found = cache.read(path)
    except cache.CacheError as error:
        return [("file", f"not used: {error}")]
    if not found:
        return [("file", f"none in {path}: `torchrun .. -m pyruntime tune` makes it")]
    rows = [("file", str(path))]
    for place, choices in found.items():
        where = f"{place.device}, {place.transport}, {place.library}"
        if choices:
            rows.append((f"{place.world_size} ranks", f"{len(choices)} choices, {dates(choices)}: {where}"))
    return rows


def compiler(extension: Path) -> str:
    """Returns the compiler that a shared library names in its comment section."""
    names = re.findall(rb"(?:GCC: |clang version )[^\0\n]{1,80}", extension.read_bytes())
    found = sorted({name.decode(errors="replace") for name in names})
    return "compiled by " + ", ".join(found) if found else "compiler unknown"


def torch_kind() -> str:
    import torch

    if torch.version.cuda:
        return f"for CUDA {torch.version.cuda}"
    return f"for ROCm {torch.version.hip}" if torch.version.hip else "CPU only"


def gemm_libraries() -> list[str]:
    import torch

    backends = {
        "MKL": torch.backends.mkl.is_available(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "OpenBLAS or another BLAS": "BLAS_INFO=open" in torch.__config__.show(),
        "cuBLAS": bool(torch.version.cuda),
        "hipBLAS": bool(torch.version.hip),
    }
    return [name for name, there in backends.items() if there] or ["none that torch names"]


def backends() -> Rows:
    import torch.distributed as dist

    if not dist.is_available():
        return [("torch.distributed", "not built into this torch")]
    there = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    return [("torch.distributed", ", ".join(there) or "no backend")]


def symmetric_memory() -> Rows:
    """Tries torch's symmetric memory on CPU tensors, in a group of only this process."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    import pyruntime  # noqa: F401 - registers the allocator

    if dist.is_initialized():
        return [("CPU", "not tried: a process group exists already")]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = symm_mem.empty(1024, dtype=torch.float32, device="cpu")
        handle = symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)
        buffer = handle.get_buffer(0, (1024,), torch.float32)
        buffer.fill_(1.0)
        works = bool((tensor == 1.0).all())
        return [("CPU", "works" if works else "a write through get_buffer did not reach the tensor")]
    finally:
        dist.destroy_process_group()


def multicast() -> str:
    """Says how many GPUs here support one address for all ranks' memory (`comm.configure(multicast=...)`)."""
    import torch
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    from pyruntime.cuda import cards

    if not torch.version.cuda:
        return f"none: this torch is {torch_kind()}"
    count = cards.count()
    able = sum(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index) for index in range(count))
    if not able:
        return f"none of {count} GPUs"
    return f"{able} of {count} GPUs can; comm.configure(multicast=...) uses it"


def start_tiers(options: DoctorOptions, argv: list[str]) -> None:
    """Starts ranks that print which tier each operation takes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
    command += ["-m", "pyruntime", "doctor", *argv, "--only", "tiers"]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"Tiers\n  not found out  {error}")
        return
    if done.returncode == 0:
        print(done.stdout.strip())
        return
    lines = [line for line in done.stderr.splitlines() if line.startswith("pyruntime:")] or ["see below"]
    print(f"Tiers\n  not found out  the {options.ranks} ranks ended with {done.returncode}: {lines[0]}")


def show_tiers(options: DoctorOptions) -> None:
    """Runs one layer forward and backward on all ranks; rank 0 prints its `explain`."""
    import torch

    from pyruntime import explain
    from pyruntime.comm import Runtime, transport_of
    from pyruntime.llama import Llama, LlamaConfig

    with refusing():
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=started_ranks(),
            head_dim=64,
        )
        config.check_tp(started_ranks())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[options.dtype]
    with Runtime.start(tp=started_ranks(), device="cpu", deadline_s=options.timeout_s) as runtime:
        model = Llama(config, runtime.tp, dtype=dtype, tier="auto")
        ids = torch.randint(256, (1, options.rows), generator=torch.Generator().manual_seed(0))
        model(ids, labels=ids).backward()
        if started_rank() == 0:
            print(f"Tiers ({started_ranks()} ranks)")
            print(f"  chunks travel by {transport_of(runtime.tp)}")
            print("\n".join(f"  {line}" for line in str(explain(model)).splitlines()))
