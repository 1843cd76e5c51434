"""`python -m pyruntime train | generate | doctor | schedule`."""

from pyruntime.cli.main import main

__all__ = ["main"]
