"""Which address, and which network interface, leads to a host."""

from __future__ import annotations

import socket

import psutil


def address_towards(host: str) -> str | None:
    """The address that this machine uses on the way to `host`, or None if there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The interface whose address this machine uses to reach `host`, or None if that is unknown."""
    source = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        # psutil writes link-local IPv6 addresses with their scope: fe80::1%eth0
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return str(name)
    return None
