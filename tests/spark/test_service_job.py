"""The job of ``make run-serve``, without its service: its receiver of the webhook, and the end that it waits for."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
import types
from collections.abc import Iterator

import pandas as pd
import pytest

import examples.service as service
from examples.service import Receiver, rows_missing, sorted_rows


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def delivered(receiver: Receiver, number: int, *rows: int, secret: str = "") -> int:
    body = json.dumps({"rows": [{"n": n} for n in rows]}).encode()
    signed = hmac.new((secret or receiver.secret).encode(), b"7." + body, hashlib.sha256).hexdigest()
    headers = {"Flux-Delivery": str(number), "Flux-Timestamp": "7", "Flux-Signature": f"v1={signed}"}
    return receiver.take(body, headers)


def test_the_receiver_counts_each_delivery_once_and_refuses_another_signature(receiver: Receiver) -> None:
    assert [delivered(receiver, 1, 5), delivered(receiver, 1, 5), delivered(receiver, 2, 6)] == [200, 200, 200]
    assert delivered(receiver, 3, 7, secret="another") == 401
    assert delivered(receiver, service.FAIL_EVERY, 8) == 500
    assert delivered(receiver, service.FAIL_EVERY, 8) == 200
    assert ([row["n"] for row in receiver.rows], receiver.repeated, receiver.refused) == ([5, 6, 8], 2, 1)


def test_the_job_waits_for_late_flights_the_last_final_window_and_silence() -> None:
    at = pd.to_datetime(["2013-01-01T05:00:00Z", "2013-01-03T05:00:00Z"])
    flights = pd.DataFrame({"left_at": at, "late_by": [200, 3]})
    late, delays = [types.SimpleNamespace(query=name, rows=[], newest_at=0.0) for name in ("late", "delays")]
    hook = types.SimpleNamespace(rows=[], newest_at=0.0)
    said = lambda: rows_missing([late, delays], hook, flights)  # type: ignore[arg-type, list-item]  # noqa: E731
    assert "the reader of late, which has 0" in said()
    late.rows.append({"n": 0})
    assert "the webhook, which has 0" in said()
    hook.rows.append({"n": 0})
    assert "the window of 2013-01-02" in said()
    delays.rows += [{"day": "2013-01-01T00:00:00Z"}, {"day": "2013-01-02T00:00:00Z"}]
    hook.newest_at = time.monotonic()
    assert "without a row" in said()
    hook.newest_at -= service.QUIET_S
    assert said() == ""


def test_rows_are_compared_by_value_and_a_row_that_comes_twice_differs() -> None:
    rows = [{"at": "2013-01-01T05:00:00Z", "n": 1}, {"at": None, "n": 2}]
    instant = pd.Timestamp("2013-01-01T05:00:00Z").to_pydatetime()
    assert sorted_rows(rows) == sorted_rows([{"at": None, "n": 2}, {"at": instant, "n": 1}])
    assert sorted_rows(rows) != sorted_rows([*rows, rows[0]])
