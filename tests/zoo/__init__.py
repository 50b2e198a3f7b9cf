"""Every model type of the installed transformers, small and random, and what is asked of it."""
