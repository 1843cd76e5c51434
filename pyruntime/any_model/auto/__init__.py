"""Plan "auto": which linears of a model are cut how, without a word from its user."""

from pyruntime.any_model.auto.found_plan import auto_plan

__all__ = ["auto_plan"]
