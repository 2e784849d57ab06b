"""The closed list of functions: those of Spark for which there is a kernel. ``tests/spark/test_sql_refusals.py`` compares it with
all functions of Spark, so that none is accepted by accident (design: sql-closed-list)."""

from __future__ import annotations

_OF_ROWS = """
abs add_months array ascii between bround btrim cardinality ceil ceiling char_length character_length coalesce concat
concat_ws contains date_add date_diff date_format date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart
day dayofmonth dayofweek dayofyear decode div element_at endswith equal_null exp extract floor from_unixtime get greatest hour
if ifnull ilike instr isnan isnotnull isnull last_day lcase least left len length like ln locate log10 log2 lower lpad ltrim
make_date minute mod month named_struct nanvl negative nullif nullifzero nvl nvl2 octet_length pmod position positive pow
power quarter regexp regexp_extract regexp_like regexp_replace repeat replace reverse right rlike round rpad rtrim second sign
signum size split split_part sqrt startswith struct substr substring substring_index timestamp_micros timestamp_millis
timestamp_seconds to_char to_date to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_varchar trim trunc
try_add try_divide try_element_at try_mod try_multiply try_subtract try_to_date try_to_timestamp ucase unix_date unix_micros
unix_millis unix_seconds unix_timestamp upper weekday weekofyear year zeroifnull
"""
_CASTS = "bigint binary boolean date decimal double float int smallint string timestamp tinyint"
_AGGREGATES = "any avg bool_and bool_or count count_if every max mean min some sum"
#: Functions that give a value for each row.
OF_ROWS = frozenset(_OF_ROWS.split())
#: Types whose names are casts when they are called.
CASTS = frozenset(_CASTS.split())
#: Functions that give a value for each group.
AGGREGATES = frozenset(_AGGREGATES.split())
#: Windows, as a key of GROUP BY.
WINDOWS = frozenset(("window", "session_window"))
#: The time at which a row is processed, as the time of a window.
CLOCKS = frozenset(("current_timestamp", "now"))
#: The event time of a window, as the time of a longer one.
WINDOW_TIME = "window_time"
#: Functions that are accepted as the first argument of a window alone.
TIMES_OF_WINDOWS = CLOCKS | {WINDOW_TIME}
