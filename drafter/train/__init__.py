"""Training of drafts: captures of a target, losses, loop, evaluation. Imported by nothing that answers."""
