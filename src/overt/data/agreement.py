"""Embedded subject–verb agreement: predict a verb's number from the sentence before it.

"the key to the cabinets" continues with "is", not "are": the verb agrees with "key", the head of the subject,
not with the nouns in between. Linzen, Dupoux and Goldberg (2016) introduced the task; Abnar and Zuidema
(2020) evaluated attention maps on it. The sentences come from a small grammar written for this package, so
the position of each subject is known, and a seed generates any number of sentences.

Only the nouns show number. Determiners go with both numbers ("the", "my"), verbs inside the prefix are past
("saw") or follow a modal ("could see"), and the words are chosen before the number of any noun. The one
exception is a coordinated subject ("the boy and the girl"), which is plural whatever its nouns are. To
compensate, singular subjects have coordination inside their modifiers more often, so "and" is no clue either.

"and" joins subjects only right after the first head ("the boy and the girl near the lamp", plural). After a
modifier it joins the nouns of the modifier ("the key to the door and the window", singular).

A phrase before the subject ("near the cabinets , the key") ends in a comma. A rule that uses this, and takes
the first noun after such a comma or else the first noun, is nearly always right: the task is to locate the
subject, not to learn a theory of English.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Literal

from overt import _check

__all__ = [
    "CONSTRUCTIONS",
    "VOCABULARY",
    "WORD_CLASSES",
    "Sentence",
    "baselines",
    "encode",
    "flipped",
    "generate",
    "split",
]

_CORES = (
    "simple",
    "prepositional",
    "subject relative",
    "object relative",
    "reduced relative",
    "parenthetical",
    "coordinated",
)

CONSTRUCTIONS: tuple[str, ...] = _CORES + tuple(f"fronted {core}" for core in _CORES)
"""All values of `Sentence.construction`."""

# Two mixes of sentences. Row: attractors between subject and verb; column: nouns there that agree with the
# verb; entry: weight.
# "natural": few nouns, each an attractor with probability 0.4, so most sentences have none, as in
# running text.
_NATURAL = tuple(
    tuple(
        share * math.comb(nouns, many) * 0.4**many * 0.6 ** (nouns - many)
        for nouns, share in enumerate((0.40, 0.33, 0.15, 0.08, 0.04))
        if nouns >= many
    )
    for many in range(5)
)
# "balanced": enough sentences of each number of attractors to measure accuracy.
_BALANCED = (
    (14.0, 10.0, 3.0),
    (18.0, 8.0, 2.0),
    (11.0, 5.0),
    (8.0, 3.0),
    (7.0, 1.0),
)
_MIXES = {"natural": _NATURAL, "balanced": _BALANCED}
_FRONTED = 0.45  # probability of a phrase before the subject, set off by a comma
_FRONT_OPPOSITE = 0.85  # probability that a noun in that phrase has the opposite number of the verb
_COORDINATION = 0.10
_COORDINATED_SUBJECT = 0.60  # of the plural sentences with coordination
_LONGEST = 22

_DETERMINERS = ("the", "my", "your", "our", "his", "her", "their")
_DETERMINER_WEIGHTS = (12, 1, 1, 1, 1, 1, 1)

_LEMMAS = {
    "person": "boy girl man/men woman/women child/children farmer teacher doctor judge lawyer sailor baker"
    " painter king",
    "animal": "dog cat horse mouse/mice goose/geese wolf/wolves fox bird",
    "object": "book lamp knife/knives cup bottle picture chair toy boat leaf/leaves",
    "store": "cabinet box drawer shelf/shelves",
    "access": "key door gate bridge",
    "place": "house garden church school market castle village city forest hotel",
    "event": "meeting party lesson wedding",
}

_ANIMATE = ("person", "animal")
_THINGS = ("object", "store", "access")
_PLACED = (*_THINGS, "place")
_SOLID = (*_ANIMATE, *_PLACED)

# Prepositions that can follow a noun of each kind, and the kinds of noun they take.
_PREPOSITIONS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "person": (
        ("near", _SOLID),
        ("behind", _SOLID),
        ("beside", _SOLID),
        ("with", (*_ANIMATE, "object", "store")),
        ("from", ("place",)),
        ("in", ("place",)),
        ("at", ("place", "event")),
    ),
    "animal": (
        ("near", _SOLID),
        ("behind", _SOLID),
        ("beside", _SOLID),
        ("of", ("person",)),
        ("from", ("place",)),
        ("in", ("place", "store")),
    ),
    "object": (
        ("near", _SOLID),
        ("behind", ("store", "access", "place")),
        ("under", ("object", "store")),
        ("of", ("person",)),
        ("from", ("person", "place")),
        ("for", ("person", "event")),
        ("in", ("store", "place")),
    ),
    "store": (
        ("near", _SOLID),
        ("behind", ("store", "access")),
        ("of", ("person",)),
        ("for", ("object", "animal")),
        ("with", ("object",)),
        ("in", ("place",)),
    ),
    "access": (
        ("to", ("place", "store", "place")),
        ("near", ("place", "access")),
        ("behind", ("place",)),
        ("beside", ("place", "access")),
    ),
    "place": (
        ("near", ("place", "access")),
        ("behind", ("place", "access")),
        ("beside", ("place", "access")),
        ("of", ("person",)),
        ("with", ("object", "store", "animal")),
    ),
    "event": (
        ("with", ("person",)),
        ("for", ("person", "animal")),
        ("in", ("place",)),
        ("near", ("place",)),
        ("after", ("event",)),
    ),
}
_FRONT_PREPOSITIONS = (
    ("near", _SOLID),
    ("behind", _SOLID),
    ("beside", _SOLID),
    ("under", ("object", "store")),
    ("in", ("place", "store")),
    ("at", ("place",)),
    ("after", ("event",)),
    ("before", ("event",)),
    ("during", ("event",)),
)
_LOCATIVE_PREPOSITIONS = (
    ("near", ("place", "access", "object", "animal")),
    ("behind", ("place", "store")),
    ("in", ("place",)),
)
_ADJUNCT_PREPOSITIONS = (*_LOCATIVE_PREPOSITIONS, ("after", ("event",)), ("before", ("event",)))
_PARENTHETICAL = (("along", "with"), ("together", "with"), ("like",), ("unlike",))
_SUBORDINATORS = ("when", "while", "because")
_INTRANSITIVE = ("arrived", "slept", "waited", "rested", "laughed")

# Transitive verbs as base/past, by the kind of their object.
_TRANSITIVE = {
    "person": "see/saw know/knew meet/met help/helped follow/followed like/liked watch/watched find/found",
    "animal": "see/saw feed/fed follow/followed like/liked watch/watched find/found hear/heard buy/bought",
    "object": "see/saw buy/bought find/found lose/lost carry/carried paint/painted like/liked hide/hid",
    "store": "see/saw buy/bought find/found carry/carried paint/painted like/liked open/opened",
    "access": "see/saw find/found paint/painted like/liked open/opened know/knew",
    "place": "see/saw visit/visited like/liked paint/painted find/found know/knew leave/left",
    "event": "plan/planned enjoy/enjoyed miss/missed remember/remembered like/liked",
}
_FOR_ANIMALS = ("see", "follow", "like", "watch", "find", "hear", "know", "carry", "leave")
_STANDING = {
    "person": ("stood", "sat", "worked"),
    "animal": ("stood", "sat", "slept"),
    "event": ("happened", "started"),
}
_STANDING_THING = ("stood", "lay")
_MODALS = ("could", "would", "might")
_ADVERBS = ("often", "once", "never", "always", "secretly")
_ADJECTIVES = {
    "person": ("young", "old", "happy", "tall", "clever", "tired"),
    "animal": ("young", "old", "small", "hungry", "tired", "brown"),
    "object": ("old", "new", "small", "red", "green", "broken"),
    "store": ("old", "new", "small", "red", "green", "heavy"),
    "access": ("old", "new", "small", "long", "heavy", "narrow"),
    "place": ("old", "new", "small", "quiet", "famous", "pretty"),
    "event": ("long", "boring", "famous", "quiet", "new", "pretty"),
}


def _plural_of(singular: str) -> str:
    if singular.endswith("y") and singular[-2] not in "aeiou":
        return singular[:-1] + "ies"
    return singular + ("es" if singular.endswith(("s", "x", "ch", "sh")) else "s")


def _forms(entry: str) -> tuple[str, str]:
    singular, _, plural = entry.partition("/")
    return singular, plural or _plural_of(singular)


_NOUNS = {kind: tuple(_forms(entry) for entry in words.split()) for kind, words in _LEMMAS.items()}
_VERBS = {
    kind: tuple((base, past) for base, _, past in (entry.partition("/") for entry in words.split()))
    for kind, words in _TRANSITIVE.items()
}
_KINDS = tuple(_NOUNS)
_KIND_WEIGHTS = tuple(len(nouns) for nouns in _NOUNS.values())


def _vocabulary() -> tuple[str, ...]:
    words = ["[PAD]", "[CLS]", "[UNK]", ",", "and", "that", "who", "which", "very", *_DETERMINERS]
    for prepositions in (*_PREPOSITIONS.values(), _FRONT_PREPOSITIONS, _ADJUNCT_PREPOSITIONS):
        words += [preposition for preposition, _ in prepositions]
    words += chain.from_iterable((*_PARENTHETICAL, *_STANDING.values(), *_ADJECTIVES.values()))
    words += (*_SUBORDINATORS, *_INTRANSITIVE, *_STANDING_THING, *_MODALS, *_ADVERBS)
    for pairs in (*_VERBS.values(), *_NOUNS.values()):
        words += [word for pair in pairs for word in pair]
    return tuple(dict.fromkeys(words))


VOCABULARY: tuple[str, ...] = _vocabulary()
"""All tokens, ordered by id: "[PAD]" 0, "[CLS]" 1, "[UNK]" 2, then the words."""

WORD_CLASSES: dict[str, frozenset[str]] = {
    "determiner": frozenset(_DETERMINERS),
    "adjective": frozenset(chain.from_iterable(_ADJECTIVES.values())),
    "noun": frozenset(word for nouns in _NOUNS.values() for pair in nouns for word in pair),
    "preposition": frozenset(
        preposition
        for options in (*_PREPOSITIONS.values(), _FRONT_PREPOSITIONS, _ADJUNCT_PREPOSITIONS)
        for preposition, _ in options
    ),
}
"""Words by class; verbs, adverbs and the words that open clauses are the others."""

_INDEX = {word: index for index, word in enumerate(VOCABULARY)}
_CLS, _UNK = _INDEX["[CLS]"], _INDEX["[UNK]"]


@dataclass(frozen=True)
class Sentence:
    """A sentence cut off before its main verb.

    Attributes:
        tokens: the words in lower case; punctuation marks are separate tokens.
        plural: whether the verb that follows is plural.
        attractors: number of nouns between the first head of the subject and the verb whose number is the
            opposite of the verb's (Linzen et al., 2016). The second head of a coordinated subject is not an
            attractor, even if singular; singular nouns in its modifiers are.
        construction: one of `CONSTRUCTIONS`: what follows the head of the subject ("simple" for nothing;
            with several modifiers, the clause or parenthesis rather than the prepositions; "coordinated" for
            a coordinated subject, modified or not), preceded by "fronted" if a phrase comes before the
            subject.
        nouns: (position, whether plural) of each noun, in order.
        subject: position of the subject's head; both heads of a coordinated subject.
    """

    tokens: tuple[str, ...]
    plural: bool
    attractors: int
    construction: str
    nouns: tuple[tuple[int, bool], ...]
    subject: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(self.tokens)


class _Draft:
    """A sentence being written from left to right; the number of its nouns is chosen at the end."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.words: list[str] = []
        self.nouns: list[tuple[int, tuple[str, str]]] = []  # position, (singular, plural)
        self.definite = True  # whether the last determiner was "the"

    def noun_phrase(self, kind: str) -> None:
        rng, words = self.rng, self.words
        words.append(rng.choices(_DETERMINERS, _DETERMINER_WEIGHTS)[0])
        self.definite = words[-1] == "the"
        if rng.random() < 0.12:
            if rng.random() < 0.2:
                words.append("very")
            words.append(rng.choice(_ADJECTIVES[kind]))
        noun = rng.choice(_NOUNS[kind])
        for _ in range(3):  # a noun seldom occurs twice in one sentence
            if all(noun != other for _, other in self.nouns):
                break
            noun = rng.choice(_NOUNS[kind])
        self.nouns.append((len(words), noun))
        words.append("")  # filled in when the number is known

    def group(self, kind: str, size: int) -> None:
        """Add one noun phrase, or two joined by "and"."""
        self.noun_phrase(kind)
        if size == 2:
            self.words.append("and")
            self.noun_phrase(kind)

    def preposition(self, options: Sequence[tuple[str, tuple[str, ...]]], size: int) -> str:
        """Add a preposition and its object; return the kind of the object."""
        preposition, kinds = self.rng.choice(options)
        while preposition == "of" and not self.definite:  # "the hen of the boy", not "her hen of the boy"
            preposition, kinds = self.rng.choice(options)
        kind = self.rng.choice(kinds)
        self.words.append(preposition)
        self.group(kind, size)
        return kind

    def prepositions(self, kind: str, sizes: Iterable[int]) -> str:
        """Add prepositional phrases, each modifying the noun before it."""
        for size in sizes:
            kind = self.preposition(_PREPOSITIONS[kind], size)
        return kind

    def verb(self, object_kind: str, subject_kind: str) -> None:
        rng = self.rng
        verbs = _VERBS[object_kind]
        if subject_kind == "animal":
            verbs = tuple(verb for verb in verbs if verb[0] in _FOR_ANIMALS)
        base, past = rng.choice(verbs)
        if rng.random() < 0.2:
            self.words += [rng.choice(_MODALS), base]
        else:
            if rng.random() < 0.12:
                self.words.append(rng.choice(_ADVERBS))
            self.words.append(past)

    def subject_relative(self, kind: str, sizes: Sequence[int], pronoun: str = "that") -> None:
        """ "who fed the horses near the barn", "that stood near the door"."""
        rng = self.rng
        self.words.append("who" if kind == "person" else pronoun)
        if kind in _ANIMATE and rng.random() < 0.7:
            target = rng.choices(_KINDS, _KIND_WEIGHTS)[0]
            if kind == "animal" and target == "event":
                target = "place"
            self.verb(target, kind)
            self.group(target, sizes[0])
        else:
            self.words.append(rng.choice(_STANDING.get(kind, _STANDING_THING)))
            options = _LOCATIVE_PREPOSITIONS if kind in _PLACED else _ADJUNCT_PREPOSITIONS
            target = self.preposition(options, sizes[0])
        self.prepositions(target, sizes[1:])

    def object_relative(self, kind: str, sizes: Sequence[int], marked: bool) -> None:
        """ "that the boys near the door saw in the garden", with or without "that"."""
        rng = self.rng
        if marked:
            self.words.append("that")
        subject = "person" if kind == "event" or rng.random() < 0.75 else "animal"
        self.group(subject, sizes[0])
        inside = rng.randrange(len(sizes)) if rng.random() < 0.4 else 0
        self.prepositions(subject, sizes[1 : 1 + inside])
        self.verb(kind, subject)
        if len(sizes) > 1 + inside:
            target = self.preposition(_ADJUNCT_PREPOSITIONS, sizes[1 + inside])
            self.prepositions(target, sizes[2 + inside :])

    def parenthetical(self, kind: str, sizes: Sequence[int]) -> None:
        """ ", along with the girls from the village ,", ", who fed the horses ,"."""
        self.words.append(",")
        if self.rng.random() < 0.3:
            self.subject_relative(kind, sizes, "which")
        else:
            self.words += self.rng.choice(_PARENTHETICAL)
            self.group(kind, sizes[0])
            self.prepositions(kind, sizes[1:])
        self.words.append(",")

    def front(self, paired: bool) -> None:
        """Add what comes before the subject: a prepositional phrase or a short clause."""
        rng, words = self.rng, self.words
        draw = rng.random()
        if paired or draw < 0.85:
            self.preposition(_FRONT_PREPOSITIONS, 2 if paired else 1)
        else:
            words.append(rng.choice(_SUBORDINATORS))
            self.noun_phrase(rng.choice(_ANIMATE))
            words.append(rng.choice(_INTRANSITIVE))
        words.append(",")

    def modifiers(self, kind: str, sizes: Sequence[int]) -> str:
        """Add everything between the subject and the verb; return the construction."""
        if not sizes:
            return "simple"
        draw = self.rng.random()
        if draw < 0.36:
            self.prepositions(kind, sizes)
            return "prepositional"
        if draw < 0.40:
            self.parenthetical(kind, sizes)
            return "parenthetical"
        if len(sizes) > 1 and self.rng.random() < 0.3:  # a preposition first; the clause modifies its noun
            kind = self.prepositions(kind, sizes[:1])
            sizes = sizes[1:]
        if draw < 0.69:
            self.subject_relative(kind, sizes)
            return "subject relative"
        marked = draw < 0.87
        self.object_relative(kind, sizes, marked)
        return "object relative" if marked else "reduced relative"


