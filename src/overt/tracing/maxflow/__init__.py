"""Exact attention flow: the maximum flow from any node of an attention graph to every input.

`naive` is the definition; `solve` and, for many graphs at once, `solve_batch` return the same numbers many
thousand times faster, in compiled code that is loaded on first use.
"""

from overt.tracing.maxflow.solver import Report, compiled, estimate, solve, solve_batch

__all__ = ["Report", "compiled", "estimate", "solve", "solve_batch"]
