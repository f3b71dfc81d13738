"""Synchronous SGD with backup workers: the first n gradients of a step count."""
