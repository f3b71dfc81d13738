"""A fit at the driver: its checks, the job that is shipped to workers, and the result."""
