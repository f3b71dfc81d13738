"""The command line: `sparkdml doctor`, `install-horovod`, `demo` and `bench`."""
