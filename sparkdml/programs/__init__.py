"""Data- and model-parallel programs in Petuum's model: schedule, push, pull."""
