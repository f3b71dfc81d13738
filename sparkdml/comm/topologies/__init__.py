"""Allreduce written out over messages between two ranks: one way to arrange them a file.

All have the same form, and need nothing but messages:

    reduce_(messages, rank, size, tensor, combine)

`tensor` is flat and contiguous, of the same length on every rank, and holds the result afterwards,
with the same bits everywhere: each item is added up in one place and copied from there.
`combine(total, other)` changes `total`. A rank waits only for messages that it needs. S below is
the tensor's size, n the number of ranks.
"""
