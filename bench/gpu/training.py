"""Part "training" of bench/gpu: whole training steps of Llama-3.2 1B on one GPU, without other ranks.

A step is the trainer's: forward, backward, norm and clipping, AdamW with fp32 masters and moments, bf16
weights; the host reads nothing. SwiGLU, rotary embedding, the loss's passes over the logits and AdamW use the
kernels of csrc/cuda; if these are not built, a note says so. "eager" launches every kernel in each step,
"graph" replays one captured CUDA graph. "torch" is plain_llama.py with the head tied to the embedding; it has
bf16 moments and no masters, so it moves less memory.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.common.plain_llama import PlainLlama, PlainStep, Shape
from bench.gpu.layers import attention
from bench.gpu.problem import Emit
from pyruntime.comm.core import _C
from pyruntime.data_parallel import shard
from pyruntime.data_parallel.optimizer import clip_on_device
from pyruntime.llama import Llama
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.presets import preset
from pyruntime.ops.device_adamw import StepSettings, device_adamw_
from pyruntime.train.config import Optimizer
from pyruntime.train.device import peak_flops_of

CLIP = 1.0
SETTINGS = Optimizer(lr=1e-4)
WARM = 3
"""Steps before the timing; their losses are compared."""


@dataclass(frozen=True)
class Size:
    model: LlamaConfig
    sequences: int
    seq_len: int
    steps: int
    """Steps that are timed together."""
    rounds: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


def size_of(quick: bool) -> Size:
    """Returns the sizes to measure, or small ones that show quickly whether it runs."""
    if not quick:
        return Size(preset("llama3-1b"), sequences=4, seq_len=4096, steps=5, rounds=3)
    return Size(preset("3m", vocab_size=512, tie_word_embeddings=True), 2, 64, steps=2, rounds=2)


class Step:
    """One training step of our Llama on `device`, over the same tokens each time."""

    def __init__(self, size: Size, device: str):
        self.model = Llama(size.model, dtype=torch.bfloat16, device=device, seed=None)
        draw_weights(self.model, device)
        self.optimizer = shard(self.model, None, stage=0).adamw(
            lr=SETTINGS.lr,
            betas=(SETTINGS.beta1, SETTINGS.beta2),
            eps=SETTINGS.eps,
            weight_decay=SETTINGS.weight_decay,
            max_norm=CLIP,
        )
        self.ids, self.labels = tokens_of(size, device)
        self.loss = torch.zeros((), device=device)
        self.steps = 0
        names = ("beta1", "beta2", "eps")
        self._settings = StepSettings(device, **{name: getattr(SETTINGS, name) for name in names})
        self._graph: torch.cuda.CUDAGraph | None = None

    def eager(self) -> None:
        self.steps += 1
        self.optimizer.step(self._norm())

    def by_settings(self) -> None:
        """Takes the step in the form that can be captured; earlier gradients must be None."""
        scale = clip_on_device(self._norm(), CLIP)
        states, gradients = zip(*self.optimizer.arrived_rows(), strict=True)
        device_adamw_(
            [state.rows for state in states],
            gradients,
            [state.moments["exp_avg"] for state in states],
            [state.moments["exp_avg_sq"] for state in states],
            [state.master for state in states],
            beta1=SETTINGS.beta1,
            beta2=SETTINGS.beta2,
            eps=SETTINGS.eps,
            weight_decay=[state.decay for state in states],
            settings=self._settings,
            grad_scale=scale,
        )

    def capture(self) -> None:
        """Captures the graph for replay(). Takes no step."""
        for parameter in self.model.parameters():
            parameter.grad = None  # from now on they are in the graph's own memory
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.by_settings()

    def replay(self) -> None:
        self.announce()
        assert self._graph is not None
        self._graph.replay()

    def announce(self) -> None:
        """Sets the number of the next step."""
        self.steps += 1
        self._settings.write(SETTINGS.lr, self.steps)

    def _norm(self) -> Tensor:
        """Runs forward and backward; returns the gradient's norm, on the device."""
        loss = self.model(self.ids, self.labels)
        loss.backward()
        self.loss.copy_(loss.detach())
        return self.optimizer.squared_norm().sqrt()


