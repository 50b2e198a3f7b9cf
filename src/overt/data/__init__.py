"""Readers of data sets. Each validates the files and, if they are missing, says where to put them."""
