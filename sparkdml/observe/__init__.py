"""Observers: what shows, stores and judges a run from its events, without risk to the run.

`events` lists the events. They are sent by the driver and the workers (runtime, training), and
delivered at the driver by `observers` to the progress bar, the Training tab, trackers, stragglers
and the timeline. `worker_output` and `timeline.recorder` run in workers. This folder may import
`comm`, and nothing above it.
"""
