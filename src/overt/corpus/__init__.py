"""Traces of a whole corpus: run on as many processes or machines as there are, kept as Parquet files."""
