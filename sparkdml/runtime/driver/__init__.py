"""The driver's side of a run: checks, Spark jobs, the control server, recovery."""
