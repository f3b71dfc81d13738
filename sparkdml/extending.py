"""What a compressor, a callback, a strategy, a store or a tracker of one's own is written with.

These names are public: they change as those of `sparkdml` itself do, with a note in the changelog.
They have a module of their own because most programs need none of them, and because words as short
as `Task`, `Role` and `State` say little beside `TorchEstimator`. Importing it imports no pyspark,
neither at the driver nor in a worker. docs/how-to-extend.md says which name is for what.
"""

from sparkdml.checkpoint.state import Entry, State
from sparkdml.checkpoint.stores.base import check_name
from sparkdml.comm.base import Communicator, Work
from sparkdml.compression.base import Compression, Reducer, Unfinished, begin_stats
from sparkdml.compression.error_feedback import ResidualReducer
from sparkdml.observe.trackers import ReceivesOutcome, Tracker, TrackerSettings
from sparkdml.training.flat import Bucket, FlatParams
from sparkdml.training.run import TrainingRun
from sparkdml.training.training import Training

__all__ = [
    "Bucket",
    "Communicator",
    "Compression",
    "Entry",
    "FlatParams",
    "ReceivesOutcome",
    "Reducer",
    "ResidualReducer",
    "State",
    "Tracker",
    "TrackerSettings",
    "Training",
    "TrainingRun",
    "Unfinished",
    "Work",
    "begin_stats",
    "check_name",
]
