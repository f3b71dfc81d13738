"""One file a contender, and `*_rank.py` for what runs in the processes that they launch.

It imports nothing: a bare script under torchrun must not pay for the other contenders.
"""
