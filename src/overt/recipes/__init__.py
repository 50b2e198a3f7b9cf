"""The papers' tables and figures, one file each, and the runner behind `overt reproduce`."""
