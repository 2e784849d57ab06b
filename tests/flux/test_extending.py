"""The examples of docs/extending.md, run as they stand, section by section."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from harness import LIMIT_S, Rows, ThreadQuery

import flux
from flux.replica import kinds
from flux.testing import ContractBroken, apply

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


#: The start of the query of the page, which needs Spark.
START = 'query = flow.start(checkpointLocation=os.path.abspath("checkpoint"))\n'


def example(section: str) -> str:
    """Return all code of a section."""
    if section == "A sink":
        return code_of(section).partition("import os\n")[0]
    return code_of(section)


def code_of(section: str) -> str:
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.chdir(tmp_path)

    def run(section: str, *changes: tuple[str, str]) -> dict[str, Any]:
        code = example(section)
        for old, new in changes:
            assert code.count(old) == 1
            code = code.replace(old, new)
        names: dict[str, Any] = {"__name__": "extending"}
        exec(compile(code, str(PAGE), "exec"), names)
        return names

    return run


def test_the_source_keeps_the_contract_and_is_read_by_workers(ran: Callable[..., dict[str, Any]]) -> None:
    names, rows = ran("A source"), Rows()
    source = flux.source(names["lines"].reader, pa.schema([("line", pa.string())]))
    with ThreadQuery(rows.stage(source), workers=1):
        end = time.monotonic() + LIMIT_S
        while len(rows) < 40_000 and time.monotonic() < end:
            time.sleep(0.01)
    assert sorted(row["line"] for row in rows) == sorted(f"{name}.log {n}" for name in "ab" for n in range(20_000))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("is None else start)", "is None else start + 1)", "in the first reading"),
        ("is None else start)", "is None else 0)", "in the first reading"),
        (
            "def lag(self):",
            "def lags(self):",
            "LinesOfFile.lags is not part of flux.PartitionReader.*did you mean 'lag'",
        ),
        ("self._file.close()", "os.close(self._file.fileno())", "called a second time, raised OSError"),
        (
            "            return None\n",
            "            raise StopIteration\n",
            "it has ended, and the source says endless = True",
        ),
        (
            'open(path, "rb"), offset',
            'open(path, "rb"), offset and max(offset, 70_000)',
            "in the first reading|gave nothing more",
        ),
    ],
)
def test_a_mistake_in_a_copy_of_the_source_is_found(
    ran: Callable[..., dict[str, Any]], old: str, new: str, said: str
) -> None:
    with pytest.raises((ContractBroken, flux.UsageError), match=said):
        ran(
            "A source",
            (old, new),
            ('check_source(Lines("a.log", "b.log"))', 'check_source(Lines("a.log"), rows=30_000, quiet_s=0.1)'),
        )


def test_what_a_start_has_settled_holds_for_later_ones(ran: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    names = ran("A source")
    first, later = (names["Lines"]("a.log", new_only=True) for _ in range(2))
    kept = first.prepare(None)
    with open(tmp_path / "a.log", "a") as file:
        file.write("new\n")
    later.prepare(kept)
    assert later.read(0, None).next().batch.to_pylist() == [{"line": "new"}]


def test_the_sink_keeps_the_contract(ran: Callable[..., dict[str, Any]]) -> None:
    ran("A sink")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{context.query} {context.number}", "{context.number}", "of a query that has written none"),
        (
            """        except BaseException:
            self.base.execute("ROLLBACK")  # rows without their position would come again
            raise
        else:
""",
            "        finally:\n",
            r"an error has broken write\(\) off before line \d+ of .* more often than given",
        ),
        (", check_same_thread=False", "", "can only be used in that same thread"),
        ("self.committed(position.partition) == position.sequence", "True", "more often than given"),
        ("position.sequence + 1", "position.sequence", "not outside"),
        ('"REPLACE INTO positions VALUES (?, ?)"', '"SELECT ?, ?"', "not outside"),
    ],
)
def test_a_mistake_in_a_copy_of_the_sink_is_found(
    ran: Callable[..., dict[str, Any]], old: str, new: str, said: str
) -> None:
    with pytest.raises(ContractBroken, match=said):
        ran("A sink", (old, new))


@pytest.fixture
def reserve() -> Iterator[None]:
    yield
    if "reserve" in [kind.name for kind in kinds.registered()]:
        kinds.unregister("reserve")


@pytest.mark.usefixtures("reserve")
def test_the_kind_of_replica_takes_over_in_the_simulator_and_keeps_every_law(
    ran: Callable[..., dict[str, Any]],
) -> None:
    assert len(ran("A kind of replica")["results"]) == 2


@pytest.mark.usefixtures("reserve")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("leads_as=ACTIVE", 'leads_as="reserve"', "an ack never exceeds what was applied"),
        ("commits=True", "commits=False", "reserve: a kind without commits may lack committed steps"),
    ],
)
def test_a_mistake_in_a_copy_of_the_kind_is_found(
    ran: Callable[..., dict[str, Any]], old: str, new: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        ran("A kind of replica", (old, new), ("range(2, 4)", "[2]"))


def test_the_source_and_the_sink_work_in_one_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = code_of("A source") + code_of("A sink")
    assert code.count(START) == 1
    code = re.sub(r"^check_(source|sink)\(.*$", "", code.replace(START, ""), flags=re.MULTILINE)
    for ddl, plain in (  # the query of threads reads no DDL
        ('"line STRING"', 'pa.schema([("line", pa.string())])'),
        ('"k STRING, x BIGINT"', 'pa.schema([("k", pa.string()), ("x", pa.int64())])'),
    ):
        assert code.count(ddl) == 1
        code = code.replace(ddl, plain)
    names: dict[str, Any] = {"__name__": "extending"}
    exec(compile(code, str(PAGE), "exec"), names)
    names["Rows"]("rows.db").prepare(2, None)
    with ThreadQuery(names["flow"], workers=2):
        end = time.monotonic() + LIMIT_S
        while len(names["outside"]()) < 40_000 and time.monotonic() < end:
            time.sleep(0.01)
    assert sorted(names["outside"]()) == sorted((f"{name}.log", n) for name in "ab" for n in range(20_000))


def test_the_operator_with_state_by_key_gives_the_same_wherever_it_is_restored(
    ran: Callable[..., dict[str, Any]],
) -> None:
    names = ran("An operator with state by key")
    expected = [
        {"hour": 0, "user": 1, "clicks": 2, "spent": 6},
        {"hour": 0, "user": 2, "clicks": 2, "spent": 9},
        {"hour": 1, "user": 1, "clicks": 1, "spent": 9},
    ]
    assert names["table"].to_pylist() == expected
    for after in (None, 0, 2):
        assert apply(names["Hourly"], *names["clicks"], restart_after=after).to_pylist() == expected
