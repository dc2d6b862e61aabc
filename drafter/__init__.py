"""Guessers of tokens and routes (floor 0).

This floor arrives with the speculation steps. Until then a cycle verifies a block of one row: the anchor
alone, which is plain decoding (`mlx_flashnext/engine/cycle.py`, k = 0).
"""