def _sentence(rng: Random, mix: str, plural: bool) -> Sentence:
    """A sentence whose verb has that number."""
    shares = _MIXES[mix]
    attractors = rng.choices(range(len(shares)), [sum(row) for row in shares])[0]
    fronted = rng.random() < _FRONTED
    pair = ""  # where "and" occurs, if anywhere
    if rng.random() < _COORDINATION:
        if plural and rng.random() < _COORDINATED_SUBJECT:
            pair = "subject"
        else:
            pair = "front" if fronted and rng.random() < 0.4 else "modifier"
    heads = 2 if pair == "subject" else 1

    # Sentences that are too long are drawn again with the choices above unchanged, to preserve their shares.
    # The few that hardly fit (fronted, coordinated, four attractors) take about ten tries.
    for _ in range(200):
        row = shares[attractors]
        agreeing = rng.choices(range(len(row)), row)[0]
        if pair == "modifier":
            agreeing = max(agreeing, 2 - attractors)
        sizes = [1] * (attractors + agreeing)
        if pair == "modifier":
            place = rng.randrange(len(sizes) - 1)
            sizes[place : place + 2] = [2]
        draft = _Draft(rng)
        if fronted:
            draft.front(pair == "front")
        before = len(draft.nouns)
        kind = rng.choices(_KINDS, _KIND_WEIGHTS)[0]
        draft.group(kind, heads)
        construction = draft.modifiers(kind, sizes)
        if len(draft.words) <= _LONGEST:
            break
    else:
        return _sentence(rng, mix, plural)

    # The numbers come last, so that none of the words above can depend on them.
    opposite = [True] * attractors + [False] * agreeing
    rng.shuffle(opposite)
    numbers = [plural != (rng.random() < _FRONT_OPPOSITE) for _ in range(before)]
    numbers += [rng.random() < 0.35 for _ in range(2)] if heads == 2 else [plural]
    numbers += [plural != other for other in opposite]
    for (position, forms), number in zip(draft.nouns, numbers, strict=True):
        draft.words[position] = forms[number]
    positions = [position for position, _ in draft.nouns]
    core = "coordinated" if heads == 2 else construction
    return Sentence(
        tokens=tuple(draft.words),
        plural=plural,
        attractors=attractors,
        construction=f"fronted {core}" if fronted else core,
        nouns=tuple(zip(positions, numbers, strict=True)),
        subject=tuple(positions[before : before + heads]),
    )


