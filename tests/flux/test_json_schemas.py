"""The check of answers against the OpenAPI document sees all fields that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from flux.gateway.openapi import document
from tests.flux.json_schemas import mismatches

SCHEMAS = document()["components"]["schemas"]
GOOD = {
    "stream": "clicks", "log": 0, "first": 0, "rows": 2, "arrived_at": "2026-11-28T18:00:00.5Z", "repeated": False,
}  # fmt: skip
STREAM = {
    "name": "clicks", "id": "1", "schema": "n BIGINT", "time": None, "delay": "1 second", "idle": None,
    "retain": {"time": "1 day", "bytes": 1}, "partitions": 1, "readers": ["a"],
}  # fmt: skip


def said(value: Any, name: str) -> list[str]:
    return list(mismatches(value, {"$ref": f"#/components/schemas/{name}"}, SCHEMAS))


def test_a_good_answer_fits() -> None:
    assert said(GOOD, "PushAnswer") == []
    assert said(STREAM, "StreamAnswer") == []
    assert said({"streams": [STREAM, STREAM]}, "StreamsAnswer") == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PushAnswer", [], "$: expected object, got []"),
        ("PushAnswer", {**GOOD, "log": "0"}, "$.log: expected integer, got '0'"),
        ("PushAnswer", {**GOOD, "log": True}, "$.log: expected integer, got True"),
        ("PushAnswer", {**GOOD, "arrived_at": "now"}, "$.arrived_at: expected a date and time, got 'now'"),
        ("PushAnswer", {**GOOD, "more": 1}, "$: 'more' is not in the schema"),
        ("PushAnswer", {name: value for name, value in GOOD.items() if name != "rows"}, "$: 'rows' is missing"),
        ("StreamAnswer", {**STREAM, "readers": ["a", 1]}, "$.readers[1]: expected string, got 1"),
        ("StreamAnswer", {**STREAM, "retain": {"time": 1, "bytes": 1}}, "$.retain.time: expected string, got 1"),
    ],
)
def test_an_answer_that_does_not_fit_is_told(name: str, value: Any, reason: str) -> None:
    assert said(value, name) == [reason]


def test_none_of_several_forms_is_told() -> None:
    (reason,) = said({**STREAM, "time": 5}, "StreamAnswer")
    assert reason.startswith("$.time: none of 2 forms: ")


def test_every_keyword_of_the_document_is_known() -> None:
    for name in SCHEMAS:
        list(mismatches({}, SCHEMAS[name], SCHEMAS))
