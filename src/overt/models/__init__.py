"""Networks built on the mechanisms."""