@torch.no_grad()
def draw_weights(model: Llama, device: str) -> None:
    """Draws the same weights in every call, on the device: `Llama` draws on the CPU, where a billion numbers
    take longer than the measurement."""
    draw = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)  # norms
        else:
            parameter.normal_(0.0, model.config.initializer_range, generator=draw)


def tokens_of(size: Size, device: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (size.sequences, size.seq_len + 1)
    windows = torch.randint(size.model.vocab_size, shape, generator=draw).to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def eager(size: Size, device: str) -> tuple[Callable[[], None], list[float]]:
    """Returns the step, and the losses of its warm-up steps."""
    step = Step(size, device)
    return step.eager, losses_of(step, step.eager)


def graph(size: Size, device: str) -> tuple[Callable[[], None], list[float]]:
    step = Step(size, device)
    step.eager()
    first = float(step.loss)
    step.capture()
    return step.replay, [first, *losses_of(step, step.replay, WARM - 1)]


def plain(size: Size, device: str) -> tuple[Callable[[], None], list[float]]:
    with torch.device(device):  # its weights are drawn there
        model = plain_model(size)
    config = size.model
    assert config.tie_word_embeddings
    settings = {"lr": SETTINGS.lr, "betas": (SETTINGS.beta1, SETTINGS.beta2), "eps": SETTINGS.eps}
    step = PlainStep(model, {**settings, "weight_decay": SETTINGS.weight_decay}, clip=CLIP)
    ids, labels = tokens_of(size, device)
    losses = [step(ids[None], labels[None]) for _ in range(WARM)]
    return lambda: step(ids[None], labels[None]) and None, losses


def plain_model(size: Size) -> PlainLlama:
    config = size.model
    shape = Shape(
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        seq=size.seq_len,
        micro_batch=size.sequences,
        accumulate=1,
    )
    model = PlainLlama(shape, torch.bfloat16)
    model.head.weight = model.embedding.weight
    return model


def losses_of(step: Step, run: Callable[[], None], count: int = WARM) -> list[float]:
    losses = []
    for _ in range(count):
        run()
        losses.append(float(step.loss))
    return losses


VARIANTS = {"pyruntime, eager": eager, "pyruntime, CUDA graph": graph, "torch, eager": plain}


def training(emit: Emit, quick: bool) -> None:
    """Times every variant alone on the device, one after the other, then attention."""
    if reason := _C.why_no_device_library("cuda"):
        emit({"kind": "note", "text": f"training steps by ATen's operations: {reason}"})
    expected: list[float] = []
    for name in VARIANTS:
        try:
            found = measured(name, size_of(quick), expected)
            expected = expected or found["losses"]
            emit(found)
        except RuntimeError as error:  # including out of memory
            emit({"kind": "error", "text": f"training, {name}: {type(error).__name__}: {str(error)[:500]}"})
        gc.collect()
        torch.cuda.empty_cache()
    attention(emit, quick)


def measured(name: str, size: Size, expected: list[float]) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    run, losses = VARIANTS[name](size, "cuda")
    seconds = timed(run, size)
    peak = peak_flops_of(torch.cuda.get_device_name())
    return result(name, size, seconds, losses, expected or losses, peak, torch.cuda.max_memory_allocated())


def timed(run: Callable[[], None], size: Size) -> list[float]:
    """Returns the wall-clock seconds of a step in every round."""
    seconds = []
    for _ in range(size.rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(size.steps):
            run()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / size.steps)
    return seconds


def result(
    name: str,
    size: Size,
    seconds: list[float],
    losses: list[float],
    expected: list[float],
    peak: float | None,
    memory_bytes: int,
) -> dict[str, Any]:
    """Returns one line of the report. The losses of the first steps must equal the first variant's, except
    for torch's, which has its own initial weights."""
    median = statistics.median(seconds)
    per_second = size.tokens / median
    flops = size.model.flops_per_token(size.seq_len)
    same = all(abs(a - b) < 0.02 * abs(b) for a, b in zip(losses, expected, strict=True))
    return {
        "kind": "training",
        "name": name,
        "tokens": size.tokens,
        "seconds": median,
        "spread": max(seconds) - min(seconds),
        "tokens_per_second": per_second,
        "mfu": None if peak is None else per_second * flops / peak,
        "memory_bytes": memory_bytes,
        "losses": losses,
        "wrong": [] if same or name.startswith("torch") else [name],
    }
