"""What `python -m pyruntime tune` measures on a machine, the file that keeps it, and how ops come by it.

`tier="auto"` takes the measured choices, and a fixed rule where there are none. docs/how-to/plan-and-tune.md
tells the rest.
"""
