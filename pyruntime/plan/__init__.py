"""Plans of a run as data, made by pure functions: the fastest mesh that fits, and slices of a sequence for a
pipeline. Independent of model code, executor and trainer."""
