"""The collecting operator: its rows can be read often, and travel."""

import io

import pyarrow as pa

from flux.operators.collect import Collect
from flux.operators.operator import Context

SCHEMA = pa.schema([("n", pa.int64())])


def collecting() -> Collect:
    operator = Collect(memory_bytes=100)
    operator.open(Context("s", schemas=(SCHEMA,)))
    return operator


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)


def read(operator: Collect) -> list[int]:
    first = operator.read(0, 1 << 20)
    assert first is not None
    data, total = first
    assert len(data) == total
    return pa.ipc.open_stream(io.BytesIO(data)).read_all().column("n").to_pylist()


def test_nothing_can_be_read_before_the_end_and_everything_twice_after_it() -> None:
    operator = collecting()
    operator.process(batch(1, 2))
    assert operator.read(0, 10) is None
    operator.process(batch(*range(100)))
    operator.finish()
    assert read(operator) == read(operator) == [1, 2, *range(100)]


def test_a_copy_made_at_any_moment_goes_on_like_the_original() -> None:
    for taken_after in range(4):
        operator, copy = collecting(), collecting()
        for step, rows in enumerate([batch(1), batch(2, 3), batch(4)]):
            if step == taken_after:
                copy.restore(operator.snapshot())
            operator.process(rows)
            if step >= taken_after:
                copy.process(rows)
        operator.finish()
        if taken_after == 3:
            copy.restore(operator.snapshot())
        else:
            copy.finish()
        assert read(copy) == read(operator) == [1, 2, 3, 4]


def test_a_copy_made_while_the_output_is_read_is_whole() -> None:
    operator, copy = collecting(), collecting()
    operator.process(batch(*range(1000)))
    operator.finish()
    operator.read(0, 300)
    copy.restore(operator.snapshot())
    assert read(copy) == list(range(1000))


def test_an_empty_output_has_its_schema() -> None:
    operator = collecting()
    operator.finish()
    assert read(operator) == []


def test_what_was_appended_is_a_change_also_behind_the_end() -> None:
    for begun_after in range(4):
        operator, copy, applied = collecting(), collecting(), 0
        for step, rows in enumerate([batch(1), batch(2, 3), batch(4), None]):
            if step == begun_after:
                assert operator.changes() is None, "nobody has asked before"
                copy.restore(operator.snapshot())
            if rows is None:
                operator.finish()
            else:
                operator.process(rows)
            if step >= begun_after and step != 1:  # one time the change of two steps
                changes = operator.changes()
                applied += len(changes["data"])
                copy.apply_changes(changes)
                copy.apply_changes(operator.changes())
        assert read(copy) == read(operator) == [1, 2, 3, 4]
        assert (applied < operator.state_bytes()) == (begun_after > 0)
