"""Collectives among the ranks of one host through shared memory, without sockets."""
