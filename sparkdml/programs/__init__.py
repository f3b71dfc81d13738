"""Programs that are parallel in the data and in the model: schedule, push, pull."""
