"""Text, its tokens on disk, and the batches that a run makes of them."""
