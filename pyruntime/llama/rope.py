"""Tables of angles for rotary position embedding (Su et al. 2021, arXiv 2104.09864, equation 34)."""

from __future__ import annotations

import math

import torch

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.rope_scaling import RopeScaling


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Angle per token of each pair of the d rotated channels, fp32 `[d / 2]`: theta ** (-2 i / d), scaled."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    wavelengths = config.rope_theta**exponent
    inverse = 1.0 / wavelengths
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":  # no sequence is longer than the model's longest
        return inverse
    if scaling.rope_type == "linear":
        return inverse / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(inverse, scaling)
    return _yarn(wavelengths, scaling, config)


def rope_tables(
    config: LlamaConfig, length: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `cos` and `sin` of positions `0 .. length - 1`, fp32 `[length, d]`; both times YaRN's
    attention factor, if the model has one.

    The halves of a head are rotated against each other (Hugging Face's channel order), so both halves of the
    tables are equal.
    """
    # Products of position and frequency are fp32 as in transformers: equal bits are worth more than the
    # digits that fp64 would add at long contexts.
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(config))
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if config.rope_scaling is not None:
        cos, sin = (each * config.rope_scaling.magnitude for each in (cos, sin))
    return cos.to(device), sin.to(device)


def _llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths by `factor`, short ones not at all, linearly blended between.

    Source: the reference code of Llama 3.1 (`apply_scaling`), as in transformers' `rope_type="llama3"`.
    """
    turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)  # per original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * inverse / scaling.factor + keep * inverse


def _yarn(wavelengths: torch.Tensor, scaling: RopeScaling, config: LlamaConfig) -> torch.Tensor:
    """YaRN's scaling, in the order of operations of transformers' `rope_type="yarn"`: the blend is linear in
    the number of the channel pair (arXiv 2309.00071, section 3.2, as in its authors' code)."""
    dim, context = config.rotary_dim, scaling.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        """The channel pair that turns so many times within the original context."""
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    scaled = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    keep = 1 - scaled
    return 1.0 / (scaling.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
