"""Tables of times as ratios to a baseline, printed and kept as Markdown."""

from __future__ import annotations

import statistics


class Report:
    """Prints tables, and keeps them as Markdown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, *lines: str) -> None:
        """Print lines and keep them."""
        for line in lines:
            print(line, flush=True)
        self.lines += lines

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table and keep it."""
        self.say("", title, "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|")
        self.say(*(f"| {' | '.join(row)} |" for row in rows))


def verdict(ratio: float, target: float | None) -> str:
    """Whether a ratio meets its target."""
    return "–" if target is None else f"≤ {target:g}: {'met' if ratio <= target else 'missed'}"


def compared(
    seen: dict[str, list[float]], baseline: str, targets: dict[str, float]
) -> list[tuple[str, list[str]]]:
    """Median, ratio, spread and target of each form."""
    medians = {form: statistics.median(times) for form, times in seen.items()}
    lines = []
    for form, times in seen.items():
        ratio = medians[form] / medians[baseline]
        spread = f"{min(times):.1f}–{max(times):.1f}"
        cells = [f"{medians[form]:.1f}", f"{ratio:.2f}", spread, verdict(ratio, targets.get(form))]
        lines.append((form, cells))
    return lines
