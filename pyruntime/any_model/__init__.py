"""Any torch model over tensor-parallel ranks: `parallelize` cuts it, `verify` compares it with the whole one,
and `explain` says what its layers do."""

from pyruntime.any_model.explain import LayerReport, Report, explain
from pyruntime.any_model.parallelize import parallelize
from pyruntime.any_model.plans import PLANS, Plan
from pyruntime.any_model.verify import VerificationError, verify

__all__ = ["PLANS", "LayerReport", "Plan", "Report", "VerificationError", "explain", "parallelize", "verify"]
