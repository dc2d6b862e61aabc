"""Which record leaves when a slot is needed: one policy a file, chosen by name in store.py.

A policy sees the demands of one layer and nothing else: no clock, no I/O, no slots, no pins. The same history
gives the same victims, so that a recorded trace can be replayed against any of them.
"""
