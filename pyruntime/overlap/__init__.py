"""The ledger: records a rank's computing, waiting and reading, and reports what communication was hidden."""

from pyruntime.overlap.account import Account, AxisCost, Entry, EntryKind, Hidden, account, table, total
from pyruntime.overlap.page import write_page
from pyruntime.overlap.record import Ledger, Stretch, ledger

__all__ = [
    "Account",
    "AxisCost",
    "Entry",
    "EntryKind",
    "Hidden",
    "Ledger",
    "Stretch",
    "account",
    "ledger",
    "table",
    "total",
    "write_page",
]
