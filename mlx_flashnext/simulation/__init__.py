"""Recorded routes through the store of a machine that is not here, on a virtual clock."""