def _draw(rng: Random, mix: str, count: int, avoid: set[tuple[str, ...]], unique: bool) -> list[Sentence]:
    """Sentences in random order, half of them plural, none of them in `avoid`."""
    labels = [index % 2 == 1 for index in range(count)]
    rng.shuffle(labels)
    sentences = []
    for plural in labels:
        sentence = _sentence(rng, mix, plural)
        while sentence.tokens in avoid:
            sentence = _sentence(rng, mix, plural)
        if unique:
            avoid.add(sentence.tokens)
        sentences.append(sentence)
    return sentences


def generate(count: int, seed: int, *, mix: Literal["balanced", "natural"] = "balanced") -> list[Sentence]:
    """Generate sentences, half singular and half plural; equal seeds give equal sentences.

    Short sentences may occur more than once.

    Args:
        count: number of sentences.
        seed: random seed.
        mix: "balanced", for testing: each number of attractors from 0 to 4 is frequent. "natural", for
            training: most sentences have no attractor, and four are rare.
    """
    _check.whole("count", count, 0)
    _check.whole("seed", seed, 0)
    _check.one_of("mix", mix, _MIXES)
    return _draw(Random(seed), mix, count, set(), unique=False)


def split(train: int, test: int, seed: int) -> tuple[list[Sentence], list[Sentence]]:
    """Generate training sentences of the natural mix and test sentences of the balanced one: (train, test).

    As in Linzen et al., attractors are rare in training and counted in testing: what a model has learnt shows
    in how well its accuracy holds up as their number grows. Test sentences are distinct and do not occur in
    the training set; short training sentences may occur twice. See `generate` for the mixes.

    Args:
        train: number of training sentences.
        test: number of test sentences.
        seed: random seed.
    """
    _check.whole("train", train, 0)
    _check.whole("test", test, 0)
    _check.whole("seed", seed, 0)
    rng = Random(seed)
    seen: set[tuple[str, ...]] = set()
    held_out = _draw(rng, "balanced", test, seen, unique=True)
    return _draw(rng, "natural", train, seen, unique=False), held_out


