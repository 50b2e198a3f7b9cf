"""Tracing methods, one file each. The lines below set the order of tables and pages."""

# ruff: noqa: F401, I001
import overt.tracing.methods.raw
import overt.tracing.methods.rollout
import overt.tracing.methods.flow
import overt.tracing.methods.blankout
import overt.tracing.methods.gradients
