"""GPU kernels of traces. Importing a module of this package imports triton."""
