"""The contenders, in the order of measuring and of the table's rows."""

from __future__ import annotations

from benchmarks.contenders.bare_horovodrun import BareHorovodrun, TunedHorovodrun
from benchmarks.contenders.bare_torchrun import BareTorchrun, NoCommunication
from benchmarks.contenders.base import Contender
from benchmarks.contenders.feed_limit import FeedLimit
from benchmarks.contenders.sparkdml_fit import SparkdmlFit
from benchmarks.contenders.torch_distributor import (
    DistributorOnDataFrame,
    DistributorReadingParquet,
)

ALL: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        SparkdmlFit("torch"),
        SparkdmlFit("horovod"),
        BareTorchrun(),
        BareHorovodrun(),
        TunedHorovodrun(),
        DistributorReadingParquet(),
        DistributorOnDataFrame(),
        NoCommunication(),
        FeedLimit(),
    )
}
