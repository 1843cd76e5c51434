"""The shape of a Llama model as data, and its translation to and from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyruntime.plan.mesh import divisors
from pyruntime.text import short_repr

ROPE_TYPES = ("default", "linear", "llama3")
LARGEST = 2**31 - 1
"""Of all sizes; a larger one is no model but a damaged file."""
LARGEST_OF = {
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**22,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
}
"""Some thirty times the largest published, below which every product of two is a size that torch counts."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
"""Of sampling: what logits of any model are divided by in fp32 and stay finite and apart."""
LEAST_THETA, MOST_THETA = 1.0, 1e12
"""Of rope_theta: below, later channels would turn faster than the first; above, most do not turn at all."""
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Without default in a config.json."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the one pre-trained on.

    `rope_type` is Hugging Face's name: `"linear"` divides every frequency by `factor`; `"llama3"` divides
    only the wavelengths longer than `original_max_position_embeddings / low_freq_factor` (in tokens), keeps
    those shorter than `original_max_position_embeddings / high_freq_factor`, and blends between the two.
    """

    rope_type: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3"):
            raise ValueError(
                f"rope_type={short_repr(self.rope_type)} is no scaling; use 'linear' or 'llama3', or "
                "rope_scaling=None."
            )
        _check_number("rope factor", self.factor)
        if not 1.0 <= self.factor <= 1e6:
            raise ValueError(
                f"rope factor={self.factor} must be at least 1.0, as it lengthens the context, and at most "
                "1e6."
            )
        if self.rope_type == "llama3":
            _check_number("rope low_freq_factor", self.low_freq_factor)
            _check_number("rope high_freq_factor", self.high_freq_factor)
            if not 1e-6 <= self.low_freq_factor < self.high_freq_factor <= 1e6:
                raise ValueError(
                    f"rope low_freq_factor={self.low_freq_factor} and high_freq_factor="
                    f"{self.high_freq_factor} must be positive, the low one smaller than the high one, and "
                    "between 1e-6 and 1e6."
                )
            _check_size("rope original_max_position_embeddings", self.original_max_position_embeddings)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama decoder; fields carry Hugging Face's names and meanings.

    `head_dim=None` and `num_key_value_heads=None` are filled in as `hidden_size // num_attention_heads` and
    `num_attention_heads`. Raises `ValueError` where the numbers cannot be a model.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # None is filled in when the config is made; nobody ever reads it.
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048  # tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self) -> None:
        for name in (*REQUIRED, "max_position_embeddings"):
            _check_size(name, getattr(self, name))
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={short_repr(getattr(self, name))} must be true or false.")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            _check_number(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))  # a whole one may be beyond int64
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}; change one of them or give head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _check_size("num_key_value_heads", self.num_key_value_heads)
        _check_size("head_dim", self.head_dim)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads="
                f"{self.num_attention_heads}; use one of {divisors(self.num_attention_heads)}."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: rotary embedding turns pairs of channels."
            )
        if not 1e-30 <= self.rms_norm_eps <= 1.0:
            raise ValueError(
                f"rms_norm_eps={self.rms_norm_eps} must be between 1e-30 and 1: it keeps the root of a mean "
                "square, about 1, from 0."
            )
        if not LEAST_THETA <= self.rope_theta <= MOST_THETA:
            raise ValueError(
                f"rope_theta={self.rope_theta} must be between {LEAST_THETA:g} and {MOST_THETA:g}: it is the "
                "longest wavelength of positions, in tokens over 2 pi."
            )
        if not 0.0 <= self.initializer_range < 1.0:
            raise ValueError(f"initializer_range={self.initializer_range} must lie in [0, 1).")

    def check_tp(self, tp: int) -> None:
        """Raise `ValueError` unless `tp` ranks can share this model: whole key/value heads, equal FFN
        columns.

        The vocabulary and the number of tokens may be ragged.
        """
        for name in ("num_key_value_heads", "intermediate_size"):
            total = getattr(self, name)
            if total % tp:
                fitting = [p for p in divisors(self.num_key_value_heads) if self.intermediate_size % p == 0]
                raise ValueError(f"tp={tp} does not divide {name}={total}; use {_either(fitting)}.")

    def parameter_count(self) -> int:
        """Number of parameters; a tied head is counted once.

        With D hidden_size, L layers, F intermediate_size, V vocab_size, H and G query and key/value heads of
        size d::

            V D (embedding) + V D (head, unless tied) + D (last norm)
            + L (D (H + 2 G) d  +  H d D  +  3 D F  +  2 D)     [+ biases where the config has them]
        """
        d, heads, groups = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        layer = self.layer_matmul_parameters() + 2 * d
        if self.attention_bias:
            layer += (heads + 2 * groups) * self.head_dim + d
        if self.mlp_bias:
            layer += 2 * self.intermediate_size + d
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + d

    def flops_per_token(self, seq_len: int, *, training: bool = True) -> int:
        """Floating-point operations per token of a sequence of `seq_len` tokens, model FLOPs as MFU counts
        them.

        Forward, a multiply-add being two, causal attention counted as the half it needs::

            2 (L (D (H + 2 G) d + H d D + 3 D F) + V D)  +  L * 2 * seq_len * H d

        (the GEMMs of the scores, Q K^T, and of their use, P V, are 2 seq_len H d each per token, halved by
        causality). Training is three times that: the backward pass has two GEMMs for each of the forward's.
        Recomputation, norms and element-wise work do not count.
        """
        matmul = 2 * (
            self.num_hidden_layers * self.layer_matmul_parameters() + self.vocab_size * self.hidden_size
        )
        attention = 2 * self.num_hidden_layers * seq_len * self.num_attention_heads * self.head_dim
        return (matmul + attention) * (3 if training else 1)

    def layer_matmul_parameters(self) -> int:
        """Weights of one layer's seven linears, without biases."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (2 * heads + 2 * groups)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> LlamaConfig:
        """The config described by a parsed Hugging Face `config.json` (transformers 4 and 5 spellings).

        Raises `ValueError` for another architecture or for a feature that this model does not have.
        """
        model_type = hf.get("model_type", "llama")
        if model_type != "llama":
            raise ValueError(
                f"config.json describes model_type={short_repr(model_type)}; only 'llama' can be loaded as a "
                "Llama."
            )
        if hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(
                f"hidden_act={short_repr(hf['hidden_act'])} is not supported; Llama's activation is 'silu'."
            )
        if hf.get("quantization_config") is not None:
            raise ValueError("The checkpoint is quantized; load a version of it that is not.")
        values = {f.name: hf[f.name] for f in dataclasses.fields(cls) if hf.get(f.name) is not None}
        missing = [name for name in REQUIRED if name not in values]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}; a Llama cannot be built without.")
        values.setdefault("rms_norm_eps", 1e-6)  # what transformers assumes
        rope = _rope_of(hf)
        theta = rope.pop("rope_theta", None)
        if theta is not None:
            _check_number("rope_theta", theta)
            values["rope_theta"] = float(theta)
        values["rope_scaling"] = _rope_from_hf(rope, values.get("max_position_embeddings", 2048))
        return cls(**values)

    def to_hf(
        self, dtype: str = "float32", separator: int | None = None, begin: int | None = None
    ) -> dict[str, Any]:
        """A `config.json` that `LlamaForCausalLM.from_pretrained` reads; `dtype` as torch names it.

        separator, begin: the tokens behind documents (eos) and in front of them (bos)."""
        values = dataclasses.asdict(self)
        values["rope_scaling"] = _rope_to_hf(self.rope_scaling)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "torch_dtype": dtype,
            "bos_token_id": begin,
            "eos_token_id": separator,
            **values,
        }


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={short_repr(value)} must be a positive whole number below 2**31.")
    most = LARGEST_OF.get(name, LARGEST)
    if value > most:
        raise ValueError(f"{name}={value} is that of no model: it must be at most {most}.")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e38 <= value <= 1e38:
        raise ValueError(f"{name}={short_repr(value)} must be a finite number.")


def _rope_of(hf: dict[str, Any]) -> dict[str, Any]:
    for name in ("rope_parameters", "rope_scaling"):
        if hf.get(name) is not None:
            if not isinstance(hf[name], dict):
                raise ValueError(f"{name} of config.json must be an object, found {short_repr(hf[name])}.")
            if hf[name]:
                return dict(hf[name])
    return {}


def _rope_from_hf(rope: dict[str, Any], max_positions: int) -> RopeScaling | None:
    """`rope_scaling` or `rope_parameters` of a config.json, without its theta."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type={short_repr(rope_type)} is not supported; Llama checkpoints use one of "
            f"{list(ROPE_TYPES)}."
        )
    if rope_type == "default":
        return None
    names = ["factor"]
    if rope_type == "llama3":
        names += ["low_freq_factor", "high_freq_factor"]
        rope.setdefault("original_max_position_embeddings", max_positions)
        names += ["original_max_position_embeddings"]
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"rope_type={rope_type!r} in config.json lacks {', '.join(missing)}.")
    return RopeScaling(rope_type=rope_type, **{name: rope[name] for name in names})


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return dataclasses.asdict(scaling)


def _either(values: list[int]) -> str:
    """`[1, 2, 4]` as `1, 2 or 4`."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last
