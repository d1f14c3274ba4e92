"""Generated long-range tasks in the manner of RULER and of MRCR: "-style", not these themselves.

RULER: Hsieh et al. 2024, arXiv 2404.06654. MRCR, for which `mrcr` is named: Vodrahalli et al. 2024, arXiv 2409.12640.

Each sample fills its context exactly: needles stand at random positions of a haystack of running text, the question
and its answer at the end. Only the answer's tokens count.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from indexcache_search.data.templates import render
from indexcache_search.errors import DataError
from indexcache_search.eval.tasks import Sample

_HEAD = "Below is a long text. Somewhere in it stand facts that a question at its end asks for.\n\n"
_PLACE = "<<<indexcache>>>"


@dataclass(frozen=True)
class Puzzle:
    """Lines to hide, the question, the words before the answer, and the answers; `ordered` lines keep their order."""

    needles: Sequence[str]
    question: str
    lead: str
    answers: Sequence[str]
    ordered: bool = False


def word(rng: random.Random) -> str:
    """Make up a word of three syllables."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))


def _words(rng: random.Random, count: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words[word(rng)] = None
    return list(words)


def _number(rng: random.Random) -> str:
    return str(rng.randint(100_000, 999_999))


def _fact(key: str, value: str) -> str:
    return f"\nNote: the code of {key} is {value}.\n"


def multi_key(rng: random.Random) -> Puzzle:
    """Ask for one of sixteen keys."""
    keys = _words(rng, 16)
    values = [_number(rng) for _ in keys]
    asked = rng.randrange(16)
    question = f"What is the code of {keys[asked]}?"
    return Puzzle(list(map(_fact, keys, values)), question, f"The code of {keys[asked]} is", [values[asked]])


def multi_value(rng: random.Random) -> Puzzle:
    """Ask for all four values of one key; three other keys have one value each."""
    key, *others = _words(rng, 4)
    values = [_number(rng) for _ in range(4)]
    needles = [_fact(key, value) for value in values] + [_fact(other, _number(rng)) for other in others]
    return Puzzle(needles, f"Which four codes does {key} have?", f"The codes of {key} are", values)


def multi_query(rng: random.Random) -> Puzzle:
    """Ask for four of eight keys."""
    keys = _words(rng, 8)
    values = [_number(rng) for _ in keys]
    asked = ", ".join(keys[:4])
    return Puzzle(list(map(_fact, keys, values)), f"What are the codes of {asked}?", "The codes are", values[:4])


def variable_tracking(rng: random.Random) -> Puzzle:
    """Ask for the variables that hold one number; there are two chains of five assignments."""
    names = [name.upper() for name in _words(rng, 10)]
    numbers = [_number(rng), _number(rng)]
    needles = []
    for number, chain in zip(numbers, (names[:5], names[5:]), strict=True):
        needles.append(f"\nVAR {chain[0]} = {number}\n")
        needles += [f"\nVAR {later} = VAR {earlier}\n" for earlier, later in itertools.pairwise(chain)]
    return Puzzle(needles, f"Which five variables hold {numbers[0]}?", "They are", names[:5], ordered=True)


def common_words(rng: random.Random) -> Puzzle:
    """Ask for the three words that occur twelve times; thirty others occur twice."""
    words = _words(rng, 33)
    counts = [12] * 3 + [2] * 30
    needles = [f" {word}" for word, count in zip(words, counts, strict=True) for _ in range(count)]
    rng.shuffle(needles)
    return Puzzle(needles, "Which three made-up words stand most often in the text?", "They are", words[:3])


def mrcr(rng: random.Random) -> Puzzle:
    """Ask to repeat one of four notes about the same thing, by its number; four others are about another thing."""
    topics = _words(rng, 2)
    order = [0, 1] * 4
    rng.shuffle(order)
    notes = [" ".join(_words(rng, 8)) for _ in order]
    needles = [
        f"\nRequest: write a note about {topics[topic]}.\nNote: {note}.\n"
        for topic, note in zip(order, notes, strict=True)
    ]
    about, number = rng.randrange(2), rng.randrange(4)
    which = f"the {('first', 'second', 'third', 'fourth')[number]} note about {topics[about]}"
    answer = [note for topic, note in zip(order, notes, strict=True) if topic == about][number]
    return Puzzle(needles, f"What does {which} say?", f"{which.capitalize()} says:", [answer], ordered=True)


TASKS: dict[str, Callable[[random.Random], Puzzle]] = {
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "mrcr": mrcr,
}


def sample(task: str, tokenizer: Any, haystack: Sequence[int], seq_len: int, seed: int, *, chat: bool) -> Sample:
    """See `Tasks.sample`."""
    rng = random.Random(f"{task} {seed}")  # noqa: S311
    puzzle = TASKS[task](rng)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    before, after = _template(tokenizer) if chat else ("", "\n")
    start = encode(before + _HEAD)
    end = encode(f"\n\nQuestion: {puzzle.question}{after}{puzzle.lead}")
    answer = encode(" " + ", ".join(puzzle.answers) + ".")
    needles = [encode(needle) for needle in puzzle.needles]
    room = seq_len - len(start) - len(end) - len(answer) - sum(map(len, needles))
    if room < 0:
        raise DataError(f"{task}: needs {seq_len - room} tokens without any text around, --seq-len is {seq_len}")
    if len(haystack) < room:
        raise DataError(
            f"{task}: the haystack has {len(haystack)} tokens, expected at least {room}; see --tasks haystack"
        )
    first = rng.randint(0, len(haystack) - room)
    cuts = sorted(rng.randint(0, room) for _ in needles)
    if not puzzle.ordered:
        rng.shuffle(needles)
    tokens, at = start, first
    for needle, cut in zip(needles, cuts, strict=True):
        tokens = [*tokens, *haystack[at : first + cut], *needle]
        at = first + cut
    tokens = [*tokens, *haystack[at : first + room], *end, *answer]
    mask = np.arange(seq_len) >= seq_len - len(answer)
    return Sample(np.asarray(tokens, np.int32), mask, tuple(puzzle.answers))


def _template(tokenizer: Any) -> tuple[str, str]:
    """Return the chat template's text before a question, and between the question and the answer."""
    try:
        before, after = render(tokenizer, [{"role": "user", "content": _PLACE}], asks=True).split(_PLACE)
    except Exception as error:  # templates may raise anything
        raise DataError(f"--tasks chat=yes: the tokenizer's chat template can't be used: {error}") from None
    return before, after
