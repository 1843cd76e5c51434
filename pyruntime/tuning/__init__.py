"""Tuning: measures which tier is fastest on a machine (`python -m pyruntime tune`), keeps it in a file, and
gives it to the ops.

`tier="auto"` takes the measured choices, or a fixed rule where there are none (docs/how-to/plan-and-tune.md).
"""
