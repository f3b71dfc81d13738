"""Servers that outlive a run: one group of them for several runs, each with tables of its own."""
