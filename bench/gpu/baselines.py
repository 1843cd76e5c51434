"""Part "baselines" of bench/gpu: cuBLAS and NCCL called through cupy (extra `tiles`), to see what torch adds.

Without cupy, or without a second GPU, it writes a note.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from bench.common.measuring import Sample
from bench.gpu import problem
from bench.gpu.problem import TOLERANCE, Emit
from bench.gpu.ranks import Stopwatch, error_of, stream

BF16_OF_CUDA = 14  # cudaDataType CUDA_R_16BF
BF16_OF_NCCL = 9  # ncclDataType_t ncclBfloat16
FP32_COMPUTE = 68  # cublasComputeType CUBLAS_COMPUTE_32F
DEFAULT_GEMM = -1  # cublasGemmAlgo CUBLAS_GEMM_DEFAULT
BYTES = (2**20, 2**24, 2**28)
"""Bytes that a collective gathers or reduces, over all GPUs."""


def baselines(emit: Emit, quick: bool) -> None:
    try:
        import cupy
    except ImportError as error:
        absent(
            emit, f"no cupy ({error}), so neither raw cuBLAS nor raw NCCL; it comes with the extra `tiles`."
        )
        return
    for shape in problem.llama_shapes((4096,) if quick else (512, 4096, 16384)):
        emit(timed_gemm(cupy, shape, 5 if quick else 15))
    gpus = torch.cuda.device_count()
    if gpus < 2:
        absent(emit, "one GPU, so no raw NCCL.")
        return
    for collective in collectives(cupy, list(range(gpus)), BYTES[:2] if quick else BYTES):
        emit(collective)


def absent(emit: Emit, why: str) -> None:
    emit({"kind": "note", "text": f"baselines: {why}"})


def timed_gemm(cupy: Any, shape: problem.Shape, rounds: int) -> dict[str, Any]:
    """Times torch.matmul and cublasGemmEx, [m, k] x [n, k]^T in bf16 with sums in fp32."""
    m, n, k = shape.m, shape.n, shape.k
    x, weight = (torch.randn(size, k, dtype=torch.bfloat16, device="cuda") for size in (m, n))
    theirs, raw = (torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    run = gemm(cupy, x, weight, raw)
    torch.matmul(x, weight.t(), out=theirs)
    run()
    error = error_of(raw, theirs)
    samples = Stopwatch(0.0003).interleave(
        {"torch.matmul": lambda: torch.matmul(x, weight.t(), out=theirs), "cuBLAS": run}, rounds
    )
    return {
        "kind": "baseline",
        "name": str(shape.name),
        "m": m,
        "n": n,
        "k": k,
        **figures(samples),
        "error": error,
        "wrong": [] if error < TOLERANCE else ["cuBLAS"],
    }


def gemm(cupy: Any, x: Tensor, weight: Tensor, out: Tensor) -> Callable[[], None]:
    """Returns a call of cublasGemmEx for out [m, n] = x [m, k] @ weight [n, k]^T. cuBLAS is column-major and
    computes out^T = weight x^T."""
    cublas, (m, k), n = cupy.cuda.cublas, x.shape, weight.shape[0]
    handle = cupy.cuda.device.get_cublas_handle()
    one, zero = numpy.array(1, numpy.float32), numpy.array(0, numpy.float32)

    def run() -> None:
        # Before each call cupy sets the current stream on the handle.
        with cupy.cuda.ExternalStream(stream() or 0):
            cublas.gemmEx(
                handle,
                cublas.CUBLAS_OP_T,
                cublas.CUBLAS_OP_N,
                *(n, m, k, one.ctypes.data),
                *(weight.data_ptr(), BF16_OF_CUDA, k),
                *(x.data_ptr(), BF16_OF_CUDA, k, zero.ctypes.data),
                *(out.data_ptr(), BF16_OF_CUDA, n),
                *(FP32_COMPUTE, DEFAULT_GEMM),
            )

    return run


def collectives(cupy: Any, devices: list[int], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Times NCCL's all-gather and reduce-scatter over all GPUs of this host, from one process."""
    nccl, count = cupy.cuda.nccl, len(devices)
    communicators = nccl.NcclCommunicator.initAll(devices)
    streams = [torch.cuda.Stream(device) for device in devices]
    found = []
    for size in sizes:
        shard = size // 2 // count
        parts, wholes = (
            [torch.randn(length, device=f"cuda:{device}").bfloat16() for device in devices]
            for length in (shard, shard * count)
        )

        def each(call: Callable[[int], None]) -> None:
            nccl.groupStart()
            for at in range(count):
                call(at)
            nccl.groupEnd()

        def gather(at: int, parts=parts, wholes=wholes, shard=shard) -> None:
            pointers = parts[at].data_ptr(), wholes[at].data_ptr()
            communicators[at].allGather(*pointers, shard, BF16_OF_NCCL, streams[at].cuda_stream)

        def scatter(at: int, parts=parts, wholes=wholes, shard=shard) -> None:
            pointers = wholes[at].data_ptr(), parts[at].data_ptr()
            communicators[at].reduceScatter(
                *pointers, shard, BF16_OF_NCCL, nccl.NCCL_SUM, streams[at].cuda_stream
            )

        for name, call in (("all-gather", gather), ("reduce-scatter", scatter)):
            seconds = timed(lambda call=call: each(call), streams)
            moved = size * (count - 1) / count
            found.append(
                {
                    "kind": "baseline",
                    "name": f"NCCL {name}, {count} GPUs, {size / 1e6:.0f} MB",
                    "seconds": {"NCCL": seconds},
                    "gb_per_second": moved / seconds / 1e9,
                }
            )
    return found


def timed(run: Callable[[], None], streams: list[torch.cuda.Stream], rounds: int = 15) -> float:
    """Returns the median over rounds of the slowest GPU's seconds."""
    rows = []
    for _ in range(rounds + 3):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
        for one in streams:
            torch.cuda.synchronize(one.device)
        for one, (begin, _) in zip(streams, events, strict=True):
            begin.record(one)
        run()
        for one, (_, end) in zip(streams, events, strict=True):
            end.record(one)
        for one in streams:
            torch.cuda.synchronize(one.device)
        rows.append(max(begin.elapsed_time(end) for begin, end in events) / 1e3)
    return Sample(tuple(rows[3:])).median


def figures(samples: dict[str, Sample]) -> dict[str, Any]:
    base = samples["torch.matmul"]
    return {
        "seconds": {name: sample.median for name, sample in samples.items()},
        "spread": {name: sample.spread for name, sample in samples.items()},
        "ratio": {name: base.over(sample).median for name, sample in samples.items() if sample is not base},
    }
