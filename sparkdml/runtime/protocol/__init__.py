"""What driver and workers exchange: the plan, roles, connections, blobs and results."""
