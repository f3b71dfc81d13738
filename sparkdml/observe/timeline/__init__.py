"""The timeline: one trace of all ranks, for Perfetto, chrome://tracing and `sparkdml timeline`.

Spans are recorded in the workers (recorder, communicator, horovod), put on the driver's clock
(clock), sent as "spans" events, thinned (thinned) and written at the driver (observer, trace_file),
and read again by the command line (trace_file, schema, summary).
"""
