"""What `python -m pyruntime tune` measures on a machine, the file that keeps it, and how ops come by it.

The measured choices are those of `tier="auto"`: with them it starts settled instead of trying the tiers in
the first calls of each shape. docs/tuning.md tells the rest.
"""