_OTHER_NUMBER = {
    word: other for nouns in _NOUNS.values() for pair in nouns for word, other in (pair, pair[::-1])
}


def flipped(sentence: Sentence) -> Sentence:
    """The sentence with its subject in the other number, and all other words as they are.

    Args:
        sentence: one whose subject has one head; a coordinated subject is plural whatever its nouns are.
    """
    if len(sentence.subject) != 1:
        raise ValueError(f"sentence must have a subject with one head, got {str(sentence)!r}")
    [head] = sentence.subject
    words, plural = list(sentence.tokens), not sentence.plural
    words[head] = _OTHER_NUMBER[words[head]]
    nouns = tuple((place, plural if place == head else number) for place, number in sentence.nouns)
    attractors = sum(number != plural for place, number in nouns if place > head)
    return replace(sentence, tokens=tuple(words), plural=plural, nouns=nouns, attractors=attractors)


def encode(sentence: Sentence | str) -> list[int]:
    """Token ids (indices into `VOCABULARY`), starting with "[CLS]"; unknown words become "[UNK]".

    Args:
        sentence: a `Sentence`, or plain text of words and commas, in upper or lower case.
    """
    words = sentence.replace(",", " , ").lower().split() if isinstance(sentence, str) else sentence.tokens
    return [_CLS, *(_INDEX.get(word, _UNK) for word in words)]


def baselines(train: Sequence[Sentence], test: Sequence[Sentence]) -> dict[str, float]:
    """Accuracy on `test` of three rules that need no grammar.

    - "majority": the more frequent number in `train`; singular if both are equally frequent.
    - "first noun": the number of the first noun in the sentence.
    - "nearest noun": the number of the noun nearest to the verb, that is the last one.

    Args:
        train: sentences in which labels are counted.
        test: sentences to predict.
    """
    for name, sentences in (("train", train), ("test", test)):
        if not sentences:
            raise ValueError(f"{name} must contain at least one sentence, got none")
    majority = 2 * sum(sentence.plural for sentence in train) > len(train)
    right = {
        "majority": sum(sentence.plural == majority for sentence in test),
        "first noun": sum(sentence.plural == sentence.nouns[0][1] for sentence in test),
        "nearest noun": sum(sentence.plural == sentence.nouns[-1][1] for sentence in test),
    }
    return {name: hits / len(test) for name, hits in right.items()}
