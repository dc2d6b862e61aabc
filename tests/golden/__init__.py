"""Golden files that no reference implementation made: see each folder."""
