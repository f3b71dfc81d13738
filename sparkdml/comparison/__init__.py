"""Strategies side by side, and whether to distribute at all: `dml.compare` and `dml.advise`."""
