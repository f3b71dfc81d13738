"""Topologies of the literature, to choose by name: `topology="auto"` never takes them."""
