"""Tables of angles for rotary position embedding (Su et al. 2021, arXiv 2104.09864, equation 34)."""

from __future__ import annotations

import math

import torch

from pyruntime.llama.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Angle per token of each pair of channels, fp32 `[head_dim / 2]`: theta ** (-2 i / head_dim), scaled."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    if scaling.rope_type == "linear":
        return inverse / scaling.factor
    return _llama3(inverse, scaling)


def rope_tables(
    config: LlamaConfig, length: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `cos` and `sin` of positions `0 .. length - 1`, fp32 `[length, head_dim]`.

    The halves of a head are rotated against each other (Hugging Face's channel order), so both halves of the
    tables are equal.
    """
    # Products of position and frequency are fp32 as in transformers: equal bits are worth more than the
    # digits that fp64 would add at long contexts.
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(config))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def _llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths by `factor`, short ones not at all, linearly blended between.

    Source: the reference code of Llama 3.1 (`apply_scaling`), as in transformers' `rope_type="llama3"`.
    """
    turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)  # per original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * inverse / scaling.factor + keep * inverse
