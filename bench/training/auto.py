"""Times a model of transformers cut by plan "auto", beside our Llama and other libraries that cut models.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.training.auto [--json FILE]
    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 1gbit -- python -m bench.training.auto

Forward and backward of a Llama- and a Qwen3-shaped model, without an optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed import DistributedConfig

import pyruntime
from bench.common.limits import Figure
from bench.common.measuring import interleave, parser_of, report_each, started
from bench.common.plain_llama import PlainLlama, Shape, shard_with_dtensor
from bench.common.tables import table
from bench.data_parallel.run import SHAPES, TOLERANCE
from bench.training.workers import DTYPES, SEED, our_model, renamed
from pyruntime.comm.exchange import gather

AUTO, OURS, THEIRS, COMPILED = "auto", "our Llama", "transformers' tp_plan", "DTensor, compiled"
BARE_AUTO, BARE_OURS = "auto, without attention", "our Llama, without attention"
AUTO_ALONE, OURS_ALONE = "transformers alone", "our Llama alone"
LIMITS = {AUTO: AUTO_ALONE, OURS: OURS_ALONE}
KINDS = ("llama", "qwen3")
PEERS = (THEIRS, COMPILED)
Step = Callable[[], Tensor]

HOW = """\
Seconds of forward and backward of one micro-batch on the slowest rank, medians over {rounds} rounds. Within a
round every line takes one turn, in shuffled order, started together on all ranks, on the same tokens. "Of
auto": a line's seconds divided by those of plan "auto", median over rounds. Without attention: sums replace
it in both, because our Llama has its own attention kernel; norms, rotations and activations stay each model's
own. "Alone": every rank runs the whole model at the same time and nothing is exchanged. "Of its limit": that
time divided by the number of ranks and by the line's seconds. "{compiled}": a plain Llama of that shape, cut
as in torchtitan, under torch.compile. Losses of models with the same weights agree."""


def hf_model(kind: str, shape: Shape, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """Returns a model with the plain model's weights; Qwen3 adds norms of q and k."""
    config_class = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    config = config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.seq,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        attn_implementation=attention,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = hf_names(PlainLlama(shape, dtype, SEED).state_dict())
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or any("_norm." not in name for name in missing):
        raise RuntimeError(f"the plain model lacks {missing}, and {unexpected} is not in the other.")
    return model


def hf_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the plain model's state dict under the names of transformers."""
    modules = {
        "blocks.": "model.layers.",
        "embedding.": "model.embed_tokens.",
        "attention_norm.": "input_layernorm.",
        "ffn_norm.": "post_attention_layernorm.",
        "ffn.": "mlp.",
        "attention.": "self_attn.",
        "head.": "lm_head.",
        **{f".{leaf}.": f".{leaf}_proj." for leaf in ("q", "k", "v", "o", "gate", "up", "down")},
    }
    found = renamed(state, modules)
    return {"model." + name if name.startswith("norm.") else name: tensor for name, tensor in found.items()}


def no_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Returns sums [B, H, S, d] that read all of q, k, v [B, H or G, S, d] and cost next to nothing."""
    batch, heads, seq, dim = q.shape
    return (q.view(batch, k.shape[1], -1, seq, dim) + (k + v).unsqueeze(2)).view(batch, heads, seq, dim)


def register_no_attention() -> str:
    def forward(module, query, key, value, mask, **_):
        return no_attention(query, key, value).transpose(1, 2), None

    transformers.AttentionInterface.register("none", forward)
    transformers.AttentionMaskInterface.register("none", lambda *_, **__: None)
    return "none"


def hf_step(model: nn.Module, ids: Tensor) -> Step:
    model.train()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return step


def our_step(shape: Shape, dtype: torch.dtype, tp: DeviceMesh, ids: Tensor, attention: bool) -> Step:
    model = our_model(shape, dtype, tp)
    labels = next_tokens(ids)
    context: Callable[[], Any] = contextlib.nullcontext
    if not attention:

        def context() -> Any:
            return mock.patch("pyruntime.llama.block.causal_attention", no_attention)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with context():
            loss = model(ids, labels)
            loss.backward()
        return loss.detach()

    return step


def compiled_step(shape: Shape, dtype: torch.dtype, tp: DeviceMesh, ids: Tensor) -> Step:
    model = PlainLlama(shape, dtype, SEED)
    loss_parallel = shard_with_dtensor(model, tp)
    compiled = torch.compile(model)
    labels = next_tokens(ids).flatten()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(compiled(ids).flatten(0, 1), labels)
            loss.backward()
        return loss.detach()

    return step


def next_tokens(ids: Tensor) -> Tensor:
    """Returns labels for our Llama and cross_entropy; the last position has none."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


