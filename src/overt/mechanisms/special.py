"""Constants of the gamma function that definitions, compiled loops and kernels share."""

from __future__ import annotations

EULER = 0.5772156649015329
# log Γ(1 + x) on [0, 1] as a polynomial in x − ½, lowest power first: the Chebyshev interpolant of degree 11.
# It and its derivative are accurate to 1e-7.
LOG_GAMMA = (
    -1.207822377e-01,
    3.648997404e-02,
    4.674011300e-01,
    -1.381327924e-01,
    5.871074939e-02,
    -2.895123240e-02,
    1.545865239e-02,
    -8.636894232e-03,
    4.791802372e-03,
    -2.813723488e-03,
    2.328442472e-03,
    -1.414425131e-03,
)
