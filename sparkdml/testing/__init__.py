"""Helpers for tests, users' tests included: contract suites, threads as ranks, small data sets."""
