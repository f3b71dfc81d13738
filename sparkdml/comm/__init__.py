"""How ranks talk to each other: one small interface, one file for each implementation."""
