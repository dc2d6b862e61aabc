"""Text around the tokens: chat templates, thinking, generation defaults. Imports neither MLX nor
transformers.
"""
