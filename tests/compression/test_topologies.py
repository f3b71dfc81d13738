"""Dense schemes over any topology: the same training as over the backend's own allreduce."""

import pytest
import torch

from sparkdml.compression.half import BF16, FP16
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule


@pytest.mark.parametrize("topology", ["ring", "halving-doubling"])
@pytest.mark.parametrize("scheme", [FP16(), BF16(), PowerSGD(2)], ids=repr)
def test_a_topology_carries_what_is_compressed(scheme, topology):
    def train(name):
        trainings = train_on_threads(
            lambda: AllReduce(topology=name, bucket_bytes=600, compression=scheme),
            digits_plan(lr=0.1),
            Schedule(1, 8),
            cut(digits(90), [40, 30, 20]),
        )
        for training in trainings[1:]:
            assert torch.equal(training.task.params.values, trainings[0].task.params.values)
        return trainings[0]

    ours, native = train(topology), train("native")
    tolerance = 1e-2 if scheme == BF16() else 1e-3
    torch.testing.assert_close(
        ours.task.params.values, native.task.params.values, rtol=tolerance, atol=tolerance
    )
    assert ours.ctx.comm.traffic.bytes < 1.5 * native.ctx.comm.traffic.bytes
