"""Task slots are counted aloud, settings have the meaning of docs/settings.md, and unreadable ones are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import flux
from flux.errors import UsageError
from flux.settings import TABLE, Settings
from spark_integration.settings import Need, OtherQueries, count_slots, room_for_workers
from spark_integration.tasks.entry_points import spark_id


def test_too_few_task_slots_are_counted_aloud() -> None:
    with pytest.raises(flux.UsageError) as raised:
        count_slots(0, True, 1, OtherQueries())  # a DataFrame on local[1]
    assert str(raised.value).startswith(
        "too few task slots: 1 worker + 1 for the Spark tasks that read the input or fetch the output = 2 slots "
        "needed; existing: 1, free: 1."
    )
    assert "local[2]" in str(raised.value)
    with pytest.raises(flux.UsageError, match=r"3 workers = 3 slots needed; existing: 4, 2 held by query x, free: 2"):
        count_slots(3, False, 4, OtherQueries({"x": 2}))
    assert count_slots(0, True, 2, OtherQueries()).workers == 1
    assert count_slots(0, True, 8, OtherQueries({"x": 2})).workers == 3
    assert count_slots(0, False, 8, OtherQueries({"x": 2})).workers == 6
    assert count_slots(7, True, 8, OtherQueries()).workers == 7


def test_room_for_more_workers_is_counted_aloud() -> None:
    room = room_for_workers(Need(2, 1), 6, OtherQueries({"x": 2}))
    assert room.workers == 3
    assert room.arithmetic.startswith(
        "6 task slots exist, 2 held by query x, 1 for the Spark tasks that read the input or fetch the output: there is "
        "room for 3 workers."
    )
    assert room_for_workers(Need(2, 0), 2, OtherQueries()).arithmetic.startswith(
        "2 task slots exist: there is room for 2 workers"
    )
    assert room_for_workers(Need(1, 1), 1, OtherQueries({"x": 4})).workers == 0


def test_a_slot_stays_free_for_the_spark_tasks_of_another_query() -> None:
    """Leave a slot free: output of the first query could not be fetched while a second one held all other slots,
    perhaps for ever."""
    fed = OtherQueries({"x": 2}, feeding="x")
    with pytest.raises(flux.UsageError) as raised:
        count_slots(2, False, 4, fed)
    assert str(raised.value).startswith(
        "too few task slots: 2 workers + 1 for the Spark tasks of query x that read the input or fetch the output = 3 slots "
        "needed; existing: 4, 2 held by query x, free: 2."
    )
    assert "local[5]" in str(raised.value)
    assert count_slots(0, False, 4, fed).workers == 1
    assert count_slots(2, True, 5, fed).workers == 2, "one slot is enough for all"
    room = room_for_workers(Need(2, 0), 6, fed)
    assert room.workers == 3
    assert "2 held by query x, 1 for the Spark tasks of query x that read" in room.arithmetic
    assert room_for_workers(Need(2, 1), 6, fed).workers == 3


def test_the_name_of_an_executor_tells_sparks_own_id() -> None:
    assert spark_id("12@host:4711") == "12"
    assert spark_id("host:4711") is None


@pytest.mark.parametrize(
    ("setting", "raw"),
    [
        (s, raw)
        for s in TABLE
        for raw in ("many", "12 parsecs", "", "-1 s", [1])
        if s.kind != "text"
        and (s.kind != "labels" or raw not in ("many", ""))
        and (s.kind not in ("seconds", "bytes") or raw != "-1 s")
    ],
    ids=lambda value: getattr(value, "name", repr(value)),
)
def test_a_setting_that_cannot_be_read_names_key_value_and_an_example(setting: Any, raw: Any) -> None:
    named = rf"spark\.flux\.{re.escape(setting.key)}: cannot read {re.escape(repr(raw))} .*example '{setting.default}'"
    with pytest.raises(flux.UsageError, match=named):
        Settings.of(None, **{setting.keyword: raw})
    if isinstance(raw, str):
        with pytest.raises(flux.UsageError, match=named):
            Settings.of({f"spark.flux.{setting.key}": raw})


def test_a_setting_out_of_range_says_what_is_accepted() -> None:
    with pytest.raises(flux.UsageError, match=r"spark\.flux\.partitions: '0' is out of range, at least 1"):
        Settings.of({"spark.flux.partitions": "0"})
    with pytest.raises(flux.UsageError, match=r"spark\.flux\.partitions: 4097 is out of range, at most 4096"):
        Settings.of(None, partitions=4097)


@pytest.mark.parametrize("setting", [s for s in TABLE if s.kind in ("seconds", "bytes")], ids=lambda s: s.key)
def test_a_negative_amount_is_out_of_range(setting: Any) -> None:
    raw = "-5s" if setting.kind == "seconds" else "-5m"
    with pytest.raises(flux.UsageError, match=rf"{re.escape(setting.key)}: '{raw}' is out of range, at least"):
        Settings.of({f"spark.flux.{setting.key}": raw})


def test_unknown_settings_are_refused_with_those_that_exist() -> None:
    with pytest.raises(
        flux.UsageError,
        match=r"unknown option 'log_max_byte', did you mean 'log_max_bytes'.; known are .*log_max_bytes",
    ):
        Settings.of(None, log_max_byte="1m")
    with pytest.raises(
        flux.UsageError,
        match=r"unknown setting spark\.flux\.worker, did you mean 'spark\.flux\.workers'.; known are, behind spark\..*workers",
    ):
        Settings.of({"spark.flux.worker": "1", "spark.other": "x"})


@pytest.mark.parametrize("raw", ["nan", "inf", "1e999", float("nan"), float("inf")])
def test_a_number_is_finite(raw: Any) -> None:
    if isinstance(raw, float):
        with pytest.raises(flux.UsageError, match=rf"spark\.flux\.ack\.interval: cannot read {raw} as seconds"):
            Settings.of(None, ack_interval=raw)
        with pytest.raises(flux.UsageError, match=rf"spark\.flux\.log\.maxBytes: cannot read {raw} as bytes"):
            Settings.of(None, log_max_bytes=raw)
    with pytest.raises(flux.UsageError, match=r"spark\.flux\.balance\.threshold: cannot read .* as number"):
        Settings.of(None, balance_threshold=raw)


@pytest.mark.parametrize("raw", [True, False, 2.5])
def test_a_number_of_things_is_no_truth_value_and_is_not_rounded(raw: Any) -> None:
    with pytest.raises(flux.UsageError, match=rf"spark\.flux\.step\.maxRows: cannot read {raw} as int"):
        Settings.of(None, step_max_rows=raw)
    if isinstance(raw, bool):
        with pytest.raises(flux.UsageError, match=rf"spark\.flux\.balance\.threshold: cannot read {raw} as number"):
            Settings.of(None, balance_threshold=raw)
    assert Settings.of(None, step_max_rows=4096.0).step_max_rows == 4096


def test_the_page_of_settings_lists_each_with_its_default_and_meaning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `spark.flux.")]
    assert rows == [f"| `spark.flux.{s.key}` | {s.default} | {s.meaning} |" for s in TABLE]


def test_every_keyword_follows_from_its_key() -> None:
    """Make the keyword as a reader of docs/settings.md does: dots and changes of case become underscores."""
    for s in TABLE:
        words = [word for part in s.key.split(".") for word in re.findall("[A-Z]?[a-z]+", part)]
        keyword = "_".join(words).lower()
        assert s.keyword == keyword
        value = getattr(Settings.of(), s.name)
        assert Settings.of(None, **{keyword: s.default}) == Settings.of(), (keyword, value)
    assert Settings.of(None, repair_at_once=3).repairs_at_once == 3
    assert Settings.of(None, replicas_allow_same_executor=True).same_executor
    with pytest.raises(
        flux.UsageError,
        match=r"unknown option 'repairs_at_once', did you mean 'repair_at_once'.; known are .* repair_at_once",
    ):
        Settings.of(None, repairs_at_once=3)


def test_the_version_is_that_of_the_newest_changes() -> None:
    changes = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)$", changes, re.MULTILINE)
    assert newest is not None
    assert flux.__version__ == newest[1]


def test_units_mean_what_they_say() -> None:
    settings = Settings.of({"spark.flux.log.maxBytes": "1.5 kb"}, ack_interval="20ms", credit_max_bytes=4096)
    assert (settings.log_max_bytes, settings.ack_interval, settings.credit_max_bytes) == (1536, 0.02, 4096)


def test_batches_fit_into_messages_whatever_is_said_of_these() -> None:
    """Bound batches by messages: every batch was larger than a message might be, and the query failed late, with advice
    about rows."""
    assert Settings.of(message_max_bytes="64k").batch_max_bytes == 32 << 10
    assert Settings.of(message_max_bytes="64k", batch_max_bytes="32k").batch_max_bytes == 32 << 10
    for conf, given in (({}, {"batch_max_bytes": "33k"}), ({"spark.flux.batch.maxBytes": "33k"}, {})):
        with pytest.raises(
            UsageError, match=r"batch.maxBytes: .* 33,792 .*message.maxBytes \(65,536\); at most .* 32,768"
        ):
            Settings.of(conf, message_max_bytes="64k", **given)
    assert Settings.of().batch_max_bytes == 8 << 20
