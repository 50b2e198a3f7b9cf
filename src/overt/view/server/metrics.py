"""A server's counters, in the format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Requests by route and status, how long they took, and whatever else is counted.

    Labels come only from fixed sets, never from what a client sent, so that no client can fill the memory.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[str] = Counter()
        self.in_progress = 0
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._sums: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    def done(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request; status 499 is a client that disconnected."""
        self.requests[route, status] += 1
        self._totals[route] += 1
        self._sums[route] += seconds  # type: ignore[assignment]  # a Counter of floats works
        self._buckets.update((route, edge) for edge in BUCKETS if seconds <= edge)

    def text(self, gauges: Mapping[str, tuple[float, str]]) -> str:
        """All metrics as text, with gauges (name → value and help) from elsewhere."""
        lines = ["# HELP overt_requests_total Requests answered.", "# TYPE overt_requests_total counter"]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'overt_requests_total{{route="{route}",status="{status}"}} {count}')
        lines += ["# HELP overt_seconds From a request to its answer.", "# TYPE overt_seconds histogram"]
        for route in sorted(self._totals):
            for edge in BUCKETS:
                count_below = self._buckets[route, edge]
                lines.append(f'overt_seconds_bucket{{route="{route}",le="{edge:g}"}} {count_below}')
            lines.append(f'overt_seconds_bucket{{route="{route}",le="+Inf"}} {self._totals[route]}')
            lines.append(f'overt_seconds_sum{{route="{route}"}} {self._sums[route]:.6f}')
            lines.append(f'overt_seconds_count{{route="{route}"}} {self._totals[route]}')
        counters = {
            "cache_hits": "Answers from the cache.",
            "shared": "Requests that joined one already running.",
            "traces": "Traces computed.",
            "busy": "Requests refused because the server was busy.",
            "skipped": "Traces not computed because the client had disconnected.",
        }
        for name, about in counters.items():
            full = f"overt_{name}_total"
            lines += [f"# HELP {full} {about}", f"# TYPE {full} counter", f"{full} {self.counts[name]}"]
        for name, (value, about) in gauges.items():
            full = f"overt_{name}"
            lines += [f"# HELP {full} {about}", f"# TYPE {full} gauge", f"{full} {value:g}"]
        return "\n".join(lines) + "\n"
