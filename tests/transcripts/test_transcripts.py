"""The main stories go as their transcripts say."""

from __future__ import annotations

import difflib

import pytest

from tests.transcripts.__main__ import FOLDER, made
from tests.transcripts.flows import FLOWS

RENEW = "if the new course is right: python -m tests.transcripts --write"
#: Most lines of a transcript, which is read from top to bottom.
LINES_MAX = 70


@pytest.mark.parametrize("name", FLOWS)
def test_the_story_goes_as_it_is_written_down(name: str) -> None:
    written, now = (FOLDER / f"{name}.txt").read_text(), made(name)
    difference = "\n".join(difflib.unified_diff(written.splitlines(), now.splitlines(), "written", "now", lineterm=""))
    assert not difference, f"{difference}\n\n{RENEW} {name}"


def test_every_transcript_has_its_flow_and_is_short() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.txt")}
    assert lengths.keys() == FLOWS.keys(), RENEW
    assert {name for name, length in lengths.items() if not 12 < length < LINES_MAX} == set()
