"""Bytes on SSD to bytes in slots: the storage floor of flashnext. No MLX, no tensors, no model."""
