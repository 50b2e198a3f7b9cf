"""GPU kernels of Bayesian Attention alone. Importing a module of this package imports triton."""
