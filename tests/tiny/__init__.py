"""Tiny checkpoints, tokenizer and reference sources shared by the whole test tree."""
