"""Generated reviews in which one passage decides: a stand-in for ERASER's movie reviews.

Three words of a passage have the review's sentiment, one word elsewhere has the other, and all others none.
"""

from __future__ import annotations

from random import Random

from overt.data.eraser import Document, Example

SENTIMENT = (
    ("dull", "tedious", "clumsy", "boring", "lifeless", "shallow", "messy", "awful"),
    ("moving", "brilliant", "charming", "gripping", "delightful", "wonderful", "clever", "superb"),
)
OTHERS = (
    "the", "a", "film", "plot", "scene", "actor", "story", "camera", "music", "ending", "director", "and",
    "of", "in", "with", "this", "that", "it", "is", "was", "has", "first", "second", "long", "short", "night",
    "city", "house", "train", "river", "about", "from", "two", "three", "people", "who", "they", "then",
)  # fmt: skip
QUERY = "what is it like"
SIZES = {"train": 320, "val": 64, "test": 24}
SHORTEST, LONGEST = 34, 48  # words
PASSAGE = 3


def planted_reviews(sizes: dict[str, int] | None = None, seed: int = 0) -> dict[str, list[Example]]:
    """Reviews by split, half of them positive; the passage is the rationale."""
    return {
        split: [
            _review(f"{split}-{number}", number % 2, Random(f"{seed} {split} {number}"))
            for number in range(count)
        ]
        for split, count in (sizes or SIZES).items()
    }


def vocabulary() -> list[str]:
    """All words."""
    return sorted({*OTHERS, *SENTIMENT[0], *SENTIMENT[1], *QUERY.split()})


def _review(name: str, label: int, random: Random) -> Example:
    words = [random.choice(OTHERS) for _ in range(random.randint(SHORTEST, LONGEST))]
    start = random.randrange(len(words) - PASSAGE)
    words[start : start + PASSAGE] = random.sample(SENTIMENT[label], PASSAGE)
    free = [place for place in range(len(words)) if not start <= place < start + PASSAGE]
    words[random.choice(free)] = random.choice(SENTIMENT[1 - label])
    document = Document(name, len(words))
    return Example(name, tuple(words), label, ((start, start + PASSAGE),), QUERY, (document,))
