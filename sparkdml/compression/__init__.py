"""Compression of gradients for sending: one scheme per file, with its residuals."""
