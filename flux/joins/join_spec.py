"""The declaration of a join, as an operator takes it: positions of columns in place of names.

    c.ad = v.ad AND c.ts BETWEEN v.ts AND v.ts + INTERVAL 10 MINUTES

is, for ``c`` as the left input, the key (ad, ad) and two bounds of the left event time: at least ``v.ts`` + 0, at most ``v.ts`` +
600,000,000. The concatenated columns of a join are those of the left input, then those of the right one. A rest of the condition
is an expression over them, in which column number n has the name ``str(n)``, because names may be there twice.

Law: a pair of rows is a match if the keys are equal and none is null, all bounds hold, and the rest is true. A bound does not
hold if its time or its column is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flux.errors import UsageError
from flux.expressions.tree import Column, Expression
from flux.windows.durations import UNITS, words

LEFT, RIGHT = 0, 1
#: The event time of given rows is that of the left row, or of the right row where there is no left one: full outer joins.
EITHER = 2
#: The kinds of joins, under the names that Spark's plans give them.
KINDS = ("inner", "left_outer", "right_outer", "full_outer", "left_semi", "left_anti")
#: Offsets of bounds, and ttl, in microseconds: sums with times stay within 64 bits.
OFFSET_MAX = 1 << 60
_LONGEST = f"{OFFSET_MAX // UNITS['day']:,} days"


class TimeBound(NamedTuple):
    """A bound of the event time of one side by a column of the other side, in microseconds; both ends are included:
    ``time <= column + offset`` if it is an upper bound, else ``time >= column + offset``."""

    #: The side whose event time is bounded, ``LEFT`` or ``RIGHT``.
    side: int
    upper: bool
    #: Position of the column among those of the other side; a timestamp, perhaps the event time of the other side.
    column: int
    #: Microseconds, perhaps negative. A strict comparison is a bound whose offset is one microsecond less, or more.
    offset: int


class TimeRange(NamedTuple):
    """A limit, by a column of a row, of the event time of rows that may match it on the other side."""

    #: Position of the column in the row.
    column: int
    upper: bool
    offset: int


@dataclass(frozen=True)
class JoinSpec:
    """A join of two inputs. Positions are those of columns in their input, if nothing else is said."""

    #: One of ``KINDS``.
    how: str
    #: By side: the key columns. The types of a pair are equal, and both inputs are partitioned by them.
    keys: tuple[tuple[int, ...], tuple[int, ...]]
    #: The given columns: name, and position in the concatenated columns. Semi and anti joins have left ones alone.
    outputs: tuple[tuple[str, int], ...]
    #: By side: the column with the event time, whose watermark is that of the input. None: the input has no event time.
    times: tuple[int | None, int | None] = (None, None)
    bounds: tuple[TimeBound, ...] = ()
    #: The rest of the condition, with concatenated columns named by their positions.
    rest: Expression | None = None
    #: Microseconds for which a row waits for matches, see the operator. None: as bounds say, without them for ever. A user's
    #: declaration over two event times has bounds in its place (``with_ttl_as_bounds``).
    ttl: int | None = None
    #: The side whose event time is that of given rows, or ``EITHER``. None: given rows have no event time.
    time_of: int | None = None

    def __post_init__(self) -> None:
        left, right = self.keys
        if self.how not in KINDS:
            raise UsageError(f"a join is one of {', '.join(KINDS)}, not {self.how!r}")
        if not left or len(left) != len(right):
            raise UsageError(f"a join needs as many key columns on both sides, at least one; got {left} and {right}")
        if not self.outputs:
            raise UsageError("a join gives at least one column")
        for bound in self.bounds:
            if self.times[bound.side] is None:
                raise UsageError(f"{bound}: this side has no event time")
        if any(abs(bound.offset) > OFFSET_MAX for bound in self.bounds):
            raise UsageError(f"a bound of a join is at most {_LONGEST}")
        if self.ttl is not None and not 0 < self.ttl <= OFFSET_MAX:
            raise UsageError(f"the ttl of a join is a duration above zero, at most {_LONGEST}; got {words(self.ttl)}")
        if any(self.times[side] is None for side in self.sides_of_time):
            raise UsageError("the event time of given rows is that of a side that has none")

    @property
    def outer(self) -> tuple[bool, bool]:
        """Rows without a match are given, by side."""
        return self.how in ("left_outer", "full_outer", "left_anti"), self.how in ("right_outer", "full_outer")

    @property
    def once(self) -> bool:
        """Whether a left row has no further use once it has a match: semi and anti joins."""
        return self.how in ("left_semi", "left_anti")

    @property
    def sides_of_time(self) -> tuple[int, ...]:
        """The sides whose event times are those of given rows."""
        if self.time_of is None:
            return ()
        return (LEFT, RIGHT) if self.time_of == EITHER else (self.time_of,)

    def only(self, wanted: Sequence[int], width: int) -> tuple[JoinSpec, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the join that gives these of its columns alone, and by side the columns of the input at which it looks: its
        positions are those among them. ``width``: the number of columns of the left input."""
        outputs = [self.outputs[at] for at in wanted]
        named = [] if self.rest is None else [each for each in self.rest.walk() if isinstance(each, Column)]
        rest = {each.name: each for each in named if each.name.isdigit()}  # others are parts that it computes once
        joint = {*(at for _, at in outputs), *map(int, rest)}
        read = []
        for side, first in ((LEFT, 0), (RIGHT, width)):
            time, bounds = self.times[side], [each.column for each in self.bounds if each.side != side]
            own = {at - first for at in joint if (at >= width) == (side == RIGHT)}
            read.append(tuple(sorted(own.union(self.keys[side], bounds, () if time is None else (time,)))))
        left, right = ({at: place for place, at in enumerate(each)} for each in read)
        one, other = (None if at is None else own[at] for own, at in zip((left, right), self.times, strict=True))
        places = left | {width + at: len(left) + place for at, place in right.items()}
        return replace(
            self,
            keys=(tuple(left[at] for at in self.keys[LEFT]), tuple(right[at] for at in self.keys[RIGHT])),
            outputs=tuple((name, places[at]) for name, at in outputs),
            times=(one, other),
            bounds=tuple(each._replace(column=(right, left)[each.side][each.column]) for each in self.bounds),
            rest=self.rest
            and self.rest.replaced({name: Column(str(places[int(name)]), each.type) for name, each in rest.items()}),
        ), (read[LEFT], read[RIGHT])

    def with_ttl_as_bounds(self) -> JoinSpec:
        """Return the join with ``ttl`` as two bounds, where both sides have event time: rows match if their times are at most
        ``ttl`` apart. A wait by the watermark of a row's own side would end before a partner comes, or long after, by the speed
        of the other side."""
        left, right = self.times
        if self.ttl is None or left is None or right is None:
            return self
        apart = TimeBound(LEFT, False, right, -self.ttl), TimeBound(LEFT, True, right, self.ttl)
        return replace(self, bounds=(*self.bounds, *apart), ttl=None)

    def judges(self, side: int) -> bool:
        """Return whether event times of this side count, in bounds or as those of given rows, so that rows behind the watermark
        are left out."""
        at = self.times[side]
        in_bounds = at is not None and any(b.side == side or b.column == at for b in self.bounds)
        return side in self.sides_of_time or in_bounds

    def ranges(self, side: int) -> list[TimeRange]:
        """Return the limits that a row of this side sets for the event time of rows that match it. A bound between the event
        times of both sides says something of both."""
        other = 1 - side
        found = [TimeRange(each.column, each.upper, each.offset) for each in self.bounds if each.side == other]
        for each in self.bounds:
            if each.side == side and each.column == self.times[other]:
                found.append(TimeRange(self._time(side), not each.upper, -each.offset))
        return found

    def evicts(self, side: int) -> bool:
        """Return whether bounds end the wait of rows of this side: the watermark of the other side passes all that may match."""
        return any(each.upper for each in self.ranges(side))

    def forgets(self, side: int) -> bool:
        """Return whether rows of this side are forgotten before the input ends: by bounds, or by ``ttl``."""
        return self.ttl is not None or self.evicts(side)

    def held_back(self, side: int) -> int | None:
        """Return the microseconds by which event times of this side, in given rows, may be below the least watermark of both
        inputs: those of rows that still wait. None: bounds between the two event times do not say it."""
        other = 1 - side
        lower = [each.offset for each in self.ranges(other) if not each.upper and each.column == self.times[other]]
        return max(0, -max(lower)) if lower else None

    def _time(self, side: int) -> int:
        at = self.times[side]
        assert at is not None, "checked when the declaration was made"
        return at
