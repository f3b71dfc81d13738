"""Which topology is the fastest, by message size, number of ranks and hosts: `topology="auto"`.

Inside one host memory is taken at every size: between two ranks, and among three and four on two
cores, it was the fastest at all that were measured.

Between hosts with one rank each, the table below says up to which size a tree of our own messages
is faster than what the backend does. It was measured at 4 kB, 48 kB, 400 kB, 4 MB and 40 MB over
loopback sockets, not over a real network, on 2 cores that had other work too (torch 2.13's gloo and
Horovod 0.28.1 on Gloo, 2026-11-17): so it says what the software costs for each message, which is
what short tensors pay for. This measures it, and the memory above:

`python benchmarks/collectives.py --only sums --ranks 2 3 4 --sizes 1000 12000 100000 1000000
10000000`

"hierarchical", where some ranks share a host and others don't, isn't from a table, since no such
hosts were at hand: what goes through memory need not go through a network, of which each host then
carries one tensor in place of one for each of its ranks.
"""

from __future__ import annotations

# Number of ranks -> the bytes up to which "tree" is faster than "native".
TREE_UP_TO_BYTES = {2: 400_000, 3: 400_000, 4: 400_000}


def choose(num_bytes: int, size: int, num_hosts: int) -> str:
    """The topology for a message of this size among `size` ranks on `num_hosts` hosts."""
    if size == 1:
        return "native"
    if num_hosts == 1:
        return "shared-memory"
    if num_hosts < size:
        return "hierarchical"
    return "tree" if num_bytes <= tree_limit(size) else "native"


def tree_limit(size: int) -> int:
    """0 where nothing was measured: the backend knows best."""
    return TREE_UP_TO_BYTES.get(size, 0)
