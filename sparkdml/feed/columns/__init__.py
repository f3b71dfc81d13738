"""What the feed knows of a column: one class for each kind, and the kinds that a schema has."""
