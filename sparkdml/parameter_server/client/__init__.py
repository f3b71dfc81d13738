"""A worker's client of the servers: tables cut into parts, requests in flight, cached reads."""
