"""Training on text: configuration, data, optimizer, loop, report."""
