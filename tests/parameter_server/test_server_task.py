"""The counts of servers reach the driver in events, besides those of workers."""

from functools import partial
from types import SimpleNamespace

from sparkdml.parameter_server import server_task
from sparkdml.parameter_server.consistency import BSP, TAP
from sparkdml.parameter_server.stats import NodeStats
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.training.plan import Schedule


class Kept(ParameterServer):
    """One whose servers' contexts can be looked at."""

    contexts = []

    def _serve(self, ctx):
        Kept.contexts.append(ctx)
        super()._serve(ctx)


def test_servers_and_workers_count_the_same(monkeypatch):
    Kept.contexts = []
    for consistency in (BSP(), TAP()):
        trained = train_served(
            partial(Kept, consistency=consistency),
            digits_plan(lr=0.1),
            Schedule(2, 8),
            cut(digits(96), [48, 48]),
        )
        servers, Kept.contexts = Kept.contexts, []
        last = {e["seat"]: e for ctx in servers for e in ctx.events if e["kind"] == "server"}
        events = list(last.values())
        told = {id(event): event for one in trained for event in one.ctx.events}
        clients = [event for event in told.values() if event["kind"] == "client"]
        assert last.keys() == {0, 1}
        # The clients of the last moments, after the last epoch, tell no one: pulls may be more.
        pushed = sum(event["pushes"] for event in clients)
        assert pushed == sum(event["pushes"] for event in events) > 0
        assert sum(e["pulls"] for e in clients) <= sum(e["pulls"] for e in events)
        assert sum(e["bytes_pulled"] for e in clients) <= sum(e["bytes_pulled"] for e in events)
        assert sum(e["bytes_pushed"] for e in events) >= sum(e["bytes_pushed"] for e in clients)
        assert all(event["queue"] == 0 for event in events)
        if consistency == BSP():
            assert max(event["longest_queue"] for event in events) >= 1


def test_only_changes_are_told_and_not_with_every_beat(monkeypatch):
    told = []
    context = SimpleNamespace(event=lambda kind, **fields: told.append((kind, fields)))
    monkeypatch.setattr(server_task.time, "monotonic", lambda: now)
    now = 100.0
    reporter = server_task.Reporter(context)
    reporter.tell()
    stats = NodeStats()
    reporter.watch(SimpleNamespace(server_id=3, stats=stats))
    stats.pushes = 5
    now += 1.0
    reporter.report_periodically()
    assert told == []
    now += 1.5
    reporter.report_periodically()
    reporter.tell()
    assert [(kind, fields["seat"], fields["pushes"]) for kind, fields in told] == [("server", 3, 5)]
