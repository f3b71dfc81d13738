"""Reading by leases, with real spools and a real service: one worker gets each row, once."""

import json
import threading
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from sparkdml.errors import CommunicationError
from sparkdml.feed import leased
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.leased import LeaseReader, SpoolSource
from sparkdml.feed.leases import LeaseService
from sparkdml.feed.shared_rows import SharedRows
from sparkdml.runtime.protocol.service import TaskIdentity


class Worker:
    """One reader of its own and others' rows."""

    def __init__(self, folder, driver_service, rank, num_rows, maps=True, **plan):
        hashes = np.sort(np.random.default_rng(rank).integers(-(2**63), 2**63 - 1, num_rows))
        columns = {"id": np.arange(num_rows) + 1000 * rank}
        chunks = [Chunk(columns, hashes)] if num_rows else []
        self.feed = Feed(iter(chunks), FeedPlan((), seed=3, **plan), str(folder))
        self.shared = SharedRows(self.feed, rank, "key", maps)
        if not maps:
            self.shared.serve("127.0.0.1")
        self.peer, self.driver_service = TaskIdentity("worker", rank, 0, "here"), driver_service
        self.reader = LeaseReader(self.ask, SpoolSource(self.feed, self.shared, rank), rank)

    def ask(self, about, **fields):
        """Through JSON, as over the wire."""
        answer = self.driver_service.answer(self.peer, about, json.loads(json.dumps(fields)))
        return json.loads(json.dumps(answer))

    def close(self):
        self.shared.close()
        self.feed.close()


@pytest.fixture
def workers(tmp_path):
    made = []

    def make(driver_service, counts, **options):
        made.extend(
            Worker(tmp_path, driver_service, rank, n, **options) for rank, n in enumerate(counts)
        )
        return made

    yield make
    for worker in made:
        worker.close()


def read_together(workers, *args, positions=(None,) * 3, **kwargs):
    """Every worker's row ids, each read on a thread of its own."""
    found, errors = {}, []

    def read(worker):
        try:
            position = positions[worker.peer.rank]
            batches = worker.reader.batches(BatchRequest(*args, position=position, **kwargs))
            found[worker.peer.rank] = [i for batch in batches for i in batch["id"].tolist()]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return found


def rows_in(found):
    return [*chain.from_iterable(found.values())]


def all_ids(counts):
    return Counter(1000 * rank + i for rank, n in enumerate(counts) for i in range(n))


@pytest.mark.parametrize("maps", [True, False])
def test_each_row_once_an_epoch(workers, maps):
    counts = [120, 0, 77]
    driver_service = LeaseService(3)
    ours = workers(driver_service, counts, maps=maps)
    for epoch in range(3):
        found = read_together(ours, 8, epoch)
        assert Counter(rows_in(found)) == all_ids(counts)
        assert [worker.reader.used_rows(epoch) for worker in ours] == counts


def test_rounds_and_positions(workers):
    counts = [60, 50]
    driver_service = LeaseService(2, max_batches=2)
    ours = workers(driver_service, counts)
    first = read_together(ours, 8, 1, until=40)
    used = [worker.reader.used_rows(1) for worker in ours]
    assert 40 <= sum(used) < 60
    assert Counter(rows_in(first)).total() == sum(used)
    # The same rows once more, from where these are: as after a restart.
    positions = [
        w.feed.position_after(n, BatchRequest(1, 1)) for w, n in zip(ours, used, strict=True)
    ]
    again = workers(LeaseService(2), counts)[2:]
    rest = read_together(again, 8, 1, positions=positions)
    assert Counter([*rows_in(first), *rows_in(rest)]) == all_ids(counts)


def test_one_that_stands_still_takes_one_lease(workers):
    counts = [400, 400, 400]
    ours = workers(LeaseService(3, max_batches=2), counts)
    slow = ours[2].reader.batches(BatchRequest(10, 0))
    for worker in ours:  # all have begun: else the quick ones would wait for rows to come
        worker.reader.begin(BatchRequest(10, 0))
    held = next(slow)
    found = read_together(ours[:2], 10, 0)
    rest = [i for batch in [held, *slow] for i in batch["id"].tolist()]
    assert len(rest) <= 20
    assert Counter([*rows_in(found), *rest]) == all_ids(counts)


def test_what_a_lost_worker_has_not_confirmed_is_read_by_others(workers):
    counts = [100, 100]
    driver_service = LeaseService(2, lease_seconds=1000.0)
    ours = workers(driver_service, counts)
    doomed = ours[1].reader.batches(BatchRequest(10, 0))
    first, second = next(doomed), next(doomed)  # coming for the second confirms the first
    first_ids, second_ids = first["id"].tolist(), second["id"].tolist()
    driver_service.on_leave(ours[1].peer, "lost")
    assert not second.confirm()
    again = ours[1].reader  # started again by Spark, with the same rows
    again._begun = None
    found = read_together(ours, 10, 0)
    rows = Counter(rows_in(found))
    assert rows + Counter(first_ids) == all_ids(counts)
    assert all(rows[i] for i in second_ids)


def test_an_owner_that_is_gone_is_waited_for(workers, monkeypatch):
    monkeypatch.setattr(leased, "LEASE_ASK_AGAIN_SECONDS", 0.001)
    counts = [0, 40]
    driver_service = LeaseService(2, lease_seconds=1000.0)
    ours = workers(driver_service, counts, maps=False)
    reader, owner = ours
    owner.reader.begin(BatchRequest(10, 0))
    batches = reader.reader.batches(BatchRequest(10, 0))
    taken = next(batches)["id"].tolist()
    owner.shared._server.close()  # it dies, and restarts at another port
    owner.shared._server = None
    asked = threading.Event()
    answer = driver_service.answer

    def watch(peer, about, fields):
        if about == "lease.back":
            asked.set()
        return answer(peer, about, fields)

    driver_service.answer = watch

    def come_back():
        assert asked.wait(30)
        owner.shared.serve("127.0.0.1")
        owner.reader._begun = None
        owner.reader.begin(BatchRequest(10, 0))

    helper = threading.Thread(target=come_back)
    helper.start()
    taken += [i for batch in batches for i in batch["id"].tolist()]
    helper.join()
    assert Counter(taken) == all_ids(counts)


def test_short_batches_are_dropped_if_asked_for(workers):
    ours = workers(LeaseService(1), [25], drop_last=True)
    sizes = [batch.num_rows for batch in ours[0].reader.batches(BatchRequest(10, 0))]
    assert sizes == [10, 10]
    assert ours[0].reader.used_rows(0) == 25


def test_a_driver_that_does_not_answer_is_an_error(workers):
    ours = workers(LeaseService(1), [25])
    reader = LeaseReader(lambda about, **fields: None, ours[0].reader._source, 0)
    with pytest.raises(CommunicationError, match="does not answer"):
        next(reader.batches(BatchRequest(10, 0)))


def test_a_worker_that_restarts_late_finds_old_epochs_over(workers):
    counts = [30, 20]
    driver_service = LeaseService(2, lease_seconds=1000.0)
    ours = workers(driver_service, counts)
    for epoch in range(3):
        read_together(ours, 8, epoch)
    again = LeaseReader(ours[1].ask, ours[1].reader._source, 1)
    assert [list(again.batches(BatchRequest(8, epoch))) for epoch in range(3)] == [[], [], []]
