"""A compact Llama on tensor-parallel linears, and its interchange with Hugging Face checkpoints."""

from pyruntime.llama.config import LlamaConfig, RopeScaling
from pyruntime.llama.generate import KVCache, generate, generate_steps
from pyruntime.llama.hf import load_hf, load_weights, save_hf
from pyruntime.llama.model import Llama
from pyruntime.llama.presets import PRESETS, preset

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
