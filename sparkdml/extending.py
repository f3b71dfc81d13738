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
from sparkdml.feed.batch import Batch
from sparkdml.observe.trackers import ReceivesOutcome, Tracker, TrackerSettings
from sparkdml.runtime.protocol.roles import Resources, Role
from sparkdml.runtime.protocol.service import DriverService, TaskIdentity
from sparkdml.strategies.base import StepStrategy
from sparkdml.training.epoch import Epoch
from sparkdml.training.flat import Bucket, FlatParams
from sparkdml.training.run import TrainingRun
from sparkdml.training.task import Task
from sparkdml.training.totals import VOTES, Totals
from sparkdml.training.training import Training, TrainingPlan

__all__ = [
    "VOTES",
    "Batch",
    "Bucket",
    "Communicator",
    "Compression",
    "DriverService",
    "Entry",
    "Epoch",
    "FlatParams",
    "ReceivesOutcome",
    "Reducer",
    "ResidualReducer",
    "Resources",
    "Role",
    "State",
    "StepStrategy",
    "Task",
    "TaskIdentity",
    "Totals",
    "Tracker",
    "TrackerSettings",
    "Training",
    "TrainingPlan",
    "TrainingRun",
    "Unfinished",
    "Work",
    "begin_stats",
    "check_name",
]
