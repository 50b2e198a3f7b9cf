"""How many threads the libraries of a process take; apart from tests, since processes import it."""

from __future__ import annotations

from typing import Any


def threads(_task: int, _shared: None, _tell: Any) -> dict[str, list[int]]:
    """The numbers of threads of OpenMP's pools and of those of linear algebra."""
    import sklearn.linear_model  # noqa: F401
    from threadpoolctl import threadpool_info

    pools = threadpool_info()
    return {
        title: sorted({each["num_threads"] for each in pools if each["user_api"] == kind})
        for kind, title in (("openmp", "OpenMP"), ("blas", "BLAS"))
    }
