"""The habits that ``tests.language`` counts may only become rarer, room by room.

The table ``language_limits.json`` holds the count of each room and habit. A room that is not in the table has the limit 0
for everything. ``python -m tests.test_language --write`` lowers limits that the counts have fallen below; it raises none.
"""

from __future__ import annotations

import io
import json
import sys
import tokenize
from pathlib import Path

import pytest

from tests import language

LIMITS = Path(__file__).with_name("language_limits.json")
Limits = dict[str, dict[str, int]]

SAMPLE = '''"""Those whose time has come have a step to apply."""

# Of larger steps the rows
# cost more than the calls.
LIMIT = 4  # how long a partition may wait


class Table:
    """By worker."""

    def rows(self):
        """The rows of the table."""

    @property
    def size(self):
        """The number of rows."""
'''


def _by_habit(source: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in language.survey({"flux/sample.py": source}):
        found.setdefault(each.habit, []).append(each.line)
    return found


def test_each_habit_is_found_where_it_stands() -> None:
    assert _by_habit(SAMPLE) == {
        "relative opener": [1],
        "opens with Of": [3],
        "no head word": [8],
        "function without verb": [11],
    }


@pytest.mark.parametrize(
    ("sentence", "habit"),
    [
        ("It tells what it has.", "clause for a noun"),
        ("Waits for so many seconds.", "so many"),
        ("First sentence. Whose turn is next.", "relative opener"),
        ("Nobody waits for it.", "somebody"),
        ("The user decides what he reads.", "he"),
    ],
)
def test_a_sentence_has_its_habit(sentence: str, habit: str) -> None:
    assert habit in _by_habit(f'"""{sentence}"""\n')
    assert habit in _by_habit(f"X = 1  # {sentence}\n")


def test_plain_text_has_no_finding() -> None:
    plain = '"""Wakes every replica whose timer is due."""\n\n\ndef rows():\n    """Return the rows that are due."""\n'
    assert _by_habit(plain) == {}


STRINGS = r"""
a = "# \" # none"  # one: "
b = 'it\'s # none' + r'\\' + "'#'"  # two
c = f"{a + '#'} # none" + b'#'  # three
d = '''# none "" ' \''' # none'''  # four

    # five, alone
#: six
"""


def test_comments_are_those_of_the_tokenizer() -> None:
    for source in (STRINGS, Path(__file__).read_text(), Path(language.__file__).read_text()):
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_tokenizer = [
            language.Comment(*token.start, token.string, not token.line[: token.start[1]].strip())
            for token in tokens
            if token.type == tokenize.COMMENT
        ]
        assert language.comments(source) == by_tokenizer
    assert len(language.comments(STRINGS)) == 6


def test_a_class_name_in_two_files_is_found_in_both() -> None:
    found = language.survey({"flux/one.py": "class Host: ...\n", "controller/two.py": "class Host: ...\n"})
    assert [(each.path, each.habit) for each in found] == [
        ("controller/two.py", "class name in several files"),
        ("flux/one.py", "class name in several files"),
    ]
    assert not language.survey({"flux/one.py": "class Host: ...\n", "benchmarks/two.py": "class Host: ...\n"})


def over(counts: Limits, limits: Limits) -> list[str]:
    """Describe every count that is above its limit."""
    return [
        f"{room}: {n} of {habit!r}, at most {limits.get(room, {}).get(habit, 0)}"
        for room, habits in counts.items()
        for habit, n in habits.items()
        if n > limits.get(room, {}).get(habit, 0)
    ]


def lowered(counts: Limits, limits: Limits) -> Limits:
    """Return the limits after a run: no limit is above its count, and none rises."""
    lower = {
        room: {habit: least for habit, n in habits.items() if (least := min(n, counts.get(room, {}).get(habit, 0)))}
        for room, habits in limits.items()
    }
    return {room: habits for room, habits in lower.items() if habits}


def test_a_limit_falls_and_never_rises() -> None:
    limits = {"a": {"he": 3, "so many": 1}, "b": {"he": 1}}
    counts = {"a": {"he": 2, "so many": 4}, "c": {"he": 1}}
    assert over(counts, limits) == ["a: 4 of 'so many', at most 1", "c: 1 of 'he', at most 0"]
    assert lowered(counts, limits) == {"a": {"he": 2, "so many": 1}}


def test_no_room_has_more_of_a_habit_than_its_limit() -> None:
    limits = json.loads(LIMITS.read_text())
    too_many = over(language.counts_by_room(language.survey(language.read_sources())), limits)
    assert not too_many, (
        "\n".join(too_many)
        + "\n`python -m tests.language -v ROOM` prints the sentences. CONTRIBUTING.md, names and text, says "
        "how to write them."
    )


def write() -> None:
    """Lower the limits to the counts. The first run, without a table, takes the counts as they are."""
    counts = language.counts_by_room(language.survey(language.read_sources()))
    limits = lowered(counts, json.loads(LIMITS.read_text())) if LIMITS.exists() else counts
    LIMITS.write_text(json.dumps(limits, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.test_language --write: lower the limits to the counts of today")
    write()
