"""Ids of the schemas by which values are written: from a subject of a schema registry, or from a function of the user.

A registry is asked once, where a query starts. Nothing is registered unless the user asks for it: a schema that others read
by is theirs to change.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from flux.errors import UsageError
from flux.kafka.asking import LIMIT_S, Failed, Refused, ask
from flux.kafka.errors import KafkaError, NotPermitted
from flux.kafka.registry import check_schemas

_ID_MAX = (1 << 32) - 1
_PAUSE_S = 0.2
#: Longest text of a registry in a message, in characters.
_SAID_MAX = 300


class Subject:
    """Subject of a registry. ``schemas`` is the URL of a registry (http or https), or a function from subject and schema to an
    id."""

    def __init__(self, name: str, schemas: str | Callable[[str, str], int]) -> None:
        check_schemas(schemas, "subject and schema to an id")
        self._name, self._schemas = name, schemas

    def __repr__(self) -> str:
        return f"subject {self._name!r}" + (
            f" of the registry at {self._schemas}" if isinstance(self._schemas, str) else ""
        )

    def id_of(self, schema: str, register: bool, limit_s: float) -> int:
        """Return the id of a schema. UsageError: the subject has no such schema, or refuses it."""
        if not isinstance(self._schemas, str):
            return self._checked(self._told(schema), f"schemas({self._name!r}, ...)")
        found = self._asked("/versions" if register else "", {"schema": schema}, limit_s)
        return self._checked(found.get("id"), repr(self))

    def newest(self, limit_s: float) -> tuple[int, str]:
        """Return id and text of the newest schema."""
        found = self._asked("/versions/latest", None, limit_s)
        if found.get("schemaType", "AVRO") != "AVRO":
            raise UsageError(f"the newest schema of {self!r} is of type {found['schemaType']!r:.40}, not AVRO")
        if found.get("references"):
            raise UsageError(
                f"the newest schema of {self!r} refers to others: give schema= with them put together, and schemas= a function "
                "that tells the id"
            )
        if not isinstance(found.get("schema"), str):
            raise KafkaError(f"{self!r}: the answer has no schema")
        return self._checked(found.get("id"), repr(self)), found["schema"]

    def _told(self, schema: str) -> Any:
        assert callable(self._schemas)
        try:
            return self._schemas(self._name, schema)
        except LookupError as error:
            raise UsageError(
                f"schemas({self._name!r}, ...) knows no such schema: {type(error).__name__} {error}"
            ) from None

    def _checked(self, found: Any, whose: str) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= _ID_MAX:
            raise UsageError(f"{whose} gave {found!r:.60} for the id of a schema, which must be 0 to {_ID_MAX:,}")
        return found

    def _asked(self, what: str, body: dict[str, str] | None, limit_s: float) -> dict[str, Any]:
        """Ask the registry, again and again for at most ``limit_s`` seconds."""
        assert isinstance(self._schemas, str)
        url = f"{self._schemas.rstrip('/')}/subjects/{urllib.parse.quote(self._name, safe='')}{what}"
        end = time.monotonic() + limit_s
        while True:
            try:
                left = max(end - time.monotonic(), _PAUSE_S)
                return self._object(ask(url, None if body is None else json.dumps(body).encode(), min(LIMIT_S, left)))
            except Refused as error:
                raise self._refused(error, what) from None
            except Failed as error:
                if time.monotonic() + _PAUSE_S >= end:
                    raise KafkaError(f"{self!r} could not be asked within {limit_s:g} s: {error}") from error
            time.sleep(_PAUSE_S)

    def _object(self, answer: bytes) -> dict[str, Any]:
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Failed("the answer is no object of JSON")
        return found

    def _refused(self, error: Refused, what: str) -> Exception:
        try:
            said = json.loads(error.body)
            why = str(said.get("message", "")) if isinstance(said, dict) else ""
        except (ValueError, RecursionError):
            why = ""
        why = f" ({error.status}{f': {why[:_SAID_MAX]}' if why else ''})"
        if error.status in (401, 403):
            return NotPermitted(
                f"{self!r} does not permit it{why}. Give schemas= a function that logs in and returns the id"
            )
        if error.status == 404 and what == "":
            return UsageError(
                f"{self!r} has no such schema{why}. Give one that it has, or none for its newest; "
                "register_schemas=True registers it"
            )
        if error.status == 404:
            return UsageError(f"{self!r} is not there{why}. Give schema=, and register_schemas=True registers it")
        if error.status == 409:
            return UsageError(f"{self!r} refuses the schema, which does not go with those before{why}")
        return UsageError(f"{self!r} refuses the schema{why}")
