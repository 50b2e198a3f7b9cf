"""Evolving Attention's maps as GPU kernels, forwards and backwards; `evolving.naive` has the definition.

`maps` defines the memory layout of a map, `mixing` computes the mixed map, `convolving` convolves it, and
`weights` computes the gradients of the convolution's weights. `row` does everything for a single row, without
gradients. Importing this package imports triton.
"""

from overt.mechanisms.evolving.kernels.convolving import convolvable, convolve, convolve_to_mixed
from overt.mechanisms.evolving.kernels.maps import as_padded, is_padded, padded, whole
from overt.mechanisms.evolving.kernels.mixing import mix, mix_backward
from overt.mechanisms.evolving.kernels.row import evolve_one
from overt.mechanisms.evolving.kernels.weights import convolve_to_weight
from overt.mechanisms.kernels.attend import ALIGNED, row_length

__all__ = [
    "ALIGNED",
    "as_padded",
    "convolvable",
    "convolve",
    "convolve_to_mixed",
    "convolve_to_weight",
    "evolve_one",
    "is_padded",
    "mix",
    "mix_backward",
    "padded",
    "row_length",
    "whole",
]
