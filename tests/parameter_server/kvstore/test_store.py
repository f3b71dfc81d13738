"""The key-value store, as MXNet's users know it, on real servers."""

import pytest
import torch

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.consistency import BSP
from sparkdml.parameter_server.kvstore.store import KVStore, merge
from sparkdml.parameter_server.optimizers import SGD, Adagrad
from sparkdml.testing.server_cluster import run_workers


def test_pushes_of_all_workers_are_added():
    def work(comm, store):
        assert (store.rank, store.num_workers) == (comm.rank, 3)
        store.init("weight", torch.ones(2, 3))
        store.push("weight", torch.full((2, 3), comm.rank + 1.0))
        store.barrier()
        return store.pull("weight")

    for value in run_workers(3, work, num_servers=2):
        torch.testing.assert_close(value, torch.full((2, 3), 7.0))


def test_the_first_worker_brings_the_value_and_keys_may_be_numbers():
    def work(comm, store):
        store.init(3, torch.full((4,), float(comm.rank)))
        store.barrier()
        return store.pull(3)

    values = run_workers(2, work)
    assert torch.equal(values[0], values[1])
    assert values[0].tolist() in ([0.0] * 4, [1.0] * 4)


def test_values_of_several_devices_leave_as_one():
    def work(comm, store):
        store.init("a", torch.zeros(3))
        store.push("a", [torch.ones(3), 2 * torch.ones(3), 4 * torch.ones(3)]).wait()
        return store.pull("a").tolist(), store.client.stats.pushes

    assert run_workers(1, work) == [([7.0] * 3, 1)]


def test_rows_of_a_sparse_key():
    def work(comm, store):
        store.init("table", torch.arange(10.0).view(5, 2), rows=True)
        store.barrier()
        store.push("table", torch.ones(2, 2), rows=[comm.rank, 4])
        store.barrier()
        out = torch.empty(3, 2)
        assert store.row_sparse_pull("table", [4, 1, 4], out=out) is out
        return out.tolist()

    expected = [[10.0, 11.0], [3.0, 4.0], [10.0, 11.0]]
    assert run_workers(2, work) == [expected, expected]


def test_an_optimizer_on_the_servers():
    def work(comm, store):
        store.init("a", torch.ones(2))
        store.init("b", torch.ones(2))
        store.set_optimizer(SGD(lr=0.5), keys=["a"])
        store.push("a", torch.tensor([1.0, 2.0]))
        store.push("b", torch.tensor([1.0, 2.0]))
        first = store.pull("a").tolist(), store.pull("b").tolist()
        store.set_optimizer(Adagrad(lr=0.1))
        store.push("b", torch.tensor([3.0, -4.0]))
        return first, store.pull("b").tolist()

    [((a, b), after)] = run_workers(1, work)
    assert (a, b) == ([0.5, 0.0], [2.0, 3.0])
    assert after == pytest.approx([1.9, 3.1])


def test_with_bsp_a_step_ends_with_the_clock():
    def work(comm, store):
        store.init("a", torch.zeros(1))
        seen = []
        for step in range(3):
            seen.append(store.pull("a").item())
            store.push("a", torch.tensor([10.0**step]))
            store.clock()
        return seen

    assert run_workers(2, work, consistency=BSP()) == [[0.0, 2.0, 22.0]] * 2


def test_a_failed_worker_leaves_without_waiting():
    def work(comm, store):
        store.init("a", torch.zeros(1))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_workers(1, work)


def test_sums_of_values():
    one = torch.ones(2)
    assert merge(one) is one
    assert merge([one, one]).tolist() == [2.0, 2.0]
    assert one.tolist() == [1.0, 1.0]
    with pytest.raises(ParameterError, match="at least one"):
        merge([])


def test_bad_arguments():
    with pytest.raises(ParameterError, match="num_workers"):
        KVStore(None, 0, 0)
    with pytest.raises(ParameterError, match="init was called for"):
        run_workers(1, lambda comm, store: store.pull("nowhere"))
