"""Changes that a standby lacks: those of all cuts after the checkpoint that it says it has, and no others."""

from __future__ import annotations

import pytest

from flux.replica.deltas import DeltaTracker
from flux.wire.parts import PartLimits

ONE, TWO = 1, 2
LIVES = {ONE: 10, TWO: 20}
LIMITS = PartLimits(changes_max=3, changes_share=0.5)


def changes(text: str) -> memoryview:
    return memoryview(text.encode())


def led(term: int = 5) -> DeltaTracker:
    cuts = DeltaTracker()
    cuts.follow(term, LIVES, LIMITS)
    return cuts


def whole(cuts: DeltaTracker, worker: int, number: int, nbytes: int = 100, confirmed: bool = True) -> None:
    cuts.sent_whole(worker, LIVES[worker], number, nbytes)
    if confirmed:
        cuts.confirm(worker, number)


def lacking(cuts: DeltaTracker, worker: int) -> list[bytes] | None:
    """Return the changes that the worker lacks; None: it gets a whole checkpoint."""
    held = cuts.base(worker)
    return None if held is None else [bytes(each) for each in cuts.since(held)]


def test_one_that_has_not_said_that_it_has_a_checkpoint_gets_a_whole_one() -> None:
    cuts = led()
    assert lacking(cuts, ONE) is None
    whole(cuts, ONE, 7, confirmed=False)
    assert lacking(cuts, ONE) is None
    cuts.confirm(ONE, 6)
    assert lacking(cuts, ONE) is None, "that was an earlier one"
    cuts.confirm(ONE, 7)
    assert lacking(cuts, ONE) == []


def test_each_gets_the_changes_since_its_own_checkpoint() -> None:
    cuts = led()
    whole(cuts, ONE, 1)
    cuts.add(changes("a"))
    whole(cuts, TWO, 2)
    cuts.add(changes("b"))
    assert lacking(cuts, ONE) == [b"a", b"b"]
    assert lacking(cuts, TWO) == [b"b"]
    cuts.sent_changes(ONE, 3, 5)
    assert lacking(cuts, ONE) is None, "it has not said that it has got them"
    cuts.confirm(ONE, 3)
    cuts.add(changes("c"))
    assert lacking(cuts, ONE) == [b"c"]
    assert lacking(cuts, TWO) == [b"b", b"c"]
    cuts.validate()


def test_changes_are_kept_as_long_as_anybody_lacks_them() -> None:
    cuts = led()
    assert not cuts.wanted
    cuts.add(changes("nobody"))
    assert cuts.nbytes == 0
    whole(cuts, ONE, 1)
    whole(cuts, TWO, 2)
    cuts.add(changes("ab"))
    cuts.sent_changes(ONE, 3, 5)
    assert cuts.nbytes == 2
    cuts.sent_changes(TWO, 4, 5)
    assert cuts.nbytes == 0


def test_where_the_changes_are_not_known_everybody_gets_a_whole_one() -> None:
    cuts = led()
    whole(cuts, ONE, 1)
    whole(cuts, TWO, 2)
    cuts.add(None)
    assert (lacking(cuts, ONE), lacking(cuts, TWO), cuts.wanted) == (None, None, False)


@pytest.mark.parametrize(("term", "lives"), [(6, LIVES), (5, {ONE: 11}), (5, {TWO: 20})])
def test_another_term_and_another_life_begin_with_a_whole_one(term: int, lives: dict[int, int]) -> None:
    cuts = led()
    whole(cuts, ONE, 1)
    cuts.follow(5, LIVES, LIMITS)
    assert lacking(cuts, ONE) == []
    cuts.follow(term, lives, LIMITS)
    assert lacking(cuts, ONE) is None


def test_one_that_lacks_what_it_was_held_to_have_gets_a_whole_one() -> None:
    cuts = led()
    whole(cuts, ONE, 1)
    cuts.add(changes("a"))
    cuts.forget(ONE)
    assert lacking(cuts, ONE) is None
    assert cuts.nbytes == 0


def test_after_some_changes_in_a_row_a_whole_one_is_due() -> None:
    cuts = led()
    whole(cuts, ONE, 1)
    for number in (2, 3, 4):
        assert lacking(cuts, ONE) == []
        cuts.add(changes("a"))
        cuts.sent_changes(ONE, number, 1)
        cuts.confirm(ONE, number)
    assert lacking(cuts, ONE) is None
    assert cuts.expected(ONE, 1000) == 1000


def test_changes_of_more_than_half_of_the_whole_one_are_not_kept_for_anybody() -> None:
    cuts = led()
    whole(cuts, ONE, 1)
    cuts.add(changes("a" * 30))
    cuts.sent_changes(ONE, 2, 30)
    cuts.confirm(ONE, 2)
    assert cuts.expected(ONE, 1000) == 30
    cuts.add(changes("a" * 20))
    assert lacking(cuts, ONE) == [b"a" * 20]
    cuts.add(changes("a"))
    assert lacking(cuts, ONE) is None
    assert cuts.nbytes == 0
