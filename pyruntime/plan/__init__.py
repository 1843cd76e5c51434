"""Plans of a run as data, made by pure functions: which mesh fits and is fastest, and how a sequence is cut
into slices for a pipeline. Nothing here knows of a model's code, of an executor or of a trainer."""
