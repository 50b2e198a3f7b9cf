"""GPU kernels that mechanisms share. Importing a module of this package imports triton."""
