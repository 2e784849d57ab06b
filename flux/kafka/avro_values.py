"""The schema by which ``to_kafka(..., format="avro")`` writes values, and the id in front of each value.

Law: all writers of a query, and all that repeat their rows, write by the same schema under the same id. Both are settled
once, in the program that starts the query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from flux.errors import UsageError
from flux.kafka import avro_writing
from flux.kafka.avro import MAGIC, Avro, as_json
from flux.kafka.avro_fields import Field, derived, fitted
from flux.kafka.subjects import Subject

#: URL of a registry, or a function that takes subject and schema as text and returns the id.
Schemas = str | Callable[[str, str], int] | None


@dataclass(frozen=True)
class AvroValues:
    """Schema and frame of the values of one topic."""

    #: Topic that is written; the subject in a registry is named after it.
    topic: str
    #: Schema in Avro's JSON as the user gave it. None: it is derived from the columns, or is the newest of the subject.
    schema: Any = None
    #: Origin of ids. None: nothing stands in front of values.
    schemas: Schemas = None
    #: The schema is registered if the registry does not know it.
    register: bool = False
    #: Id of the schema, once it is settled.
    id: int | None = None
    _known: dict[Any, tuple[Field, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise UsageError for arguments that do not go together."""
        if self.schema is not None:
            Avro(self.schema)
        if not isinstance(self.register, bool):
            raise UsageError(f"register_schemas must be True or False, got {self.register!r}")
        if self.register and not isinstance(self.schemas, str):
            raise UsageError("register_schemas=True needs the URL of a registry: schemas='http://host:8081'")
        self._subject()

    @property
    def follows_registry(self) -> bool:
        """The newest schema of the subject is used, which is not known yet."""
        return self.schema is None and isinstance(self.schemas, str) and not self.register

    def check(self, columns: pa.Schema) -> None:
        """Raise SchemaError if these columns can never be written by the schema."""
        if not self.follows_registry:
            self._fields(columns)

    def settled(self, columns: pa.Schema, limit_s: float) -> AvroValues:
        """Return the values with schema and id settled. A registry is asked for them for at most ``limit_s`` seconds."""
        subject, number = self._subject(), None
        schema = self.schema if isinstance(self.schema, str) else None
        if subject is not None and self.follows_registry:
            number, schema = subject.newest(limit_s)
            try:
                Avro(schema)
            except UsageError as error:
                raise UsageError(f"schema {number} of {subject!r} cannot be used: {error}") from None
        else:
            schema = schema or json.dumps(self._schema(columns))
            if subject is not None:
                number = subject.id_of(schema, self.register, limit_s)
        made = AvroValues(self.topic, schema, id=number)
        made._fields(columns)  # so that workers need not parse the schema
        return made

    def encode(self, columns: Sequence[pa.Array], names: Sequence[str], rows: int, given: pa.Array | None) -> pa.Array:
        """Encode rows as a binary column. Rows that are null in ``given`` are null in it."""
        schema = pa.schema([(name, column.type) for name, column in zip(names, columns, strict=True)])
        fields = self._fields(schema)
        by_name = dict(zip(names, columns, strict=True))
        frame = b"" if self.id is None else bytes([MAGIC]) + self.id.to_bytes(4, "big")
        chosen = [by_name[each.name] for each in fields if not each.missing]
        return avro_writing.values(chosen, fields, rows, given, frame)

    def _fields(self, columns: pa.Schema) -> tuple[Field, ...]:
        # The types alone are the key: nullability is settled with the schema, and that of a batch may differ.
        key = tuple((each.name, each.type) for each in columns)
        if key not in self._known:
            self._known[key] = fitted(Avro(self._schema(columns)).reader, columns)
        return self._known[key]

    def _schema(self, columns: pa.Schema) -> Any:
        return derived(columns) if self.schema is None else as_json(self.schema)

    def _subject(self) -> Subject | None:
        return None if self.schemas is None else Subject(f"{self.topic}-value", self.schemas)
