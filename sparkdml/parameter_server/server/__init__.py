"""The server's end: partitions, clocks, replication."""
