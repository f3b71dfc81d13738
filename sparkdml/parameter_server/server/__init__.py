"""The server's end: shards, clocks, replication."""
