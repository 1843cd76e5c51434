"""Plan "auto": finds out how to cut each linear of a model, without help from the user."""

from pyruntime.any_model.auto.found_plan import auto_plan

__all__ = ["auto_plan"]
