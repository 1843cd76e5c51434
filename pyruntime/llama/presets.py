"""Named sizes of Llama models, from one that a test trains in a second to the largest published."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyruntime.llama.config import LlamaConfig, RopeScaling
from pyruntime.llama.mixture import Mixture
from pyruntime.plan.models import LatentAttention

_LLAMA_31: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": RopeScaling(factor=8.0),
}
# The 1B and 3B models of Llama 3.2 stretch their rotary frequencies further and tie the head to the
# embedding.
_LLAMA_32 = {**_LLAMA_31, "rope_scaling": RopeScaling(factor=32.0), "tie_word_embeddings": True}


def _shape(layers: int, dim: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        **rest,
    )


PRESETS: dict[str, LlamaConfig] = {
    # Small models; all but the last have a vocabulary of bytes. The name gives the number of parameters.
    "debug": _shape(2, 96, 4, 4, 256, vocab_size=256, max_position_embeddings=256),
    "3m": _shape(4, 256, 8, 4, 704, vocab_size=256, max_position_embeddings=512),
    "10m": _shape(6, 384, 12, 4, 1088, vocab_size=256, max_position_embeddings=1024),
    "30m": _shape(10, 512, 8, 4, 1408, vocab_size=256, max_position_embeddings=1024),
    "125m": _shape(12, 768, 12, 4, 2048, vocab_size=32000, max_position_embeddings=2048),
    # The shapes of the training benchmark.
    "dim256": _shape(4, 256, 8, 4, 768, vocab_size=2048, max_position_embeddings=256),
    "dim1024": _shape(4, 1024, 16, 8, 2816, vocab_size=8192, max_position_embeddings=512),
    # As published on Hugging Face: meta-llama/Llama-2-7b-hf, Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, -70B,
    # -405B.
    "llama2-7b": _shape(32, 4096, 32, 32, 11008, vocab_size=32000, max_position_embeddings=4096),
    "llama3-1b": _shape(16, 2048, 32, 8, 8192, **_LLAMA_32),
    "llama3-3b": _shape(28, 3072, 24, 8, 8192, **_LLAMA_32),
    "llama3-8b": _shape(32, 4096, 32, 8, 14336, **_LLAMA_31),
    "llama3-70b": _shape(80, 8192, 64, 8, 28672, **_LLAMA_31),
    "llama3-405b": _shape(126, 16384, 128, 8, 53248, **_LLAMA_31),
    # Qwen/Qwen2.5-0.5B.
    "qwen2.5-0.5b": _shape(
        24,
        896,
        14,
        2,
        4864,
        vocab_size=151936,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        qkv_bias=True,
    ),
    # With experts; the first trains on a small machine. mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B.
    "experts-8x1m": _shape(
        4,
        256,
        8,
        4,
        512,
        vocab_size=256,
        max_position_embeddings=512,
        mixture=Mixture(experts=8, per_token=2, width=352),
    ),
    "mixtral-8x7b": _shape(
        32,
        4096,
        32,
        8,
        14336,
        vocab_size=32000,
        max_position_embeddings=32768,
        rope_theta=1e6,
        mixture=Mixture(experts=8, per_token=2, width=14336),
    ),
    "qwen3-30b-a3b": _shape(
        48,
        2048,
        32,
        4,
        6144,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        mixture=Mixture(experts=128, per_token=8, width=768),
    ),
    # deepseek-ai/DeepSeek-V3, without its layer that predicts a second token.
    "deepseek-v3": _shape(
        61,
        7168,
        128,
        128,
        18432,
        vocab_size=129280,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_scaling=RopeScaling(
            "yarn", 40.0, original_max_position_embeddings=4096, attention_factor=1.0, mscale_all_dim=1.0
        ),
        latent=LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536),
        mixture=Mixture(
            experts=256,
            per_token=8,
            width=2048,
            shared_width=2048,
            dense_layers=3,
            sigmoid=True,
            groups=8,
            best_groups=4,
            factor=2.5,
        ),
    ),
}


def preset(name: str, **changes: Any) -> LlamaConfig:
    """Returns the preset `name` with the given fields changed: `preset("10m", vocab_size=5000)`.

    Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"There is no model preset {name!r}; use one of {', '.join(PRESETS)}.")
    if {"hidden_size", "num_attention_heads"} & changes.keys():
        changes.setdefault("head_dim", None)  # the quotient of the new sizes instead of the preset's
    if PRESETS[name].latent is not None and "num_attention_heads" in changes:
        changes.setdefault("num_key_value_heads", None)  # as many
    return dataclasses.replace(PRESETS[name], **changes)
