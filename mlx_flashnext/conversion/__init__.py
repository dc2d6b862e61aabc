"""Quantises the official weights into an MLX checkpoint, piece by piece. Entry: `writing.py`."""
