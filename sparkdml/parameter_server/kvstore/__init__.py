"""The servers as a plain key-value store, and tables on top of it."""
