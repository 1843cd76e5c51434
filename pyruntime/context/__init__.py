"""Context parallelism: a sequence cut over ranks, and attention that sees all of it."""

from pyruntime.context.attention import ring_attention
from pyruntime.context.context import Context
from pyruntime.context.layouts import LAYOUTS, check_layout, positions, take_shard

__all__ = ["LAYOUTS", "Context", "check_layout", "positions", "ring_attention", "take_shard"]
