"""The parameter server: keys and shards, the wire, consistency, replication, and the client."""
