"""A run: a plan is shipped, a driver launches and watches, workers answer, a result comes back."""
