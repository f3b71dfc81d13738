"""The lease table: every row of an epoch exactly once, whatever happens in whatever order."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.feed.leases import LeaseTable


@settings(deadline=None, max_examples=80)
@given(data=st.data(), rows=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_every_row_once_for_any_order_of_grants_uses_expiries_and_deaths(data, rows):
    table = LeaseTable(len(rows), max_batches=3, lease_seconds=10)
    now, held, used = 0.0, {}, Counter()
    waiting = list(range(len(rows)))
    workers = st.integers(0, len(rows) - 1)

    def use(number):
        lease, start = held[number]
        count = data.draw(st.integers(0, lease.stop - start))
        if table.use(number, count, now):
            used.update((lease.owner, row) for row in range(start, start + count))
            held[number] = lease, start + count
        else:
            del held[number]  # it was leased to another worker: these rows are not ours

    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["begin", "grant", "use", "wait", "die"]))
        if action == "begin" and waiting:
            owner = waiting.pop()
            table.begin(owner, rows[owner])
            table.begin(owner, rows[owner])
        elif action == "grant":
            lease = table.grant(data.draw(workers), 4, now)
            if lease is not None:
                held[lease.number] = lease, lease.start
        elif action == "use" and held:
            use(data.draw(st.sampled_from(sorted(held))))
        elif action == "wait":
            now += data.draw(st.sampled_from([1.0, 11.0]))
        elif action == "die":
            dead = data.draw(workers)
            table.died(dead)
            lease = table.grant(dead, 4, now)
            assert lease is None or lease.owner != dead  # its rows went with it, for now
            if lease is not None:
                table.give_back(lease.number)
    for owner, count in enumerate(rows):
        table.begin(owner, count)  # again, if it had died
    now += 100  # all holders of leases are gone
    while (lease := table.grant(0, 4, now)) is not None:
        used.update((lease.owner, row) for row in range(lease.start, lease.stop))
        assert table.use(lease.number, lease.stop - lease.start, now)
    assert table.is_over
    assert used == Counter((owner, row) for owner, n in enumerate(rows) for row in range(n))
    assert not any(table.use(number, 0, now) for number in held)


def take_all(table, speeds, batch_rows):
    """Rows that each worker takes, the quicker coming back sooner; and what they found."""
    taken, busy_until = Counter(), dict.fromkeys(speeds, 0.0)
    while busy_until:
        worker = min(busy_until, key=lambda w: (busy_until[w], w))
        lease = table.grant(worker, batch_rows)
        if lease is None:
            del busy_until[worker]
            continue
        length = lease.stop - lease.start
        taken[worker] += length
        table.use(lease.number, length)
        busy_until[worker] += length / speeds[worker]
    return taken


def test_a_slow_worker_takes_fewer():
    table = LeaseTable(4)
    for owner in range(4):
        table.begin(owner, 1300)
    taken = take_all(table, {0: 4.0, 1: 4.0, 2: 4.0, 3: 1.0}, batch_rows=10)
    assert table.is_over
    assert sum(taken.values()) == 5200
    assert abs(taken[3] - 400) <= 40  # 1/13 of all rows, to the last lease
    assert all(abs(taken[worker] - 1600) <= 40 for worker in range(3))


def test_own_rows_come_first_then_those_of_the_owner_with_most_left():
    table = LeaseTable(3, max_batches=100)
    for owner, count in enumerate([8, 100, 300]):
        table.begin(owner, count)
    assert table.grant(0, 8).owner == 0
    assert table.grant(0, 8).owner == 2
    assert table.grant(1, 8).owner == 1


def test_leases_end_where_a_round_does_and_grow_shorter_towards_the_end():
    table = LeaseTable(2, max_batches=4)
    table.begin(0, 400)
    assert not table.has_begun
    lengths = []
    while (lease := table.grant(0, 10, until=100)) is not None:
        lengths.append(lease.stop - lease.start)
    assert sum(lengths) == 100
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 10
    assert table.grant(1, 10, until=200) is not None
    assert not table.is_granted


def test_a_used_lease_is_over_and_an_expired_one_refused():
    table = LeaseTable(1, lease_seconds=5)
    table.begin(0, 10)
    first = table.grant(0, 10, now=0)
    assert table.use(first.number, 4, now=4)  # which renews it
    assert table.use(first.number, 1, now=8)
    second = table.grant(0, 10, now=20)
    assert (second.start, second.stop) == (5, 10)
    assert not table.use(first.number, 5, now=20)
    assert table.use(second.number, 5, now=20)
    assert table.is_over
    assert table.used(0) == 10


@settings(deadline=None, max_examples=80)
@given(data=st.data(), rows=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_with_backups_every_row_once_and_all_of_them_whichever_worker_stops(data, rows):
    table, used, held = LeaseTable(len(rows), max_batches=3, backs_up=True), Counter(), {}
    for owner, count in enumerate(rows):
        table.begin(owner, count)

    def work_a_batch(worker):
        """False when nothing is left for it to do."""
        if not held.get(worker):
            lease = table.grant(worker, 4)
            if lease is None:
                return False
            starts = range(lease.start, lease.stop, 4)
            held[worker] = [(lease, at, min(at + 4, lease.stop)) for at in starts]
        lease, start, stop = held[worker].pop(0)
        if table.use(lease.number, stop - start):
            used.update((lease.owner, row) for row in range(start, stop))
        else:
            held[worker] = []
        return True

    for worker in data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40)):
        work_a_batch(worker)
    survivor = data.draw(st.integers(0, len(rows) - 1))  # the others never return
    while work_a_batch(survivor):
        pass
    assert table.is_over
    assert used == Counter((owner, row) for owner, n in enumerate(rows) for row in range(n))


def test_a_backup_takes_what_the_holder_has_not_come_to_and_then_its_batch_too():
    table = LeaseTable(2, max_batches=4, backs_up=True)
    table.begin(0, 0)
    table.begin(1, 160)
    slow = table.grant(1, 10)
    assert (slow.start, slow.stop) == (0, 40)
    while (lease := table.grant(0, 10)) is not None and lease.start >= 40:
        assert table.use(lease.number, lease.stop - lease.start)
    assert (lease.start, lease.stop) == (10, 40)  # all but the first batch of the slow one's lease
    assert table.use(lease.number, 30)
    backup = table.grant(0, 10)
    assert (backup.start, backup.stop) == (0, 10)
    assert table.grant(0, 10) is None  # no worker backs itself up
    assert table.use(backup.number, 10)
    assert not table.use(slow.number, 10)
    assert table.is_over


def test_rivals_that_are_given_back_leave_the_other_alone():
    table = LeaseTable(2, backs_up=True)
    table.begin(0, 10)
    table.begin(1, 0)
    first, backup = table.grant(0, 10), table.grant(1, 10)
    table.give_back(first.number)
    assert table.grant(0, 10).number != backup.number  # which has a rival again
    assert table.use(backup.number, 10)
    assert table.is_over
