"""Checkpoints with a lineage: what they hold, where they lie, when, how to resume."""
