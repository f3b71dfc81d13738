"""Every compression through the contract suite."""

from __future__ import annotations

from functools import partial

from sparkdml.compression.half import BF16, FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.compression.top_k import TopK
from sparkdml.testing.compression_contract import CompressionCase, CompressionContract


class TestCompressions(CompressionContract):
    cases = {
        "FP16": CompressionCase(FP16, tolerance=1e-3),
        "BF16": CompressionCase(BF16, tolerance=1e-2),
        "OneBit": CompressionCase(OneBit, tolerance=0.1),
        "TopK": CompressionCase(
            partial(TopK, 0.05),
            bad=[(partial(TopK, fraction=0.0), "fraction"), (partial(TopK, 1.5), "fraction")],
        ),
        "PowerSGD": CompressionCase(
            partial(PowerSGD, 1),
            tolerance=0.1,
            bad=[(partial(PowerSGD, rank=0), "rank")],
        ),
    }
