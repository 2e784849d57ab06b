"""The thread that owns a log: many pushes at once while segments end, and its end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flux.eventlog.chain import read_chain
from flux.eventlog.log_owner import LogLimits, PushTicket
from flux.eventlog.log_reader import LogReader
from flux.eventlog.records import PushName
from flux.gateway.log_writer import LogWriter, NotStored, OwnedElsewhere
from flux.vault.directory_store import Directory
from flux.vault.location import Folder

THREADS, PUSHES, SEGMENTS = 6, 20, 4


def writer(folder: Path, limits: LogLimits | None = None, address: str = "http://here") -> LogWriter:
    return LogWriter(Folder(folder), "the log", limits or LogLimits(), address, lambda: None)


def test_pushes_of_many_threads_are_each_there_once_while_segments_end(tmp_path: Path) -> None:
    owner = writer(tmp_path, LogLimits(segment_bytes=3000))
    pending: list[Future[PushTicket]] = []

    def push(thread: int) -> None:
        number = 0
        while number < PUSHES or len(owner._log._chain) <= SEGMENTS:
            assert time.monotonic() < end, "no segment ends"
            content = f"{thread} {number}".encode().ljust(100, b".")
            pending.append(owner.offer(memoryview(content), 1, PushName(client=f"c{thread}", number=number)))
            number += 1
            time.sleep(0.0005)

    end = time.monotonic() + 60
    threads = [threading.Thread(target=push, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    firsts = sorted(each.result(30).stored.first for each in pending)
    owner.close()
    assert firsts == list(range(len(pending)))
    store = Directory(tmp_path, False, keeps=True)
    assert len(read_chain(store, "the log")) > SEGMENTS
    reader, found = LogReader(store, "the log"), Counter[bytes]()
    while records := reader.read():
        found.update(bytes(record.batch) for record in records)
    assert len(found) == len(pending)
    assert set(found.values()) == {1}


def test_a_writer_that_was_closed_has_answered_all_and_takes_nothing_more(tmp_path: Path) -> None:
    owner = writer(tmp_path)
    pending = [owner.offer(memoryview(b"x"), 1, PushName()) for _ in range(20)]
    owner.close()
    assert [each.result(0).stored.first for each in pending] == list(range(20))
    with pytest.raises(NotStored, match="the gateway stops"):
        owner.offer(memoryview(b"x"), 1, PushName())


def test_a_writer_whose_log_was_taken_over_promises_nothing(tmp_path: Path) -> None:
    owner = writer(tmp_path)
    owner.offer(memoryview(b"x"), 1, PushName()).result(30)
    with pytest.raises(OwnedElsewhere, match="belongs to another gateway, http://here"):
        writer(tmp_path, address="http://there")
    Directory(tmp_path, keeps=True)  # where locks do not work
    with pytest.raises(NotStored, match="another gateway has taken over the log"):
        owner.offer(memoryview(b"y"), 1, PushName()).result(30)
    writer(tmp_path, address="http://there").close()


def test_pushes_that_wait_when_the_disk_fails_all_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = writer(tmp_path)
    gate = threading.Event()

    def failing(_: Any) -> None:
        gate.wait(30)
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(Directory, "sync", failing)
    pending = [owner.offer(memoryview(b"x"), 1, PushName()) for _ in range(10)]
    gate.set()
    for each in pending:
        with pytest.raises(NotStored, match=r"the location cannot be used\. The push may be on disk or not"):
            each.result(30)
    with pytest.raises(NotStored, match="has lost its owner here"):
        owner.offer(memoryview(b"x"), 1, PushName())
