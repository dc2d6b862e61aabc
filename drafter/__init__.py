"""Sources of proposals (floor 0): lookup in the text so far, the MTP module, a recorded oracle."""
