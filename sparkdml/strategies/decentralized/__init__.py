"""Workers that average their models with their neighbours', without a centre."""
