"""How checkpoints are written while training goes on, read back, and turned into Hugging Face's."""
