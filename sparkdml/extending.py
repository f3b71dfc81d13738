"""The names to write your own compressor, callback, strategy, store or tracker with.

These names are public: they change only as those of `sparkdml` itself do, with a note in the
changelog. They have a module of their own because most programs need none of them, and because
names as short as `Task`, `Role` and `State` say little beside `TorchEstimator`. The import needs no
pyspark, at the driver and in workers. docs/how-to-extend.md explains each name.
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
