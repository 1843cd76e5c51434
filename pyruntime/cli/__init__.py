"""`python -m pyruntime train | generate | doctor | schedule | profile | plan | tune`."""

from pyruntime.cli.main import main

__all__ = ["main"]
