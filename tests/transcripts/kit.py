"""The parts of a scripted flow: a simulation without chance, its story, and the events of it that are worth reading."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.faults import Faults
from tests.simulation.flows import Dataflow, chain
from tests.simulation.run import Simulation
from tests.simulation.stage_kinds import Watched
from tests.simulation.story import Event, Story

#: Time of a message on its way.
WAY_S = 0.001
#: Faults under which sources wait with their end until all is repaired.
PATIENT = Faults(patient=True, calm_after_s=0.1)
#: Few bytes, so that numbers are short; more than these flows need.
CREDIT_BYTES = 80_000
#: Most characters of a line of the heading.
WIDTH = 110


@dataclass
class Flow:
    """One scripted run. ``about``: the partitions and streams in its transcript."""

    sim: Simulation
    about: set[str]
    story: Story = field(init=False)
    _parts: list[Event] = field(default_factory=list)
    _from: int = 0

    def __post_init__(self) -> None:
        self.story = Story(self.sim)
        self.sim.network.arrival = lambda: self.sim.world.now + WAY_S  # type: ignore[method-assign]
        self.sim.world.throw = lambda sides: sides  # type: ignore[method-assign]
        self.sim.world.random.random = lambda: 0.5  # type: ignore[method-assign]

    def until(self, reached: Callable[[], Any]) -> None:
        self.sim.run_until(lambda: bool(reached()))

    def until_ms(self, at_ms: float) -> None:
        end = self.story.began + at_ms / 1000
        self.sim.world.at(end, lambda: None)
        self.until(lambda: self.sim.world.now >= end)

    def until_more_ms(self, more_ms: float) -> None:
        self.until_ms((self.sim.world.now - self.story.began) * 1000 + more_ms)

    def until_told(self, text: str) -> None:
        """Run until the story has an event with this text behind the last call of ``skip`` or ``keep``."""
        looked = self._from

        def told() -> bool:
            nonlocal looked
            news = self.story.events[looked:]
            looked += len(news)
            return any(text in event.text for event in news)

        self.until(told)

    def skip(self) -> None:
        """Leave the events up to now out of the transcript."""
        self._from = len(self.story.events)

    def keep(self, *without: str) -> None:
        """Add the events since the last call to the transcript, except those with one of these words."""
        told = set(map(id, self.story.told(self.about)))
        for event in self.story.events[self._from :]:
            if id(event) in told and not any(word in event.text for word in without):
                self._parts.append(event)
        self.skip()

    def text(self, title: str) -> str:
        heading = textwrap.wrap(" ".join(title.split()), WIDTH)
        lines = [
            *(f"# {line}" for line in heading),
            "",
            "       ms",
            *(without_sizes(str(part)) for part in self._parts),
        ]
        return "".join(f"{line.rstrip()}\n" for line in lines)


def without_sizes(line: str) -> str:
    """Leave the sizes of pickled states out of a line: they depend on the strings that Python happens to share."""
    if "state" not in line:
        return line
    line = re.sub(
        r"bytes \d+-\d+ of \d+", "a part of N bytes", re.sub(r"[\d,]+ bytes of state", "N bytes of state", line)
    )
    return re.sub(r"\d+ bytes", "N bytes", line)


def flow(
    *about: str,
    copies: int = 2,
    slots: int = 3,
    batches: int = 40,
    faults: Faults | None = None,
    dataflow: Callable[..., Dataflow] | None = None,
    **settings: Any,
) -> Flow:
    """Make a run of one source, a stage and a sink, of two partitions each, or of ``dataflow`` in place of these."""

    def made(ledger: Any) -> Dataflow:
        given = {"credit_max_bytes": CREDIT_BYTES, "step_max_rows": 4} | settings
        if dataflow is not None:
            return dataflow(ledger, batches=batches, **given)
        return replace(chain(ledger, (Watched,), copies, batches=batches, **given), credit_floor=1)

    return Flow(Simulation(0, faults or Faults(), copies, slots, made), set(about))
