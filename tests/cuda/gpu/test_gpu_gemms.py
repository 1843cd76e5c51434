"""What bench/gpu compares fused GEMMs with, and how it sums up."""

from __future__ import annotations

import torch


def test_a_scatter_is_compared_with_the_product_and_the_sum_of_all_parts(monkeypatch):
    from bench.gpu import gemms as gpu_gemms

    called = []

    def record(name, real):
        def recorded(*inputs, out):
            called.append((name, [tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)]))
            return real(*inputs, out=out)

        monkeypatch.setattr(torch, name, recorded)

    record("matmul", torch.matmul)
    record("sum", torch.sum)
    x, weight, parts = torch.randn(8, 3), torch.randn(5, 3), torch.randn(4, 2, 5)
    assert list(gpu_gemms.unfused(x, weight, None)) == ["torch.matmul"]
    product, both = gpu_gemms.unfused(x, weight, parts).items()
    assert (product[0], both[0]) == ("torch.matmul", "torch.matmul, sum")
    product[1]()
    assert called == [("matmul", [(8, 3), (3, 5)])]
    both[1]()
    assert called[1:] == [called[0], ("sum", [(4, 2, 5)])]


def test_gathers_and_scatters_have_medians_of_their_own():
    from bench.gpu import problem as gpu_problem

    results = [
        {
            "kind": "gemm",
            **vars(shape),
            "seconds": {"torch.matmul": 1e-5},
            "ratio": {"hopper": 0.9 if shape.op == "gather" else 0.5},
            "tflops": 300.0,
        }
        for shape in gpu_problem.llama_shapes([512])
    ]
    lines = [line.split() for line in gpu_problem.summary(results).splitlines()]
    assert ["median", "gather", "0.900"] in lines and ["median", "scatter", "0.500"] in lines
    assert ["hopper,", "gathers,", "median", "ratio", "0.900", ">=", "0.95"] in lines
    assert ["hopper,", "scatters,", "median", "ratio", "0.500", ">=", "0.95"] in lines
