"""How fast sparkdml is beside its peers, measured in one interleaved run. See `peers.py`."""
