"""Sockets under every hand-written server: the listener, the handshake, connections, time-outs."""
