"""The worker's side of a run: the task's entry point, its context, its end of every connection."""
