"""Any torch model over tensor-parallel ranks: `parallelize` cuts it, `verify` compares it with the whole one,
`explain` says what its layers do, and `check_composition` refuses layers that do not fit together."""

from pyruntime.any_model.compositions import check_composition
from pyruntime.any_model.explain import LayerReport, Report, explain
from pyruntime.any_model.parallelize import parallelize
from pyruntime.any_model.plans import PLANS, Plan
from pyruntime.any_model.verify import VerificationError, verify

__all__ = [
    "PLANS",
    "LayerReport",
    "Plan",
    "Report",
    "VerificationError",
    "check_composition",
    "explain",
    "parallelize",
    "verify",
]
