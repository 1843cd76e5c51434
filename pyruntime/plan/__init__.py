"""Plans of a run as data, made by pure functions: how a sequence is cut into slices for a pipeline."""

from pyruntime.plan.joint import Joint, best_joint
from pyruntime.plan.slice_cost import Fit, SliceCost, fit, table
from pyruntime.plan.stage_costs import StageCosts
from pyruntime.plan.terapipe import (
    Slicing,
    best_slicing,
    best_uniform_slicing,
    score_slicing,
    uniform_slicing,
)

__all__ = [
    "Fit",
    "Joint",
    "SliceCost",
    "Slicing",
    "StageCosts",
    "best_joint",
    "best_slicing",
    "best_uniform_slicing",
    "fit",
    "score_slicing",
    "table",
    "uniform_slicing",
]
