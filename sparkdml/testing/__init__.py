"""What our tests are made of, and users' tests may use too: contract suites, threads, tiny data."""
