"""Sessions written down cycle by cycle, and replayed without a model."""
