"""A compact Llama on tensor-parallel linears that reads and writes Hugging Face checkpoints."""

from typing import TYPE_CHECKING

from pyruntime.lazy import names_of
from pyruntime.llama.config import LlamaConfig, RopeScaling
from pyruntime.llama.presets import PRESETS, preset

if TYPE_CHECKING:
    from pyruntime.llama.generation import KVCache, generate, generate_steps
    from pyruntime.llama.hf import load_hf, load_weights, save_hf
    from pyruntime.llama.model import Llama

__all__ = [
    "PRESETS",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "generate",
    "generate_steps",
    "load_hf",
    "load_weights",
    "preset",
    "save_hf",
]

# Imported at first use: a caller that needs only shapes does not load torch.
_PLACES = {
    **{name: "pyruntime.llama.generation" for name in ("KVCache", "generate", "generate_steps")},
    **{name: "pyruntime.llama.hf" for name in ("load_hf", "load_weights", "save_hf")},
    "Llama": "pyruntime.llama.model",
}
__getattr__ = names_of(__name__, _PLACES)
