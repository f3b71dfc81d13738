"""Runs a fitted model on the rows of a DataFrame: the plan, the worker's code, the columns."""
