"""Ranks of one host agree through memory that all of them have mapped: no socket."""
