"""The local address and network interface that lead to a host."""

from __future__ import annotations

import socket

import psutil


def address_towards(host: str) -> str | None:
    """Return the address from which this machine reaches `host`, or None if it has no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # on a datagram socket, this chooses the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """Return the interface through which this machine reaches `host`, or None if unknown."""
    source = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        # psutil writes link-local IPv6 addresses with their scope: fe80::1%eth0
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return str(name)
    return None
