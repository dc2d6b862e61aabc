"""Golden traces: made by `python -m tests.golden.traces.generate`, replayed without a model."""
