"""`python -m pyruntime train | generate | convert | doctor | mesh | schedule | profile | plan | tune`."""

from pyruntime.cli.main import main

__all__ = ["main"]
