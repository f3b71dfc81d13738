"""A fit at the driver: what is checked, what is shipped, and what comes back as a model."""
