"""The target port and the engine of flashnext.

Floor 1: `mlx_flashnext.model` computes, `mlx_flashnext.experts` binds it to the store, `mlx_flashnext.engine`
composes both into a conversation. Start reading at `mlx_flashnext/engine/cycle.py`.
"""
