"""The log keeps elements that a consumer may still ask for, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from flux.exchange.log import End, Log, LogEntry, LogMeter


def entry(sequence: int, *touched: int, nbytes: int = 10, partitions: int = 3) -> LogEntry:
    return LogEntry(sequence, End(), np.array(touched, np.int64), nbytes, 0, 0.0)


def log_of(*entries: LogEntry, bytes_max: int = 25, meter: LogMeter | None = None) -> Log:
    log = Log(bytes_max, meter)
    for each in entries:
        log.append(each)
    return log


def test_it_takes_batches_until_its_bound_and_one_beyond() -> None:
    log = log_of(entry(0, 0), entry(1, 1))
    assert log.has_room
    log.append(entry(2, 2))
    assert not log.has_room
    assert (log.bytes, len(log), log.base, log.end) == (30, 3, 0, 3)


def test_a_batch_larger_than_the_bound_goes_through_alone() -> None:
    log = log_of(bytes_max=1)
    assert log.has_room
    log.append(entry(0, 0, nbytes=1000))
    assert not log.has_room
    assert log.evict(np.array([0, -1, -1])) == 1
    assert log.has_room


def test_a_batch_goes_when_all_partitions_with_rows_in_it_have_acked() -> None:
    log = log_of(entry(0, 0, 1), entry(1, 0))
    assert log.evict(np.array([5, -1, -1])) == 0
    assert log.evict(np.array([0, 0, -1])) == 1
    assert (log.base, log.end, log[1].sequence) == (1, 2, 1)


def test_a_batch_behind_one_that_is_needed_waits() -> None:
    log = log_of(entry(0, 0), entry(1, 1), entry(2, 1))
    assert log.evict(np.array([-1, 9, -1])) == 0
    assert log.evict(np.array([0, 9, -1])) == 3


def test_a_batch_without_rows_leaves_with_its_predecessor() -> None:
    log = log_of(entry(0, 0), entry(1), entry(2))
    assert log.evict(np.array([-1, -1, -1])) == 0
    assert log.evict(np.array([0, -1, -1])) == 3


def test_what_was_evicted_or_never_came_cannot_be_asked_for() -> None:
    log = log_of(entry(0, 0), entry(1, 0))
    log.evict(np.array([0, -1, -1]))
    for sequence in (0, 2):
        with pytest.raises(AssertionError):
            log[sequence]


def test_numbers_have_no_gaps() -> None:
    with pytest.raises(AssertionError):
        log_of(entry(0, 0), entry(2, 0))


def test_logs_of_one_process_share_a_meter_that_remembers_the_peak() -> None:
    meter = LogMeter()
    one, other = log_of(entry(0, 0), meter=meter), log_of(entry(0, 0), entry(1, 0), meter=meter)
    assert (meter.bytes, meter.peak) == (30, 30)
    one.evict(np.array([0, 0, 0]))
    other.clear()
    assert (meter.bytes, meter.peak, other.base, len(other)) == (0, 30, 2, 0)
