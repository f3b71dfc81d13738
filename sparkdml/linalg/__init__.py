"""Linear algebra over the rows of a DataFrame, by torch, in the same gangs that train."""
