"""Writes checkpoints while training continues, reads them, and converts them to and from Hugging Face."""
