"""A worker's end: tables cut into parts, requests under way, what was read."""
