"""GAP (Webster et al. 2018): texts with a pronoun and two names that it may refer to."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from overt.data.files import find_file, read_text

HIS, HER = ("he", "him", "his"), ("she", "her", "hers")
FILES = ("gap-development.tsv", "gap-validation.tsv")


@dataclass(frozen=True)
class Case:
    """A text with a pronoun, and two names that it may refer to.

    Attributes:
        text: the text.
        pronoun: start and end of the pronoun.
        names: start and end of each name.
        right: index of the name that the pronoun refers to.
    """

    text: str
    pronoun: tuple[int, int]
    names: tuple[tuple[int, int], tuple[int, int]]
    right: int | None = None

    @property
    def feminine(self) -> bool:
        """Whether the pronoun is feminine."""
        return self.text[slice(*self.pronoun)].lower() in HER


def read(folder: Path) -> list[Case]:
    """The GAP texts in which the pronoun refers to exactly one of the names."""
    candidates = [find_file(place, name) for place in (folder, folder / "gap") for name in FILES]
    paths = [path for path in candidates if path is not None]
    if not paths:
        raise FileNotFoundError(f"{folder} has no GAP data: put {' or '.join(FILES)} there or in gap/")
    cases = []
    for path in paths:
        rows = csv.DictReader(io.StringIO(read_text(path)), delimiter="\t", quoting=csv.QUOTE_NONE)
        for number, row in enumerate(rows, 2):
            try:
                cases.append(_case(row))
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {number}: the columns of GAP are missing or malformed"
                ) from None
    return [case for case in cases if case is not None]


def _case(row: dict[str, str]) -> Case | None:
    true = [row[f"{name}-coref"].upper() == "TRUE" for name in "AB"]
    if sum(true) != 1 or row["Pronoun"].lower() not in HIS + HER:
        return None

    def place(name: str) -> tuple[int, int]:
        start = int(row[f"{name}-offset"])
        return start, start + len(row[name])

    return Case(row["Text"], place("Pronoun"), (place("A"), place("B")), true.index(True))
