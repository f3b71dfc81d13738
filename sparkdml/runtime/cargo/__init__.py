"""Large tensors and bytes on their way between driver and workers, beside Spark's own channels."""
