"""The sizes of a Llama model as data, and their translation to and from a Hugging Face `config.json`.

Beside Llama itself these are models that differ from it in two points: experts in place of a layer's
feed-forward network, and queries and keys whose heads are normalised (`families.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from pyruntime.llama.families import ARCHITECTURES, family_of, mixture_from_hf, mixture_to_hf
from pyruntime.llama.mixture import Mixture
from pyruntime.plan.mesh import divisors
from pyruntime.text import short_repr

ROPE_TYPES = ("default", "linear", "llama3")
LARGEST = 2**31 - 1
"""Limit on all sizes; a larger one means a damaged file."""
LARGEST_OF = {
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**22,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
}
"""Limits of some thirty times the largest published sizes. Products of two still fit torch's sizes."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
"""Range of sampling temperatures: divided by one in fp32, any model's logits stay finite and distinct."""
LEAST_THETA, MOST_THETA = 1.0, 1e12
"""Range of rope_theta: below, later channels would turn faster than the first; above, most do not turn."""
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Keys of a config.json without a default."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than the pre-training context.

    `rope_type` is Hugging Face's name. `"linear"` divides every frequency by `factor`. `"llama3"` divides
    those whose wavelength in tokens is above `original_max_position_embeddings / low_freq_factor`, keeps
    those below `original_max_position_embeddings / high_freq_factor`, and blends in between.
    """

    rope_type: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3"):
            raise ValueError(
                f"There is no rope_type={short_repr(self.rope_type)}; use 'linear' or 'llama3', or "
                "rope_scaling=None."
            )
        _check_number("rope factor", self.factor)
        if not 1.0 <= self.factor <= 1e6:
            raise ValueError(
                f"rope factor={self.factor} must be at least 1.0, because it lengthens the context, and at "
                "most 1e6."
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
    """Sizes of a Llama decoder; fields have Hugging Face's names and meanings.

    `head_dim=None` becomes `hidden_size // num_attention_heads`, `num_key_value_heads=None` becomes
    `num_attention_heads`. Raises `ValueError` for numbers that make no model.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # __post_init__ replaces None, so readers never see it.
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
    qk_norm: bool = False  # whether the features of every query and key head are normalised (Qwen3)
    mixture: Mixture | None = None  # the experts of layers; None: every layer has one feed-forward network

    def __post_init__(self) -> None:
        for name in (*REQUIRED, "max_position_embeddings"):
            _check_size(name, getattr(self, name))
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={short_repr(getattr(self, name))} must be true or false.")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            _check_number(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))  # an int may be beyond int64
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
                "square, about 1, away from 0."
            )
        if not LEAST_THETA <= self.rope_theta <= MOST_THETA:
            raise ValueError(
                f"rope_theta={self.rope_theta} must be between {LEAST_THETA:g} and {MOST_THETA:g}: it is the "
                "longest wavelength of positions, in tokens over 2 pi."
            )
        if not 0.0 <= self.initializer_range < 1.0:
            raise ValueError(f"initializer_range={self.initializer_range} must be at least 0 and below 1.")
        if self.mixture is not None and self.mixture.dense_layers >= self.num_hidden_layers:
            raise ValueError(
                f"{self.mixture.dense_layers} dense layers of {self.num_hidden_layers} leave none with "
                "experts; use fewer."
            )
        if family_of(self) == "mixtral":
            # Its config.json has one number for both, and no layer needs the other.
            object.__setattr__(self, "intermediate_size", self.mixture.width)  # type: ignore[union-attr]

    def check_tp(self, tp: int) -> None:
        """Raises `ValueError` unless `tp` divides the key/value heads and the FFN columns, and leaves each
        rank an expert. It need not divide the vocabulary, the experts and the number of tokens."""
        cut = {"num_key_value_heads": self.num_key_value_heads}
        if self.has_dense_layers:
            cut["intermediate_size"] = self.intermediate_size
        if self.mixture is not None and self.mixture.shared_width:
            cut["shared_width"] = self.mixture.shared_width
        for name, total in cut.items():
            if total % tp:
                fitting = [
                    p for p in divisors(self.num_key_value_heads) if all(n % p == 0 for n in cut.values())
                ]
                raise ValueError(f"tp={tp} does not divide {name}={total}; use {_either(fitting)}.")
        if self.mixture is not None and -(-self.mixture.experts // tp) * (tp - 1) >= self.mixture.experts:
            raise ValueError(
                f"tp={tp} leaves a rank without one of the {self.mixture.experts} experts, which are cut "
                "into equal chunks; use fewer ranks or more experts."
            )

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has one feed-forward network in place of experts."""
        return self.mixture is None or self.mixture.dense_layers > 0

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return self.mixture is not None and self.mixture.has(layer)

    def parameter_count(self) -> int:
        """Number of parameters; a tied head and embedding count once.

        With D hidden_size, L layers, F intermediate_size, V vocab_size, H and G query and key/value heads of
        size d::

            V D (embedding) + V D (head, unless tied) + D (last norm)
            + L (D (H + 2 G) d  +  H d D  +  3 D F  +  2 D)     [+ biases if the config has them]

        In a layer with E experts of width F and a shared one of width S, 3 D F becomes 3 D F E + E D (router)
        + 3 D S + D (its gate).
        """
        d, heads, groups = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        each = 2 * d + (2 * self.head_dim if self.qk_norm else 0)
        if self.attention_bias:
            each += (heads + 2 * groups) * self.head_dim + d
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        matrices = [self.layer_matmul_parameters(n) for n in range(self.num_hidden_layers)]
        biases = 2 * self.intermediate_size + d if self.mlp_bias else 0
        return embeddings + sum(matrices) + self.num_hidden_layers * each + self._dense * biases + d

    def active_parameter_count(self) -> int:
        """Number of parameters that one token uses: all, without the experts that it does not go to."""
        if self.mixture is None:
            return self.parameter_count()
        of_layer = self.mixture.parameters(self.hidden_size)
        idle = of_layer - self.mixture.parameters(self.hidden_size, used=True)
        return self.parameter_count() - (self.num_hidden_layers - self._dense) * idle

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes [out_features, in_features] of the linears of a layer without experts, by their names in
        Hugging Face's models."""
        heads, hidden, ffn = self.num_attention_heads, self.hidden_size, self.intermediate_size
        q, kv = heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        }
        return attention | {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}

    def adapter_parameter_count(self, rank: int, targets: Iterable[str]) -> int:
        """Number of parameters of low-rank adapters of the linears in `targets`, in all layers."""
        shapes = self.linear_shapes()
        return self.num_hidden_layers * rank * sum(sum(shapes[name]) for name in targets)

    def flops_per_token(self, seq_len: int, *, training: bool = True, adapters: int = 0) -> int:
        """Model FLOPs per token of a sequence of `seq_len` tokens, as MFU counts them.

        The forward pass; a multiply-add counts as two, and only the needed half of causal attention counts::

            2 (L (D (H + 2 G) d + H d D + 3 D F) + V D)  +  L * 2 * seq_len * H d

        Q K^T and P V are 2 seq_len H d each per token, halved by causality. Of experts those count that a
        token goes to, of width F each, the shared one and the router. Training is three times that: the
        backward pass has two GEMMs for each of the forward's. Recomputation, norms and element-wise
        operations do not count. adapters: parameters of low-rank adapters, if only these train: then the
        weights have no gradient, and the backward pass has one GEMM for each of theirs.
        """
        layers = sum(self.layer_matmul_parameters(n, used=True) for n in range(self.num_hidden_layers))
        matmul = 2 * (layers + self.vocab_size * self.hidden_size)
        attention = 2 * self.num_hidden_layers * seq_len * self.num_attention_heads * self.head_dim
        whole = (matmul + attention) * (3 if training else 1)
        return whole - matmul + 6 * adapters if training and adapters else whole

    def layer_matmul_parameters(self, layer: int = 0, *, used: bool = False) -> int:
        """Number of weights of the linears of the layer of that number, without biases. used: of those that
        one token uses, where the layer has experts."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (2 * heads + 2 * groups)
        if self.mixture is not None and self.mixture.has(layer):
            return attention + self.mixture.parameters(self.hidden_size, used=used)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def _dense(self) -> int:
        """Layers without experts."""
        return self.num_hidden_layers if self.mixture is None else self.mixture.dense_layers

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> LlamaConfig:
        """Returns the config of a parsed Hugging Face `config.json` (keys of transformers 4 or 5).

        Raises `ValueError` for another architecture or for a feature that this model does not have.
        """
        model_type = hf.get("model_type", "llama")
        if model_type not in ARCHITECTURES:
            raise ValueError(
                f"config.json describes model_type={short_repr(model_type)}; only "
                f"{', '.join(map(repr, ARCHITECTURES))} can be loaded as a Llama."
            )
        if hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(
                f"hidden_act={short_repr(hf['hidden_act'])} is not supported; Llama's activation is 'silu'."
            )
        if hf.get("quantization_config") is not None:
            raise ValueError("The checkpoint is quantized; load an unquantized version of it.")
        values = {f.name: hf[f.name] for f in dataclasses.fields(cls) if hf.get(f.name) is not None}
        missing = [name for name in REQUIRED if name not in values]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}, which a Llama needs; add them.")
        # transformers' default
        values.setdefault("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6)
        values["qk_norm"] = model_type.startswith("qwen3")
        values["mixture"] = mixture_from_hf(model_type, hf)
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
        """Returns a `config.json` for `from_pretrained` of the model's family (`families.py`).

        dtype: torch's name. separator, begin: the tokens after documents (eos) and before them (bos)."""
        family, values = family_of(self), dataclasses.asdict(self)
        del values["mixture"], values["qk_norm"]
        values["rope_scaling"] = _rope_to_hf(self.rope_scaling)
        return {
            "architectures": [ARCHITECTURES[family]],
            "model_type": family,
            "hidden_act": "silu",
            "torch_dtype": dtype,
            "bos_token_id": begin,
            "eos_token_id": separator,
            **values,
            **mixture_to_hf(self),
        }


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={short_repr(value)} must be a positive whole number below 2**31.")
    most = LARGEST_OF.get(name, LARGEST)
    if value > most:
        raise ValueError(f"{name}={value} is larger than any model's; it must be at most {most}.")


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
    """rope: `rope_scaling` or `rope_parameters` of a config.json, without its theta."""
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
    """Returns `[1, 2, 4]` as `1, 2 or 4`."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last
