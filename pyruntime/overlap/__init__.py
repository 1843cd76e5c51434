"""Which communication was hidden behind what: the ledger, and what follows from it."""

from pyruntime.overlap.account import Account, Axis, Entry, Hidden, Kind, account, table, total
from pyruntime.overlap.page import write_page
from pyruntime.overlap.record import Ledger, Stretch, ledger

__all__ = [
    "Account",
    "Axis",
    "Entry",
    "Hidden",
    "Kind",
    "Ledger",
    "Stretch",
    "account",
    "ledger",
    "table",
    "total",
    "write_page",
]
