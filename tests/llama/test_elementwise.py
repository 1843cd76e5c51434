"""What torch.compile makes of a layer's element-wise parts does what this project's kernels do."""

import pytest
import torch

from pyruntime.llama import Llama, elementwise
from pyruntime.llama.elementwise import NoCompiler
from tests.llama.cases import CASES


@pytest.fixture
def interpreted(monkeypatch):
    """Regions are traced and run by ATen, which takes no C++ compiler and its seconds."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, **options, backend="aot_eager"))
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("recompute", "dtype", "tolerance"),
    [("none", torch.bfloat16, 2e-2), ("selective", torch.float32, 1e-5), ("full", torch.float32, 1e-5)],
)
@pytest.mark.second_tier(but=["full-dtype2-1e-05"])
def test_losses_and_gradients_are_those_of_the_kernels(interpreted, recompute, dtype, tolerance):
    config = CASES["gqa-linear-bias-wide"]
    plain, made = (Llama(config, dtype=dtype, recompute=recompute, compile=each) for each in (False, True))
    for batch, seq in ((2, 17), (1, 1)):
        ids = torch.randint(config.vocab_size, (batch, seq))
        for model in (plain, made):
            model.zero_grad()
            model(ids, ids).backward()
        torch.testing.assert_close(made(ids, ids), plain(ids, ids), rtol=0, atol=tolerance)
        for one, other in zip(made.parameters(), plain.parameters(), strict=True):
            atol = tolerance * max(float(other.grad.abs().max()), 1e-2)
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=atol)


def test_other_sizes_do_not_compile_again(interpreted):
    config = CASES["plain"]
    model = Llama(config, compile=True)

    def step(batch, seq):
        ids = torch.randint(config.vocab_size, (batch, seq))
        model(ids, ids).backward()

    step(2, 9)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, seq in ((3, 20), (5, 7)):
            step(batch, seq)


def test_a_missing_compiler_is_a_sentence(monkeypatch):
    def fails(*_, **__):
        def called(*_):
            raise RuntimeError("No working C++ compiler found\nand a long trace")

        return called

    monkeypatch.setattr(elementwise.torch, "compile", fails)
    with pytest.raises(
        NoCompiler, match=r"has no working compiler for cpu \('No working C\+\+ compiler found'\)"
    ):
        Llama(CASES["plain"], compile=True)


def test_passes_without_gradients_compile_nothing(interpreted):
    config = CASES["plain"]
    plain, made = (Llama(config, compile=each) for each in (False, True))
    ids = torch.randint(config.vocab_size, (2, 9))
    with torch.no_grad():
        assert torch.equal(made(ids), plain(ids))
