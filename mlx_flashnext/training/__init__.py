"""Makes drafts and route hints on an open target: capture, train, calibrate, promote."""
