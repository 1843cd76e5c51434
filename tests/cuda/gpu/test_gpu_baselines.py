"""Raw cuBLAS and NCCL in bench/gpu: absent with a sentence, and operands as cuBLAS counts them."""

import contextlib
import ctypes
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch


@pytest.fixture
def baselines():
    from bench.gpu import baselines as gpu_baselines

    return gpu_baselines


def test_without_cupy_there_is_a_note(baselines, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    said: list[dict] = []
    baselines.baselines(said.append, True)
    assert [result["kind"] for result in said] == ["note"]
    assert said[0]["text"].startswith("baselines: no cupy (")


class Streams:
    """cupy's idea of the current stream."""

    def __init__(self) -> None:
        self.current = -1

    @contextlib.contextmanager
    def ExternalStream(self, pointer: int):
        self.current, before = pointer, self.current
        yield
        self.current = before


class ColumnMajor:
    """cublasGemmEx in words: C [m, n] = op(A) op(B), columns first, on the CPU and in fp32. As cupy has it,
    on cupy's current stream, whatever stream the handle had."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1

    def __init__(self, streams: Streams) -> None:
        self.streams, self.ran_on = streams, -1

    def gemmEx(self, handle, ta, tb, m, n, k, alpha, a, _a, lda, b, _b, ldb, beta, c, _c, ldc, compute, algo):
        self.ran_on = self.streams.current
        left = self.matrix(a, lda, k if ta else m, m if ta else k)
        right = self.matrix(b, ldb, n if tb else k, k if tb else n)
        product = (left.T if ta else left) @ (right.T if tb else right)
        self.matrix(c, ldc, m, n)[:] = self.scalar(alpha) * product + self.scalar(beta)

    def matrix(self, pointer: int, pitch: int, rows: int, columns: int) -> numpy.ndarray:
        flat = (ctypes.c_float * (pitch * columns)).from_address(pointer)
        return numpy.frombuffer(flat, numpy.float32).reshape(columns, pitch).T[:rows]

    def scalar(self, pointer: int) -> float:
        return ctypes.c_float.from_address(pointer).value


def test_cublas_is_given_the_operands_of_the_product_on_torchs_stream(baselines, monkeypatch):
    monkeypatch.setattr(baselines, "stream", lambda: 1234)
    streams = Streams()
    cuda = SimpleNamespace(
        cublas=ColumnMajor(streams),
        device=SimpleNamespace(get_cublas_handle=lambda: 0),
        ExternalStream=streams.ExternalStream,
    )
    x, weight, out = torch.randn(7, 5), torch.randn(3, 5), torch.full((7, 3), float("nan"))
    baselines.gemm(SimpleNamespace(cuda=cuda), x, weight, out)()
    torch.testing.assert_close(out, x @ weight.t())
    assert cuda.cublas.ran_on == 1234 and streams.current == -1


def test_baselines_have_a_table(baselines):
    from bench.gpu import problem as gpu_problem

    product = {"kind": "baseline", "name": "8B qkv", "m": 512, "n": 768, "k": 4096, "ratio": {"cuBLAS": 1.25}}
    product["seconds"] = {"torch.matmul": 2e-5, "cuBLAS": 1.6e-5}
    nccl = {"kind": "baseline", "name": "NCCL all-gather, 8 GPUs, 17 MB", "seconds": {"NCCL": 1e-4}}
    text = gpu_problem.summary([product, nccl])
    assert "torch.matmul 20.0; cuBLAS 16.0" in text and "1.250" in text and "NCCL 100.0" in text
