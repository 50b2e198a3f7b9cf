"""Traces of a whole corpus: run on as many processes or machines as there are, kept as Parquet files."""

from overt.corpus.running import Finished, run
from overt.corpus.tracer import Tracer

__all__ = ["Finished", "Tracer", "run"]
