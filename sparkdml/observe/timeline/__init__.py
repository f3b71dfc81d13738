"""The timeline: one trace of all ranks, for Perfetto, chrome://tracing and `sparkdml timeline`.

Spans are recorded in the workers (recorder, communicator, horovod), converted to the driver's clock
there and sent as "spans" events; at the driver they are thinned and written (trace, trace_file);
and the command line reads them again (trace_file, summary). `tracks` is shared by all.
"""
