"""Communication among ranks: one small interface, and one file or folder per implementation."""
