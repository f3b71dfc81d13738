"""Linear algebra over the rows of a DataFrame with torch, in the same workers that train."""
