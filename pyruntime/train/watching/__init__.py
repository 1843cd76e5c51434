"""Watching a run: what each step is compared with, where its figures go, and traces of single steps."""
