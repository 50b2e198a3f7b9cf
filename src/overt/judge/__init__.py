"""Judges of models and of their attention maps: uncertainty, calibration, faithfulness."""
