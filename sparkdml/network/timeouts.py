"""Every time-out and interval of the wires and of liveness, in one table.

`Timeouts` has those that say when a peer is taken for dead. They follow from one setting,
`heartbeatTimeout` of an estimator or `heartbeat_timeout` of `dml.run`; the driver makes the value
once, ships it in the plan, and every server and client uses it. A raised setting raises all of
them, so that no wire gives a process up before the driver does.

The constants below them bound something else: how long a driver is asked, how often a thread looks,
how long an end may take. Each says what it bounds, and the setting that overrides it, if any.
"""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT_TIMEOUT = 8.0  # the default of heartbeatTimeout


@dataclass(frozen=True)
class Timeouts:
    """All in seconds. The defaults in brackets are those of heartbeatTimeout=8."""

    heartbeat_timeout: float = HEARTBEAT_TIMEOUT  # without a beat, a task is lost

    @property
    def beat(self) -> float:
        """Between two beats of a task on the control wire [1]."""
        return min(1.0, self.heartbeat_timeout / 4)

    @property
    def cause(self) -> float:
        """After a failure that may be another's effect, until it is reported as the cause [2].

        A lost peer shows as errors on the others, sometimes sooner than the loss itself is seen. At
        most 10 s, as the run waits for it to fail.
        """
        return min(max(2.0, self.heartbeat_timeout / 4), 10.0)

    @property
    def connect(self) -> float:
        """For a connection and its handshake, at either end: control, relay, rows [10]."""
        return max(10.0, self.heartbeat_timeout)

    @property
    def driver_answer(self) -> float:
        """For the driver's answer to a question of a task [30]."""
        return max(30.0, self.heartbeat_timeout)

    @property
    def silent_host(self) -> float:
        """Without an acknowledgement of the other host, a relayed operation fails [30]."""
        return max(30.0, self.heartbeat_timeout)

    @property
    def rows_answer(self) -> float:
        """For rows of another worker; after that its rows count as gone [60]."""
        return max(60.0, self.heartbeat_timeout)

    @property
    def server_lost(self) -> float:
        """Without a sign of a member of a server group, others take its parts or its place [5]."""
        return max(4 * SERVER_BEAT_SECONDS, self.heartbeat_timeout * 5 / 8)

    def __str__(self) -> str:
        return f"heartbeatTimeout={self.heartbeat_timeout:g}"


# -- the control wire ------------------------------------------------------------------------------

# For a worker's last messages, and for each of its threads, when it ends.
CONTROL_CLOSE_SECONDS = 5.0
# For the threads of a listener's connections, when it is closed.
LISTENER_CLOSE_SECONDS = 5.0
# For the driver to end the run, at a worker whose peer is about to report a bad row.
RUN_END_SECONDS = 60.0
# For the driver's clock, when a worker aligns its own with it.
CLOCK_ANSWER_SECONDS = 2.0
# For Spark's tasks to leave after they were cancelled; Spark kills their processes after 2 s.
TASKS_LEAVE_SECONDS = 15.0
# For a task on Spark Connect to reach the client's machine, when slots are asked for.
CONNECT_PROBE_SECONDS = 5.0

# -- relay and blobs -------------------------------------------------------------------------------

# For operations of the store that are under way, when the relay is closed.
RELAY_CLOSE_SECONDS = 30.0

# -- rows of other workers -------------------------------------------------------------------------

# Between two questions for a piece that another worker still has.
LEASE_ASK_AGAIN_SECONDS = 0.05
# For rows that can't be reached, until their owner is back.
LEASE_PATIENCE_SECONDS = 60.0
# Without a row used, after which the rest of a lease goes to another worker.
LEASE_SECONDS = 60.0

# -- rendezvous and communicators ------------------------------------------------------------------

# For one request to the key-value server.
KEY_VALUE_REQUEST_SECONDS = 10.0
# For a key that is not there yet: the client asks again every 10 ms, and holding the answer back
# until the key arrives saves those rounds; it must stay well below any time-out of the client.
KEY_VALUE_HOLD_SECONDS = 0.25
# For all ranks to open a communicator; the argument arrival_timeout_seconds overrides it.
ARRIVAL_TIMEOUT_SECONDS = 120.0
# In one collective: torch's own default. A lost peer closes its sockets and is noticed at once; one
# that hangs is noticed by the driver; a collective that merely waits for a slow rank must not fail.
COLLECTIVE_SECONDS = 1800.0
# For the other ranks in an exchange through the driver, where workers need not step together.
DRIVER_EXCHANGE_SECONDS = 600.0
# Between two looks for the driver's alarm, in a collective.
ALARM_LOOK_SECONDS = 0.5
# The same where peers share memory, which costs less.
SHARED_MEMORY_LOOK_SECONDS = 0.2
# Between two looks for a failure, while messages of single peers are waited for.
PEERS_LOOK_SECONDS = 0.5

# -- parameter servers -----------------------------------------------------------------------------

# Between two signs of life of a server or a client to the driver.
SERVER_BEAT_SECONDS = 0.25
# For a server to be reached or replaced; the strategy's timeout_seconds overrides it. A value below
# `Timeouts.server_lost` gives up before a lost server is replaced.
SERVER_REQUEST_SECONDS = 60.0
# Between two HELLOs to a server that has not answered, and before a refused request is resent.
SERVER_PING_SECONDS = 0.5
SERVER_RETRY_SECONDS = 0.05
# Before a replica that has not acknowledged a change is sent it again.
REPLICA_RESEND_SECONDS = 1.0
# For a server's threads, when it ends.
SERVER_CLOSE_SECONDS = 10.0
# For the tasks of a standing group of servers, when it is closed.
SERVER_GROUP_LEAVE_SECONDS = 60.0
# For one server's answer to a reader of snapshots, which then asks again.
SNAPSHOT_ANSWER_SECONDS = 2.0
