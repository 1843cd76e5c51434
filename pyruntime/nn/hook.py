"""Where a layer meets the model around it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LayerHook:
    """Every call of a layer goes through the hook that its constructor was given. This one does nothing.

    `parallelize` gives layers hooks that know the model around them (any_model/layer_hooks.py)."""

    def call(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The result of a call. `layer.compute` is what the layer does by itself."""
        return layer.compute(*args, **kwargs)

    def cuts_rows(self, layer: Any) -> bool:
        """For explain(): whether a rank had its own rows alone in the layer's last call."""
        return layer.sequence_parallel

    def out_features(self, linear: Any) -> int:
        """For explain(): how many features of a rank the op of the linear's last call multiplied."""
        return linear.matrix.size(0)
