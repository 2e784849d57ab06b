"""Columns by whose values rows go into folders, under the names that Spark gives them (design: partition-columns)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_

from flux.expressions.kernels.text_casts import to_text
from flux.expressions.kernels.values import ANSI
from flux.operators.schema import positions

#: Folder of the rows whose value is null or empty text.
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
#: Characters that Spark writes in names of folders as a percent sign and two digits.
_ESCAPED = {ord(each): f"%{ord(each):02X}" for each in "\"#%'*/:=?\\\x7f{[]^" + "".join(map(chr, range(1, 32)))}


class PartitionColumns:
    """The columns named by ``partitionBy``, and the folders of rows by their values. Values are in the names of folders alone."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def check(self, schema: pa.Schema) -> None:
        """Raise ValueError unless each column is there, has values with one text each, and leaves a column for the files."""
        places = self._places(schema)
        for place in places:
            field = schema.field(place)
            if not _has_one_text(field.type):
                raise ValueError(
                    f"partitionBy={field.name!r}: a folder cannot have a name for each value of type {field.type}. "
                    + _instead(field)
                )
        if len(set(places)) < len(places):
            raise ValueError(f"partitionBy names a column twice: {', '.join(self.names)}; name each column once")
        if len(places) == len(schema):
            raise ValueError("partitionBy names all of its columns, and files need one at least, as in Spark")

    def folders(self, rows: pa.Table) -> list[tuple[str, pa.Table]]:
        """Return the rows of each folder, in their order, without the columns of its name. Equal rows give equal folders in
        one order."""
        places = self._places(rows.schema)
        names, of_row = [""], np.zeros(rows.num_rows, np.int64)
        for place in places:
            values, value_of_row = _names(rows.schema.field(place).name, rows.column(place))
            there, of_row = np.unique(of_row * len(values) + value_of_row, return_inverse=True)
            names = [f"{names[each // len(values)]}/{values[each % len(values)]}" for each in there.tolist()]
        in_order = rows.drop_columns([rows.schema.field(place).name for place in places])
        in_order = in_order.take(np.argsort(of_row, kind="stable"))
        ends = np.cumsum(np.bincount(of_row, minlength=len(names))).tolist()
        return [
            (name.removeprefix("/"), in_order.slice(first, end - first))
            for name, first, end in zip(names, [0, *ends], ends, strict=False)
        ]

    def _places(self, schema: pa.Schema) -> list[int]:
        found = [(name, positions(schema, name)) for name in self.names]
        missing = [name for name, places in found if len(places) != 1]
        if missing:
            raise ValueError(f"partitionBy names {missing[0]!r}, and its columns are {', '.join(schema.names)}")
        return [place for _, (place,) in found]


def _has_one_text(type_: pa.DataType) -> bool:
    """Return whether values of the type have a text that does not depend on a session."""
    if is_.is_timestamp(type_):
        return type_.tz is None and type_.unit == "us"
    tests = (is_.is_boolean, is_.is_signed_integer, is_.is_floating, is_.is_decimal128, is_.is_date32)
    return any(test(type_) for test in (*tests, is_.is_string, is_.is_large_string)) and not is_.is_float16(type_)


def _instead(field: pa.Field) -> str:
    if is_.is_timestamp(field.type):
        return (
            f"Its text would depend on the time zone of the session: give a column for it, as in "
            f"flow.withColumn('day', F.to_date({field.name!r})), or F.date_format({field.name!r}, 'yyyy-MM-dd-HH')"
        )
    return "It can for booleans, numbers, strings, dates and TIMESTAMP_NTZ: cast the column in front of it"


def _names(column: str, values: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Return the names of the folders of a column, and the number of the name of each row."""
    texts = to_text(values.combine_chunks(), ANSI, None)
    coded = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts).dictionary_encode(
        null_encoding="encode"
    )
    found = coded.dictionary.to_pylist()
    if any(each is not None and "\0" in each for each in found):
        raise ValueError(
            f"column {column!r} has a value with a character of code 0, which no name of a folder can have"
        )
    prefix = column.translate(_ESCAPED)
    names = [f"{prefix}={NO_VALUE if each is None else each.translate(_ESCAPED)}" for each in found]
    return names, coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
