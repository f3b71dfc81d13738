"""The driver's side of peer discovery: the two stores in which ranks leave their addresses.

Torch's process groups meet in a TCPStore, Horovod's in an HTTP key-value store. Both listen on one
address of the driver, never on all of them. A submission gets a `Rendezvous` of its own, so that
nothing of an earlier attempt can be found in it.
"""

from __future__ import annotations

import socket
from types import TracebackType

from torch._C._distributed_c10d import TCPStore

from sparkdml.comm.alarm import Alarm
from sparkdml.comm.interface import interface_towards
from sparkdml.comm.key_value_server import KeyValueServer
from sparkdml.errors import ParameterError, SetupError

_EVERYWHERE = ("", "0.0.0.0", "::", "*")


class Rendezvous:
    """Both stores, open until `close`; `host` is the driver's address as the workers see it."""

    def __init__(self, host: str) -> None:
        if host in _EVERYWHERE:
            raise ParameterError(
                "host",
                host,
                "one address of this machine",
                "The stores are unauthenticated and must not listen on every interface.",
            )
        self.host = host
        try:
            self._key_values = KeyValueServer(host)
            try:
                self._store: TCPStore | None = _tcp_store(host)
            except BaseException:
                self._key_values.close()
                raise
        except OSError as error:
            raise SetupError(
                f"the driver can't listen on {host!r}: {error}. Set spark.driver.host (or "
                "spark.driver.bindAddress) to an address of this machine that workers can reach."
            ) from error
        self.kv_port = self._key_values.port
        self.store_port = int(self._store.port)

    def serve(self, backend: str) -> None:
        """What a backend needs beside the stores: MPI a server of names."""
        if backend == "mpi" and self._store is not None:
            from sparkdml.comm.mpi_names import SERVER_KEY, name_server

            self._store.set(SERVER_KEY, name_server(interface_towards(self.host)))

    def sound_alarm(self, reason: str) -> None:
        """Make every rank that waits in a collective raise, with this reason, within a second."""
        if self._store is not None:
            Alarm(self._store).sound(reason)

    def close(self) -> None:
        """Stop both servers; a second call does nothing."""
        self._key_values.close()
        self._store = None  # the last reference: its destructor stops the server's thread

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _tcp_store(host: str) -> TCPStore:
    # Left to itself, TCPStore listens on every interface: so it gets a socket that is bound.
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen(4096)
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        listener.detach()  # the store owns it now
    return store
