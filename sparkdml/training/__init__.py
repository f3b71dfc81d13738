"""The user's part of a run: module, loss, optimizer, metrics. Knows nothing of communication."""
