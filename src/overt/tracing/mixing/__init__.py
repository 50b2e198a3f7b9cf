"""Mixings: what the maps of a trace may hold, one file each. The lines below set the order of lists."""

# ruff: noqa: F401, I001
import overt.tracing.mixing.attention
import overt.tracing.mixing.effective
import overt.tracing.mixing.norm
import overt.tracing.mixing.gradient
import overt.tracing.mixing.relevance
import overt.tracing.mixing.value_zeroing
import overt.tracing.mixing.alti
