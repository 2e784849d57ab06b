"""A check of JSON against the schemas of the OpenAPI document, by the document alone.

The classes that the schemas were made of are not asked, so a schema that says something else than its class is found. The check
knows the keywords that the document has, and fails at any other one.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any

_IGNORED = {"title", "description", "default", "$defs"}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
Schema = Mapping[str, Any]


def mismatches(value: Any, schema: Schema, components: Schema, at: str = "$") -> Iterator[str]:
    """Yield a sentence for each place in which a value of JSON is not as a schema says."""
    for keyword, said in schema.items():
        if keyword not in _IGNORED:
            yield from _KEYWORDS[keyword](value, said, schema, components, at)


def _reference(value: Any, said: str, _: Schema, components: Schema, at: str) -> Iterator[str]:
    yield from mismatches(value, components[said.removeprefix("#/components/schemas/")], components, at)


def _any_of(value: Any, said: list[Schema], _: Schema, components: Schema, at: str) -> Iterator[str]:
    found = [list(mismatches(value, each, components, at)) for each in said]
    if all(found):
        yield f"{at}: none of {len(said)} forms: {'; '.join(each[0] for each in found)}"


def _type(value: Any, said: str, *_: Any) -> Iterator[str]:
    at = _[-1]
    if not isinstance(value, _TYPES[said]) or (isinstance(value, bool) and said != "boolean"):
        yield f"{at}: expected {said}, got {value!r:.100}"


def _enum(value: Any, said: list[Any], *_: Any) -> Iterator[str]:
    if value not in said:
        yield f"{_[-1]}: expected one of {said}, got {value!r:.100}"


def _format(value: Any, said: str, *_: Any) -> Iterator[str]:
    assert said == "date-time", f"the check knows no format {said!r}"
    try:
        datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        yield f"{_[-1]}: expected a date and time, got {value!r:.100}"


def _properties(value: Any, said: Mapping[str, Schema], _: Schema, components: Schema, at: str) -> Iterator[str]:
    for name, schema in said.items() if isinstance(value, dict) else ():
        if name in value:
            yield from mismatches(value[name], schema, components, f"{at}.{name}")


def _required(value: Any, said: list[str], *_: Any) -> Iterator[str]:
    for name in said if isinstance(value, dict) else ():
        if name not in value:
            yield f"{_[-1]}: {name!r} is missing"


def _additional(value: Any, said: bool | Schema, schema: Schema, components: Schema, at: str) -> Iterator[str]:
    for name in set(value) - set(schema.get("properties", ())) if isinstance(value, dict) else ():
        if said is False:
            yield f"{at}: {name!r} is not in the schema"
        elif isinstance(said, Mapping):
            yield from mismatches(value[name], said, components, f"{at}.{name}")


def _items(value: Any, said: Schema, _: Schema, components: Schema, at: str) -> Iterator[str]:
    for number, each in enumerate(value if isinstance(value, list) else ()):
        yield from mismatches(each, said, components, f"{at}[{number}]")


_KEYWORDS = {
    "$ref": _reference, "anyOf": _any_of, "type": _type, "enum": _enum, "format": _format, "properties": _properties,
    "required": _required, "additionalProperties": _additional, "items": _items,
}  # fmt: skip
