"""Traces shown to a reader."""
