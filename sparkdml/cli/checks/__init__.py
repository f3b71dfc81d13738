"""The checks of `sparkdml doctor`: one file per group of checks, and the probes that they start."""
