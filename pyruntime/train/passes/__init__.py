"""The forward and backward passes of a step: of the whole model, or of the stages of a pipeline."""