def theirs(kind: str, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Loads a model that transformers cuts while loading, from rank 0's folder, which every host sees."""
    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    with tempfile.TemporaryDirectory() as own:
        folder = gather(dist.group.WORLD, "Telling the folder", own, str)[0]
        hf_model(kind, shape, dtype).save_pretrained(folder)  # only rank 0 writes
        dist.barrier()
        model_class = transformers.AutoModelForCausalLM
        model = model_class.from_pretrained(folder, dtype=dtype, distributed_config=plan)
        dist.barrier()
    return model


def measure(
    kind: str, shape_name: str, dtype: str, args: argparse.Namespace, tp: DeviceMesh, one: DeviceMesh
) -> dict[str, Any]:
    """Measures one model. tp: all ranks; one: this rank alone."""
    shape, torch_dtype = SHAPES[shape_name], DTYPES[dtype]
    draw = torch.Generator().manual_seed(SEED)
    ids = torch.randint(shape.vocab, (shape.micro_batch, shape.seq), generator=draw)
    none = register_no_attention()
    models = {
        AUTO: pyruntime.parallelize(hf_model(kind, shape, torch_dtype), tp, "auto"),
        BARE_AUTO: pyruntime.parallelize(hf_model(kind, shape, torch_dtype, none), tp, "auto"),
        AUTO_ALONE: hf_model(kind, shape, torch_dtype),
    }
    if THEIRS in args.peers:
        models[THEIRS] = theirs(kind, shape, torch_dtype)
    steps = {name: hf_step(model, ids) for name, model in models.items()}
    steps |= {
        OURS: our_step(shape, torch_dtype, tp, ids, attention=True),
        BARE_OURS: our_step(shape, torch_dtype, tp, ids, attention=False),
        OURS_ALONE: our_step(shape, torch_dtype, one, ids, attention=True),
    }
    if COMPILED in args.peers:
        steps[COMPILED] = compiled_step(shape, torch_dtype, tp, ids)
    for _ in range(3):  # the first compares and compiles
        losses = {name: step() for name, step in steps.items()}
    others = {BARE_AUTO, BARE_OURS} | ({OURS, OURS_ALONE, COMPILED} if kind == "qwen3" else set())
    values = [float(loss) for name, loss in losses.items() if name not in others]
    if not max(values) - min(values) <= TOLERANCE[dtype]:
        raise RuntimeError(f"the losses of this rank differ: {losses}.")
    samples = interleave(steps, args.rounds)
    return {
        "kind": kind,
        "shape_name": shape_name,
        "shape": asdict(shape),
        "dtype": dtype,
        "activations": pyruntime.explain(models[AUTO]).form,
        "lines": {name: asdict(Figure.of(sample)) for name, sample in samples.items()},
        "of_auto": {
            name: asdict(Figure.of(sample.over(samples[BARE_AUTO if name == BARE_OURS else AUTO])))
            for name, sample in samples.items()
            if name not in (AUTO, BARE_AUTO, AUTO_ALONE, OURS_ALONE)
        },
        "of_limit": {
            name: asdict(Figure.of(samples[alone].over(samples[name]), 1 / tp.size()))
            for name, alone in LIMITS.items()
        },
        "rounds": {name: list(sample.rounds) for name, sample in samples.items()},
    }


def show(result: dict[str, Any]) -> str:
    rows = []
    for name, figure in result["lines"].items():
        cells = [f"{figure['median'] * 1e3:.1f}", f"{figure['spread']:.1%}"]
        for over in (result["of_auto"].get(name), result["of_limit"].get(name)):
            cells += [f"{over['median']:.3f}", f"{over['spread']:.1%}"] if over else ["", ""]
        rows.append([name, *cells])
    title = f"{result['kind']} {result['shape_name']} {result['dtype']}: {result['activations']}"
    return "\n".join([title, table(["", "step ms", "+-", "of auto", "+-", "of its limit", "+-"], rows)])


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["dim1024"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with started({"tp": -1, "dp": 1}) as runtime:
        if dist.get_world_size() < 2:
            raise SystemExit("bench.training.auto: one rank has nothing to exchange; start two or more.")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        each = (
            measure(kind, shape, dtype, args, runtime.tp.mesh, runtime.dp.mesh)
            for kind in args.kinds
            for shape in args.shapes
            for dtype in args.dtypes
        )
        report_each(args, HOW.format(rounds=args.rounds, compiled=COMPILED), each, show)


if __name__ == "__main__":
    main()
