"""What gradients become on the wire: one scheme a file, each with what it owes kept for later."""
