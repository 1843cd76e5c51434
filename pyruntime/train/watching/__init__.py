"""Watches a run: peak FLOP/s, prediction and metrics of each step, and traces of single steps."""
