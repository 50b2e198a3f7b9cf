"""What the maps of a trace may hold, one file each. Every line below is a graph, in the order of lists."""

# ruff: noqa: F401, I001
import overt.tracing.graphs.attention
import overt.tracing.graphs.effective
import overt.tracing.graphs.norm
import overt.tracing.graphs.gradient
import overt.tracing.graphs.value_zeroing
