"""Pipeline schedules as data: made, checked, simulated and drawn without ranks and without tensors.

`make_schedule` makes a schedule by name, `check` finds errors in one, `simulate` computes how long it takes.
"""

from pyruntime.pipeline.actions import Action, Kind, Schedule, with_transfers
from pyruntime.pipeline.closed_forms import bubble_1f1b, bubble_interleaved, bubble_zb_h1, closed_form_bubble
from pyruntime.pipeline.plot import png, text
from pyruntime.pipeline.schedules import KINDS, make_schedule, placement_of
from pyruntime.pipeline.simulated import Costs, Span, Timeline, simulate
from pyruntime.pipeline.table import from_csv, to_csv
from pyruntime.pipeline.validate import ScheduleError, check

__all__ = [
    "KINDS",
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "bubble_1f1b",
    "bubble_interleaved",
    "bubble_zb_h1",
    "check",
    "closed_form_bubble",
    "from_csv",
    "make_schedule",
    "placement_of",
    "png",
    "simulate",
    "text",
    "to_csv",
    "with_transfers",
]
