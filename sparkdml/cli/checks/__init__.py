"""What `sparkdml doctor` looks at: a file for each group of checks, and the probes they start."""
