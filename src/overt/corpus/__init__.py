"""Traces of a whole corpus: run on as many processes or machines as there are, kept as Parquet files."""

from overt.corpus.opened import Corpus, open
from overt.corpus.running import Finished, run
from overt.corpus.summary import Summary
from overt.corpus.tracer import Tracer

__all__ = ["Corpus", "Finished", "Summary", "Tracer", "open", "run"]
