"""Composition: plan the memory, open the model, run cycles, emit text. The main loop is `cycle.py`."""
