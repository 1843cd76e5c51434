"""Text, its tokens on disk, and the batches of a run."""
