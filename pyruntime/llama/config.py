"""The sizes of a Llama model as data, and their translation to and from a Hugging Face `config.json`.

Beside Llama itself these are models that differ from it in a few points, each a field: experts in place of a
layer's feed-forward network, normalised queries and keys, biases, a window of attention (`families.py`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pyruntime.choices import LORA_ATTENTION
from pyruntime.llama.families import (
    ARCHITECTURES,
    DIFFERENCES,
    differences_from_hf,
    differences_to_hf,
    family_of,
    with_defaults,
)
from pyruntime.llama.mixture import Mixture
from pyruntime.llama.rope_scaling import RopeScaling, rope_from_hf, rope_of, rope_to_hf
from pyruntime.llama.sizes import LARGEST, check_number, check_size
from pyruntime.plan.mesh import divisors
from pyruntime.plan.models import LatentAttention, keys_seen
from pyruntime.text import short_repr

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
"""Range of sampling temperatures: divided by one in fp32, any model's logits stay finite and distinct."""
LEAST_THETA, MOST_THETA = 1.0, 1e12
"""Range of rope_theta: below, later channels would turn faster than the first; above, most do not turn."""
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_PARTS = {"rope_scaling": RopeScaling, "mixture": Mixture, "latent": LatentAttention}
"""Keys of a config.json without a default."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama decoder; fields have Hugging Face's names and meanings.

    `head_dim=None` becomes `hidden_size // num_attention_heads`, or the latent attention's; with that its
    value does not count. `num_key_value_heads=None` becomes `num_attention_heads`. Raises `ValueError` for
    numbers that make no model.
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
    attention_bias: bool = False  # biases of q, k, v and o
    mlp_bias: bool = False
    initializer_range: float = 0.02  # standard deviation of the initial weights
    qk_norm: bool = False  # whether the features of every query and key head are normalised (Qwen3)
    mixture: Mixture | None = None  # the experts of layers; None: every layer has one feed-forward network
    qkv_bias: bool = False  # biases of q, k and v, but not of o (Qwen2)
    sliding_window: int | None = None  # keys that a query sees, its own included; None: all up to its own
    first_window_layer: int = 0  # the layers before this one have no window
    merged_files: bool = False  # one tensor of q, k and v, and one of gate and up, in checkpoints (Phi-3)
    norms_after: bool = False  # norms of attention's and the network's results, not inputs (OLMo 2)
    qk_norm_of_all: bool = False  # whether qk_norm is over the features of all heads together (OLMo 2)
    latent: LatentAttention | None = None  # queries, keys and values of latent features (DeepSeek-V3)

    def __post_init__(self) -> None:
        for name in (*REQUIRED, "max_position_embeddings"):
            check_size(name, getattr(self, name))
        for name in (field.name for field in dataclasses.fields(self) if field.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={short_repr(getattr(self, name))} must be true or false.")
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind | None):
                raise ValueError(
                    f"{name}={short_repr(getattr(self, name))} must be a {kind.__name__} or None."
                )
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            check_number(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))  # an int may be beyond int64
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.latent is not None:
            self._check_latent(self.latent)
            object.__setattr__(self, "head_dim", self.latent.head_dim)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}; change one of them or give head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_size("num_key_value_heads", self.num_key_value_heads)
        check_size("head_dim", self.head_dim)
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
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and self.rope_theta == 1.0:
            raise ValueError("rope_type='yarn' needs a rope_theta above 1, or all channels turn alike.")
        if not 0.0 <= self.initializer_range < 1.0:
            raise ValueError(f"initializer_range={self.initializer_range} must be at least 0 and below 1.")
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        if type(self.first_window_layer) is not int or not 0 <= self.first_window_layer <= LARGEST:
            raise ValueError(
                f"first_window_layer={short_repr(self.first_window_layer)} must be the number of a layer."
            )
        if self.qk_norm_of_all and not self.qk_norm:
            raise ValueError("qk_norm_of_all says how queries and keys are normalised; set qk_norm too.")
        if self.mixture is not None and self.mixture.dense_layers >= self.num_hidden_layers:
            raise ValueError(
                f"{self.mixture.dense_layers} dense layers of {self.num_hidden_layers} leave none with "
                "experts; use fewer."
            )
        if family_of(self) == "mixtral":
            # Its config.json has one number for both, and no layer needs the other.
            object.__setattr__(self, "intermediate_size", self.mixture.width)  # type: ignore[union-attr]

    def _check_latent(self, latent: LatentAttention) -> None:
        for name in ("kv_rank", "rope_dim", "nope_dim", "value_dim"):
            check_size(name, getattr(latent, name))
        if latent.q_rank is not None:
            check_size("q_rank", latent.q_rank)
        if type(latent.interleaved) is not bool:
            raise ValueError(f"rope_interleave={short_repr(latent.interleaved)} must be true or false.")
        if latent.rope_dim % 2:
            raise ValueError(
                f"rope_dim={latent.rope_dim} must be even: rotary embedding turns pairs of channels."
            )
        if latent.value_dim > latent.head_dim:
            raise ValueError(
                f"Values of {latent.value_dim} features are wider than queries and keys of {latent.head_dim} "
                "(nope_dim and rope_dim), which attention kernels do not compute."
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"Latent attention makes a key for each of num_attention_heads={self.num_attention_heads}; "
                f"leave out num_key_value_heads={self.num_key_value_heads}."
            )

    def check_tp(self, tp: int, ep: int | None = None) -> None:
        """Raises `ValueError` unless `tp` divides the key/value heads and the FFN columns, and `ep` (None:
        tp) leaves each rank an expert. They need not divide vocabulary, experts and the number of tokens."""
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
        over, name = (tp, "tp") if ep in (None, tp) else (ep, "ep")
        if self.mixture is not None and -(-self.mixture.experts // over) * (over - 1) >= self.mixture.experts:
            raise ValueError(
                f"{name}={over} leaves a rank without one of the {self.mixture.experts} experts, which are "
                "cut into equal chunks; use fewer ranks or more experts."
            )

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has one feed-forward network in place of experts."""
        return self.mixture is None or self.mixture.dense_layers > 0

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return self.mixture is not None and self.mixture.has(layer)

    def window_of(self, layer: int) -> int | None:
        """The keys that a query of that layer sees, its own included; None: all up to its own."""
        return self.sliding_window if layer >= self.first_window_layer else None

    @property
    def windowed_layers(self) -> int:
        """Number of layers with a window."""
        return sum(self.window_of(layer) is not None for layer in range(self.num_hidden_layers))

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotary embedding turns."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def why_no_slices(self, slices: int, tp: int, *, over_tp: bool) -> str:
        """Says what of the model so many causal slices do not know over tp ranks; "" if nothing. over_tp:
        whether experts lie over these ranks."""
        if self.latent is not None:
            return "latent attention"
        if self.norms_after:
            return "norms of the results of attention and networks"
        # A group has slots for so many flights only.
        if self.mixture is not None and tp > 1 and slices > 2:
            return f"experts, over tp={tp} ranks of which at most 2 are possible"
        if self.mixture is not None and tp > 1 and over_tp and self.mixture.shared_width:
            return "a shared expert, unless ep puts the other experts over other ranks than tp"
        return ""

    @property
    def attention_scale(self) -> float | None:
        """Factor of attention's scores; None: 1 / sqrt(head_dim)."""
        if self.latent is None or self.rope_scaling is None or self.rope_scaling.score_factor == 1.0:
            return None
        return self.rope_scaling.score_factor / math.sqrt(self.head_dim)

    @property
    def attention_vectors(self) -> int:
        """Number of biases and weights of norms within a layer's attention."""
        if self.latent is not None:
            biases = self.latent.features + self.hidden_size if self.attention_bias else 0
            return (self.latent.q_rank or 0) + self.latent.kv_rank + biases
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        normed = (heads + groups if self.qk_norm_of_all else 2) if self.qk_norm else 0
        biased = heads + 2 * groups if self.attention_bias or self.qkv_bias else 0
        return (normed + biased) * self.head_dim + (self.hidden_size if self.attention_bias else 0)

    def parameter_count(self) -> int:
        """Number of parameters; a tied head and embedding count once.

        With D hidden_size, L layers, F intermediate_size, V vocab_size, H and G query and key/value heads of
        size d::

            V D (embedding) + V D (head, unless tied) + D (last norm)
            + L (D (H + 2 G) d  +  H d D  +  3 D F  +  2 D)     [+ biases if the config has them]

        In a layer with E experts of width F and a shared one of width S, 3 D F becomes 3 D F E + E D (router)
        + 3 D S + D (its gate). With latent attention D (H + 2 G) d becomes what makes latent features, and
        heads of them.
        """
        d = self.hidden_size
        each = 2 * d + self.attention_vectors
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
            "o_proj": (hidden, heads * self.value_dim),
        }
        return attention | {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}

    def why_no_adapters(self, targets: Iterable[str]) -> str:
        """Says which low-rank adapters this model cannot have, without full stop; empty if it has all."""
        if self.latent is not None and (of_latent := [name for name in targets if name != "o_proj"]):
            return (
                f"latent attention has adapters of its o_proj alone, and {', '.join(of_latent)} are no "
                "linears of a layer with it, or belong to experts; take the target o_proj"
            )
        others = [name for name in targets if name not in LORA_ATTENTION]
        if self.mixture is None or not others:
            return ""
        return (
            f"a model with experts has adapters of attention alone, and {', '.join(others)} belong to its "
            f"experts, which stay as they are; take the targets {' '.join(LORA_ATTENTION)}"
        )

    def adapter_parameter_count(self, rank: int, targets: Iterable[str]) -> int:
        """Number of parameters of low-rank adapters of the linears in `targets`, in all layers."""
        shapes = self.linear_shapes()
        return self.num_hidden_layers * rank * sum(sum(shapes[name]) for name in targets)

    def flops_per_token(
        self, seq_len: int, *, training: bool = True, adapters: int = 0, shares: Sequence[float] = ()
    ) -> int:
        """Model FLOPs per token of a sequence of `seq_len` tokens, as MFU counts them.

        The forward pass; a multiply-add counts as two, and only the needed half of causal attention counts::

            2 (L (D (H + 2 G) d + H d D + 3 D F) + V D)  +  L * 2 * seq_len * H d

        Q K^T and P V are 2 seq_len H d each per token (d that of values for P V), halved by causality; with a
        window of W < seq_len keys seq_len / 2 becomes W - W^2 / (2 seq_len). Of experts those count that a
        token goes to, of width F each, the shared one and the router. Training is three times that: the
        backward pass has two GEMMs for each of the forward's. Recomputation, norms and element-wise
        operations do not count. adapters: parameters of low-rank adapters that a token meets, if only these
        train: then the weights have no gradient, and the backward pass has one GEMM for each of theirs.
        shares: the share of the tokens that goes through each layer; empty: all go through all.
        """
        of_layers = list(enumerate(shares or (1,) * self.num_hidden_layers))
        layers = sum(share * self.layer_matmul_parameters(n, used=True) for n, share in of_layers)
        matmul = 2 * (int(layers) + self.vocab_size * self.hidden_size)
        seen = sum(share * 2 * keys_seen(seq_len, self.window_of(n)) for n, share in of_layers)
        attention = int(seen * self.num_attention_heads * (self.head_dim + self.value_dim))
        whole = (matmul + attention) * (3 if training else 1)
        return whole - matmul + 6 * adapters if training and adapters else whole

    def layer_matmul_parameters(self, layer: int = 0, *, used: bool = False) -> int:
        """Number of weights of the linears of the layer of that number, without biases. used: of those that
        one token uses, where the layer has experts."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (2 * heads + 2 * groups)
        if self.latent is not None:
            attention = sum(n * k for n, k in self.latent.shapes(self.hidden_size, heads))
            attention += heads * self.value_dim * self.hidden_size
        if self.mixture is not None and self.mixture.has(layer):
            return attention + self.mixture.parameters(self.hidden_size, used=used)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def _dense(self) -> int:
        """Layers without experts."""
        return self.num_hidden_layers if self.mixture is None else self.mixture.dense_layers

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """Returns the config whose `dataclasses.asdict` has these values. Raises TypeError or ValueError."""
        parts = {name: kind(**values[name]) for name, kind in _PARTS.items() if values.get(name)}
        return cls(**values | parts)

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> LlamaConfig:
        """Returns the config of a parsed Hugging Face `config.json` (keys of transformers 4 or 5).

        Raises `ValueError` for another architecture or for a feature that this model does not have.
        """
        model_type = hf.get("model_type", "llama")
        if model_type not in tuple(ARCHITECTURES):  # it may be a list
            raise ValueError(
                f"config.json describes model_type={short_repr(model_type)}; only "
                f"{', '.join(map(repr, ARCHITECTURES))} can be loaded; other models train in a loop of "
                "your own, with pyruntime.parallelize."
            )
        if hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(
                f"hidden_act={short_repr(hf['hidden_act'])} is not supported; Llama's activation is 'silu'."
            )
        if hf.get("quantization_config") is not None:
            raise ValueError("The checkpoint is quantized; load an unquantized version of it.")
        hf = with_defaults(model_type, hf)
        differences = differences_from_hf(model_type, hf)
        own = {f.name for f in dataclasses.fields(cls)} - differences.keys()
        values = {name: hf[name] for name in own if hf.get(name) is not None} | differences
        missing = [name for name in REQUIRED if name not in values]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}, which a Llama needs; add them.")
        rope = rope_of(hf)
        theta = rope.pop("rope_theta", None)
        if theta is not None:
            check_number("rope_theta", theta)
            values["rope_theta"] = float(theta)
        values["rope_scaling"] = rope_from_hf(rope, values.get("max_position_embeddings", 2048))
        return cls(**values)

    def to_hf(
        self, dtype: str = "float32", separator: int | None = None, begin: int | None = None
    ) -> dict[str, Any]:
        """Returns a `config.json` for `from_pretrained` of the model's family (`families.py`).

        dtype: torch's name. separator, begin: the tokens after documents (eos) and before them (bos)."""
        family, values = family_of(self), dataclasses.asdict(self)
        for name in DIFFERENCES:
            del values[name]
        values["rope_scaling"] = rope_to_hf(self.rope_scaling)
        return {
            "architectures": [ARCHITECTURES[family]],
            "model_type": family,
            "hidden_act": "silu",
            "torch_dtype": dtype,
            "bos_token_id": begin,
            "eos_token_id": separator,
            "pad_token_id": None,  # a family may have one that is not in the vocabulary
            **values,
            **differences_to_hf(self),
        }


def _either(values: list[int]) -> str:
    """Returns `[1, 2, 4]` as `1, 2 or 4`."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last
