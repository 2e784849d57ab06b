"""Faults sharpened for one purpose: each mix soon brings about an event that one random run in some thousands meets.

Some of the random runs take their faults from here, and each broken variant names the mix that shows it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.simulation import faults as faults_
from tests.simulation.faults import Faults
from tests.simulation.losing_logs import LogFaults
from tests.simulation.operators import STORMY, Habits

#: The share of runs with a mix, among runs with several replicas.
MIXED_SHARE = 0.2


@dataclass(frozen=True)
class Mix:
    """The faults and the traits of some runs. The seed draws the rest."""

    #: None: drawn.
    faults: Faults | None = None
    #: Copies of every partition; 0: drawn.
    copies: int = 0
    #: Slots of workers; 0: drawn.
    slots: int = 0
    #: Replicas may not be far apart.
    bounded: bool = False
    #: The output is fetched at the end.
    collected: bool = False
    #: Witnesses of every partition.
    witnesses: int = 0
    #: The share of stages with standbys in place of secondaries; None: drawn.
    standbys: float | None = None
    #: Lives of a query that loses everything, again and again, and goes on from a directory; 0: there is no directory.
    lives: int = 0
    #: The share of sources that have positions of their own.
    numbered: float = 0.0
    #: Some operators say from which step on their rows matter, and have upstream replicas in place of standbys.
    upstream: bool = False
    #: Requests of people; None: drawn, or none if faults are given.
    habits: Habits | None = None
    #: Sources with positions of their own are logs that lose records.
    losing: bool = False
    #: Losses of records that are still needed, and of topics.
    log_faults: LogFaults | None = None
    #: Rows have event time (``timed_flows``).
    event_time: bool = False
    #: Some sources with event time are aligned, or do not believe each time.
    ahead: bool = False
    #: Rows with event time are joined, ranked, or given once.
    related: bool = False
    #: Joins and ranks are of all kinds, and rows look up tables.
    wide: bool = False
    #: In place of joins and ranks, rows look up a table that is read anew.
    looks_up: bool = False
    #: Streams go round links that bring nothing for ``link.timeout``, as in the seeds of reach.
    reach: bool = False
    #: Some aggregates have replicas without a common order.
    marks: bool = False
    #: Stages come and go.
    grows: bool = False
    #: Stages come and go in queries of all kinds.
    all_kinds: bool = False
    #: Sources come and go in these queries, too.
    comes: bool = False
    #: Some stages come behind the running source.
    sources: bool = False
    #: The time after which a primary counts as unreached in runs with ``reach``; 0: the default.
    unreached_s: float = 0.0
    #: Copies of stages are read over one feed, hedged, or over all.
    feeds: bool = False


#: All traits as the seed draws them.
ANY = Mix()
#: Nothing fails: an error is a fault of the product.
FAULTLESS = Mix(Faults())
#: Much is lost, and primaries die when only some of the others have heard them: one secondary may have a part of the order that
#: the next one lacks, and the new primary orders otherwise.
UNEVEN = Mix(
    Faults(
        calm_after_s=1.6,
        delay_s=0.01,
        breaks_per_s=20.0,
        loss_probability=0.3,
        crashes_per_s=3.0,
        uneven_crash_probability=1.0,
        read_s=0.1,
    ),
    copies=3,
    slots=5,
)
#: Primaries are cut off from the controller, given up, and go on without knowing.
DEPOSED = Mix(
    Faults(
        calm_after_s=2.0,
        delay_s=0.002,
        spike_probability=0.1,
        spike=50.0,
        control_cuts_per_s=4.0,
        cut_s=2.0,
        late_order_probability=0.7,
        late_order_s=0.5,
        read_s=0.05,
        patient=True,
    ),
    copies=3,
    slots=4,
)
#: Answers are held up in one direction, so that acks are old when they come, and one worker is slow, so that the batches of these
#: acks are still needed.
OLD_ACKS = Mix(
    Faults(
        calm_after_s=2.0,
        delay_s=0.002,
        cuts_per_s=30.0,
        cut_s=0.6,
        crashes_per_s=3.0,
        slowness=50.0,
        read_s=0.01,
        patient=True,
    ),
    copies=2,
    slots=4,
)
#: Many repairs while much is under way.
REPAIRS = Mix(
    Faults(calm_after_s=2.0, delay_s=0.01, crashes_per_s=5.0, read_s=0.01, patient=True),
    copies=2,
    slots=4,
)
#: A promoted secondary has order left for which it has no rows, and is copied in this state.
WAITING = Mix(
    Faults(
        calm_after_s=2.0,
        delay_s=0.005,
        loss_probability=0.4,
        cuts_per_s=10.0,
        cut_s=0.6,
        crashes_per_s=4.0,
        slowness=20.0,
        read_s=0.02,
        patient=True,
    ),
    copies=2,
    slots=4,
)
#: Connections to the controller break, and reports are lost with them.
CONTROL = Mix(
    Faults(calm_after_s=2.0, delay_s=0.01, control_breaks_per_s=60.0, crashes_per_s=2.0, read_s=0.01),
    copies=2,
    slots=3,
)
#: Changes of the table are lost, doubled and overtaken.
TABLES = replace(
    CONTROL, faults=replace(CONTROL.faults or Faults(), control_breaks_per_s=0.0, spoilt_table_probability=0.3)
)
#: Ingress tasks are done while others still read, and attempts that came too late die.
LATE_ATTEMPTS = Mix(
    Faults(
        calm_after_s=2.0,
        delay_s=0.01,
        zombies_per_s=20.0,
        crashes_per_s=2.0,
        never_back_probability=0.0,
        patient=True,
        patient_alone=True,
    ),
    copies=2,
    slots=4,
)
#: One worker is slow, and replicas may be a few steps apart.
BOUNDED = Mix(
    Faults(calm_after_s=1.0, delay_s=0.005, breaks_per_s=5.0, crashes_per_s=1.0, slowness=20.0, read_s=0.005),
    copies=2,
    slots=4,
    bounded=True,
)
#: Replicas give other output than their primaries, and the input goes on until all is noticed and mended.
DIVERGING = Mix(
    Faults(calm_after_s=2.0, delay_s=0.005, divergences_per_s=6.0, crashes_per_s=1.0, read_s=0.02, patient=True),
    copies=2,
    slots=4,
)
#: An operator that is not deterministic.
MANY_DIVERGENCES = replace(
    DIVERGING, faults=Faults(calm_after_s=4.0, delay_s=0.002, divergences_per_s=60.0, read_s=0.3, patient=True)
)
#: Steps take longer than a silence may last, some processes stop, and some cannot reach the controller.
BUSY = Mix(
    Faults(
        calm_after_s=3.0,
        delay_s=0.002,
        pulses=True,
        busy_step_probability=0.05,
        busy_step_s=3.0,
        step_timeout_s=1.0,
        pauses_per_s=0.5,
        pause_s=3.0,
        control_cuts_per_s=0.3,
        cut_s=0.6,
        read_s=0.02,
        patient=True,
    ),
    copies=2,
    slots=4,
)
#: Busy workers, with standbys in place of secondaries.
BUSY_STANDBYS = replace(BUSY, standbys=1.0)
#: Busy workers, with a directory that holds the only other replica of each partition.
BUSY_LIVES_OF_ONE = replace(BUSY, copies=1, lives=2)
#: Busy workers, without regard to the last worker, which is often given up while it lives.
RECKLESS_LIVES_OF_ONE = replace(BUSY_LIVES_OF_ONE, faults=replace(BUSY.faults, reckless=True))
#: Tasks of workers are started a second time, and workers come and go.
RIVALS = Mix(
    Faults(
        calm_after_s=3.0,
        delay_s=0.005,
        rivals_per_s=5.0,
        crashes_per_s=1.0,
        control_cuts_per_s=0.5,
        closings_per_s=0.5,
        cut_s=1.0,
        read_s=0.02,
        patient=True,
    ),
    copies=2,
    slots=4,
)
#: Output is fetched while the workers that have it die.
FETCHED = Mix(
    Faults(
        calm_after_s=0.5,
        delay_s=0.002,
        loss_probability=0.02,
        fetch_crash_probability=0.3,
        fetch_fails_probability=0.3,
    ),
    copies=3,
    slots=5,
    collected=True,
)
#: Secondaries take no steps for a while, which is longer than a step may take. Primaries do not go far without them.
STANDING = Mix(
    Faults(
        calm_after_s=3.0,
        delay_s=0.002,
        stands_per_s=2.0,
        stand_s=3.0,
        step_timeout_s=0.3,
        crashes_per_s=0.3,
        read_s=0.01,
        patient=True,
    ),
    copies=2,
    slots=4,
    bounded=True,
)
#: All traits as the seed draws them, and a replica of another kind beside the active ones.
WITNESSED = Mix(slots=5, witnesses=1)
#: Standbys in place of secondaries, primaries that die when only some of the others have heard them, and much that is lost.
STANDBYS = replace(UNEVEN, standbys=1.0)
#: Standbys with two replicas of everything, and many repairs.
STANDBY_REPAIRS = replace(REPAIRS, standbys=1.0)
#: Standbys that get checkpoint after checkpoint with changes alone, and then take over.
CHANGES = Mix(Faults(calm_after_s=4.0, delay_s=0.01, crashes_per_s=4.0, read_s=0.1), copies=3, slots=4, standbys=1.0)
#: Techniques of recovery change while workers are lost and repaired.
PROTECTED = Mix(
    Faults(
        calm_after_s=2.0, delay_s=0.005, crashes_per_s=2.0, never_back_probability=0.1, protects_per_s=4.0, read_s=0.01,
        patient=True,
    ),
    slots=5,
)  # fmt: skip
#: Requests of all kinds that contradict each other, and workers that are lost meanwhile and come back.
STORM = Mix(
    Faults(calm_after_s=1.0, delay_s=0.005, crashes_per_s=1.0, protects_per_s=4.0, read_s=0.01, patient=True),
    copies=2,
    slots=4,
    habits=STORMY,
)
#: Contradicting requests, and the input ends while some are open.
STORM_AT_THE_END = replace(STORM, faults=replace(STORM.faults or Faults(), patient=False))
#: Changes of recovery among many lost messages and uneven crashes.
PROTECTED_UNEVEN = replace(
    UNEVEN, faults=replace(UNEVEN.faults or Faults(), protects_per_s=5.0, patient=True), standbys=0.5
)
#: Sources with positions of their own, read again and again.
NUMBERED = replace(UNEVEN, numbered=1.0)
NUMBERED_STANDBYS = replace(NUMBERED, standbys=0.7)
NUMBERED_LIVES = Mix(lives=4, numbered=1.0)
#: Logs that lose records, by retention and by compaction.
LOSING = replace(NUMBERED, losing=True)
LOSING_STANDBYS = replace(NUMBERED_STANDBYS, losing=True)
LOSING_LIVES = replace(NUMBERED_LIVES, losing=True, standbys=0.7)
#: Logs that also lose records which some replica lacks, read by sources that go on after a loss and by sources that do not.
GOING_ON = replace(LOSING, log_faults=LogFaults(goes_on=True, needed=True))
GOING_ON_LIVES = replace(LOSING_LIVES, log_faults=LogFaults(goes_on=True, needed=True))
FAILING = replace(LOSING, log_faults=LogFaults(goes_on=False, needed=True))
FAILING_LIVES = replace(LOSING_LIVES, log_faults=LogFaults(goes_on=False, needed=True))
#: Topics that are made anew between two lives.
ANEW = replace(LOSING_LIVES, log_faults=LogFaults(goes_on=True, anew=True))
ANEW_FAILING = replace(LOSING_LIVES, log_faults=LogFaults(goes_on=False, anew=True))
#: Replay points in place of checkpoints.
UPSTREAM = replace(CHANGES, upstream=True)
UPSTREAM_REPAIRS = replace(STANDBY_REPAIRS, upstream=True)
UPSTREAM_LIVES = Mix(lives=4, standbys=0.7, upstream=True)
UPSTREAM_PROTECTED = replace(PROTECTED_UNEVEN, upstream=True)
#: Everything is lost at once, and workers and connections meanwhile.
LIVES = Mix(lives=4)
#: Stages come and go in each life, and the next one begins with the version of the plan that the directory has.
GROWING_LIVES = Mix(lives=4, grows=True)
#: Stages come and go in each life, also behind sources in workers.
GROWING_SOURCE_LIVES = Mix(lives=4, grows=True, sources=True)
#: All workers are lost, and the vault is not.
LIVES_WITHOUT_WORKERS = Mix(
    Faults(calm_after_s=3.0, delay_s=0.002, all_workers_per_s=2.0, crashes_per_s=1.0, deaths_per_s=1.0, read_s=0.01),
    lives=2,
)
#: Everything is lost, and the vault is the only other replica: repairs and take-overs come from it.
LIVES_OF_ONE = Mix(
    Faults(
        calm_after_s=2.0,
        delay_s=0.005,
        crashes_per_s=2.0,
        closings_per_s=6.0,
        late_order_probability=0.7,
        late_order_s=0.5,
        read_s=0.01,
    ),
    copies=1,
    slots=4,
    lives=2,
)
#: Output that only the directory has is fetched again and again.
LIVES_FETCHED = replace(
    FETCHED, faults=replace(FETCHED.faults or Faults(), fetch_crash_probability=0.03), copies=1, lives=2
)
#: Rows with event time, under any faults and under faults that endanger watermarks.
EVENT_TIME = Mix(event_time=True)
EVENT_TIME_FAULTLESS = replace(FAULTLESS, event_time=True)
EVENT_TIME_UNEVEN = replace(UNEVEN, event_time=True)
EVENT_TIME_REPAIRS = replace(REPAIRS, event_time=True)
EVENT_TIME_STANDBYS = replace(CHANGES, event_time=True)
EVENT_TIME_LIVES = replace(LIVES, event_time=True)
EVENT_TIME_LIVES_OF_ONE = replace(LIVES_OF_ONE, event_time=True)
#: Rows with event time, with sources that wait for each other, and with rows from the future.
AHEAD = replace(EVENT_TIME, ahead=True)
AHEAD_FAULTLESS = replace(EVENT_TIME_FAULTLESS, ahead=True)
AHEAD_UNEVEN = replace(EVENT_TIME_UNEVEN, ahead=True)
AHEAD_REPAIRS = replace(EVENT_TIME_REPAIRS, ahead=True)
AHEAD_LIVES = replace(EVENT_TIME_LIVES, ahead=True)
#: Joins, ranks and deduplication.
RELATED = replace(EVENT_TIME, related=True)
RELATED_FAULTLESS = replace(EVENT_TIME_FAULTLESS, related=True)
RELATED_UNEVEN = replace(EVENT_TIME_UNEVEN, related=True)
RELATED_REPAIRS = replace(EVENT_TIME_REPAIRS, related=True)
RELATED_STANDBYS = replace(EVENT_TIME_STANDBYS, related=True)
RELATED_LIVES = replace(EVENT_TIME_LIVES, related=True)
#: Relations of all kinds: right and full outer joins, as-of joins, ranks without a window, tables in which rows are looked up.
WIDE = replace(RELATED, wide=True)
WIDE_FAULTLESS = replace(RELATED_FAULTLESS, wide=True)
WIDE_UNEVEN = replace(RELATED_UNEVEN, wide=True)
WIDE_REPAIRS = replace(RELATED_REPAIRS, wide=True)
WIDE_STANDBYS = replace(RELATED_STANDBYS, wide=True)
WIDE_LIVES = replace(RELATED_LIVES, wide=True)
#: Tables that are read anew.
LOOKUPS = replace(RELATED, looks_up=True)
LOOKUPS_UNEVEN = replace(RELATED_UNEVEN, looks_up=True)
#: Links between two workers are cut for seconds, in one direction or in both, and nothing else fails.
CUT_LINKS = Mix(
    Faults(calm_after_s=8.0, delay_s=0.002, pair_cuts_per_s=1.5, pair_cut_s=10.0, read_s=0.2),
    copies=2,
    slots=4,
    reach=True,
)
#: Cut links with sources that workers read. Such sources give all rows in a short time, so the cuts come early and often.
CUT_LINKS_OF_READERS = replace(
    CUT_LINKS, faults=replace(CUT_LINKS.faults or Faults(), calm_after_s=2.0, pair_cuts_per_s=12.0), numbered=1.0
)
#: One link after the other is cut in one direction for ten seconds.
CUT_ALONE = replace(
    CUT_LINKS,
    faults=replace(CUT_LINKS.faults or Faults(), pair_cuts_per_s=12.0, pair_cuts_alone=True),
    slots=3,
)
CUT_ALONE_OF_READERS = replace(CUT_ALONE, numbered=1.0)
#: One copy of each partition, otherwise as above: no secondary can lend it rows.
CUT_ALONE_OF_ONE = replace(CUT_ALONE_OF_READERS, copies=1)
#: One link after the other is cut in both directions: primaries and secondaries lack rows of each other's readers.
CUT_APART_OF_READERS = replace(
    CUT_ALONE_OF_READERS, faults=replace(CUT_ALONE.faults or Faults(), pair_cuts_both=True), unreached_s=1.0
)
#: Links are cut, and a primary that is cut off for a second leaves the lead.
UNREACHED = replace(CUT_LINKS, unreached_s=1.0)
UNREACHED_BY_READERS = replace(CUT_LINKS_OF_READERS, unreached_s=1.0)
#: Workers die as well, and replicas are added meanwhile: with three copies, one copy is often not safe while another one is.
UNREACHED_AMONG_CRASHES = replace(
    UNREACHED_BY_READERS,
    faults=replace(UNREACHED_BY_READERS.faults or Faults(), crashes_per_s=0.6, patient=True),
    copies=3,
)
#: Links are cut in event time.
CUT_LINKS_IN_EVENT_TIME = replace(CUT_LINKS, event_time=True)
#: Links are cut for a moment or for seconds, and nothing else fails, while copies of stages are read over several feeds.
FEEDS = Mix(
    Faults(calm_after_s=3.0, delay_s=0.002, pair_cuts_per_s=8.0, pair_cut_s=1.0, read_s=0.1),
    copies=2,
    slots=4,
    reach=True,
    feeds=True,
)
#: Several feeds with three copies.
FEEDS_OF_THREE = replace(FEEDS, copies=3)
#: Several feeds among lost messages, and workers that are lost and repaired.
FEEDS_UNEVEN = replace(UNEVEN, reach=True, feeds=True)
FEEDS_REPAIRS = replace(REPAIRS, reach=True, feeds=True)
FEEDS_IN_EVENT_TIME = replace(EVENT_TIME_UNEVEN, reach=True, feeds=True)
#: Aggregates whose replicas have no common order, beside stages that have one.
MARKS = replace(EVENT_TIME, marks=True)
MARKS_FAULTLESS = replace(EVENT_TIME_FAULTLESS, marks=True)
MARKS_UNEVEN = replace(EVENT_TIME_UNEVEN, marks=True)
MARKS_REPAIRS = replace(EVENT_TIME_REPAIRS, marks=True)
MIXES = {
    "uneven": UNEVEN,
    "deposed": DEPOSED,
    "old acks": OLD_ACKS,
    "repairs": REPAIRS,
    "waiting": WAITING,
    "control": CONTROL,
    "tables": TABLES,
    "late attempts": LATE_ATTEMPTS,
}  # of faults

#: Stages come and go, under any faults.
GROWING = Mix(grows=True)
#: Some stages come behind the running source, and nothing or much fails.
GROWING_SOURCES = Mix(grows=True, sources=True)
#: Stages come and go in queries of all kinds; in the second mix, sources do, too.
GROWING_WIDE = Mix(grows=True, sources=True, all_kinds=True)
GROWING_COMING = Mix(grows=True, sources=True, all_kinds=True, comes=True)


def draw(rng: random.Random, replicated: bool) -> Faults:
    """Draw the faults of a random run."""
    if replicated and rng.random() < MIXED_SHARE:
        mixed = rng.choice(list(MIXES.values())).faults
        assert mixed is not None
        return mixed
    return faults_.draw(rng, replicated)
