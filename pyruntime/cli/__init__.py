"""`python -m pyruntime train | generate | doctor`."""

from pyruntime.cli.main import main

__all__ = ["main"]
