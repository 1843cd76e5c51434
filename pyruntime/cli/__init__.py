"""`python -m pyruntime train | generate | doctor | mesh | schedule | profile | plan | tune`."""

from pyruntime.cli.main import main

__all__ = ["main"]
