"""Text around the tokens: chat templates, thinking, generation defaults. No MLX, no transformers."""
