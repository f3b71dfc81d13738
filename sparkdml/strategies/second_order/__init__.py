"""Second-order methods on the full data."""
