"""A fitted model on the rows of a DataFrame: what is shipped, how it runs, what comes back."""
