"""Schemas of values by their ids: from a schema registry, or from a function of the user.

Law: an id is looked up once in a process. An id without a schema makes a value bad, and is looked up again a minute later
at the earliest, so that a topic full of nonsense is no burden. A registry that does not answer is an error that may pass.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from flux.errors import UsageError
from flux.kafka.asking import Failed, Refused, ask
from flux.kafka.client import Passing
from flux.kafka.errors import NotPermitted

#: Most ids that are remembered, with a schema and without, and the time for which the latter are.
_KEPT_MAX, _AGAIN_S = 4096, 60.0


class Registry:
    """Writers' schemas by id. ``schemas`` is the URL of a registry (http or https), or a function from an id to a schema, as
    text or a dict, that raises LookupError for ids that it does not know. For several threads."""

    def __init__(self, schemas: str | Callable[[int], Any]) -> None:
        check_schemas(schemas, "an id to a schema")
        self._schemas = schemas
        self._known: dict[int, Any] = {}
        self._unknown: dict[int, tuple[str, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}, "_unknown": {}}

    def writer(self, number: int) -> Any:
        """Return the schema as the library takes it, checked; or the reason why there is none, as text."""
        found = self._known.get(number)
        if found is not None:
            return found
        why, until = self._unknown.get(number, ("", 0.0))
        if time.monotonic() < until:
            return why
        try:
            found = self._parsed(number)
        except _NoSchema as error:
            if len(self._unknown) >= _KEPT_MAX:
                self._unknown.clear()
            self._unknown[number] = str(error), time.monotonic() + _AGAIN_S
            return str(error)
        if len(self._known) >= _KEPT_MAX:
            self._known.clear()
        self._known[number] = found
        return found

    def _parsed(self, number: int) -> Any:
        from flux.kafka.avro import check_writer, parsed_schema

        given = self._fetched(number) if isinstance(self._schemas, str) else self._told(number)
        try:
            schema = json.loads(given) if isinstance(given, str | bytes) else given
            made = parsed_schema(schema)
            check_writer(made)
        except (ValueError, RecursionError) as error:
            raise _NoSchema(f"its schema {number} cannot be used: {error}") from None
        if isinstance(made, str):
            raise _NoSchema(f"its schema {number} is {made!r}, and no record")
        return made

    def _told(self, number: int) -> Any:
        assert callable(self._schemas)
        try:
            given = self._schemas(number)
        except LookupError as error:
            raise _NoSchema(f"schemas({number}) knows no such schema: {type(error).__name__} {error}") from None
        if given is None:
            raise _NoSchema(f"schemas({number}) knows no such schema")
        return given

    def _fetched(self, number: int) -> Any:
        assert isinstance(self._schemas, str)
        url = f"{self._schemas.rstrip('/')}/schemas/ids/{number}"
        try:
            text = ask(url)
        except Refused as error:
            if error.status == 404:
                raise _NoSchema(f"the registry at {self._schemas} has no schema {number}") from None
            if error.status in (401, 403):
                raise NotPermitted(
                    f"the registry at {self._schemas} does not permit reading schema {number} ({error.status}). Give schemas= "
                    "a function that logs in"
                ) from None
            raise Passing(f"the registry at {url}: {error.status}") from None
        except Failed as error:
            raise Passing(f"the registry at {url}: {error}") from error
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("schema"), str):
            raise Passing(f"the registry at {url}: the answer is no schema")
        if found.get("schemaType", "AVRO") != "AVRO":
            raise _NoSchema(f"schema {number} of the registry is of type {found['schemaType']!r:.40}, not AVRO")
        if found.get("references"):
            raise _NoSchema(
                f"schema {number} of the registry refers to others; give schemas= a function that puts them together"
            )
        return found["schema"]


class _NoSchema(Exception):
    """Reason why an id has no schema: the registry does not know it, or it cannot be used."""


def check_schemas(schemas: Any, of: str) -> None:
    """Raise UsageError unless ``schemas`` is the URL of a registry, or a function from ``of``."""
    if isinstance(schemas, str):
        try:
            parts = urllib.parse.urlsplit(schemas)
            good = (
                parts.scheme in ("http", "https")
                and parts.hostname
                and not (parts.username or parts.query or parts.fragment)
            )
            _ = parts.port
        except ValueError:
            parts, good = None, None
        if not good:
            raise UsageError(
                "schemas must be the URL of a registry, as in schemas='http://host:8081', without a user; for a registry "
                f"with a login give a function from {of}. Got a URL for {(parts and parts.hostname) or schemas[:40]!r}"
            )
    elif not callable(schemas):
        raise UsageError(
            f"schemas must be the URL of a registry, or a function from {of}; got {type(schemas).__name__}"
        )
