"""Sources of proposals (floor 0): the text so far, the MTP module, DFlash drafts, a recorded oracle."""
