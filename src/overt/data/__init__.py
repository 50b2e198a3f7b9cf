"""Readers of data sets: each checks what it reads, and says where the files belong if they are missing."""
