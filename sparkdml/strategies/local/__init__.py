"""Workers that take steps of their own and average their models now and then."""
