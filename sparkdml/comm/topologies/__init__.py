"""Allreduce algorithms over point-to-point messages: one topology per file.

All have the same signature:

    reduce_(messages, rank, size, tensor, combine)

`tensor` is flat and contiguous, of the same length on every rank. Afterwards it holds the result,
with the same bits on every rank, as each item is added up by one rank and copied from there.
`combine(total, other)` changes `total`. A rank waits only for messages that it needs. In the
docstrings, S is the tensor's size and n the number of ranks.
"""
