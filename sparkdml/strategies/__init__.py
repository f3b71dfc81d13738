"""How workers agree: one algorithm a file, each with its loop."""
