"""Leftovers at a location: places without an entry, of a program that was lost, and readers that do not come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from controller.operate.cli import app
from flux.eventlog.streams import ReaderPositions, Retention, StreamCatalogue, StreamDefinition
from flux.outputs.catalogue import OutputCatalogue, output_of
from flux.vault.location import Folder


class Lost(BaseException):
    """The end of a program between two effects on its disk."""


class Streams:
    what = "streams"

    def __init__(self, place: Folder) -> None:
        self.catalogue = StreamCatalogue(place)

    def register(self, name: str) -> None:
        self.catalogue.register(StreamDefinition(name=name, schema="n BIGINT", partitions=2))


class Outputs:
    what = "outputs"

    def __init__(self, place: Folder) -> None:
        self.catalogue = OutputCatalogue(place)

    def register(self, name: str) -> None:
        self.catalogue.register(output_of(name, pa.schema([("n", pa.int64())]), 2, Retention()))


@pytest.mark.parametrize("kind", [Streams, Outputs])
def test_a_place_without_an_entry_goes_with_the_next_change(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0

    def may_be_lost(effect: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Lost
            found = effect(*given, **more)
            if left == 0:
                raise Lost
            return found

        return wrapped

    for at in itertools.count(1):
        place = Folder(tmp_path / str(at))
        place.path.mkdir()
        here = kind(place)
        here.register("first")
        with monkeypatch.context() as patched:
            left = at
            for name in ("write", "below", "clear"):
                patched.setattr(Folder, name, may_be_lost(getattr(Folder, name)))
            try:
                here.register("second")
                here.catalogue.remove("first")
            except Lost:
                ended = False
            else:
                ended = True
        kind(place).register("third")
        entries = kind(place).catalogue.all().values()
        assert {path.name for path in (place.path / here.what).iterdir()} == {each.id for each in entries}, at
        if ended:
            assert at > 5
            return


def test_a_reader_is_forgotten_by_a_command(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    here = Streams(Folder(tmp_path))
    here.register("clicks")
    positions = ReaderPositions(here.catalogue.readers_place(here.catalogue.get("clicks")))
    positions.note("query-1", 0, 7)
    positions.note("query-1", 1, 8)
    positions.note("query-2", 0, 9)
    done = CliRunner().invoke(app, ["forget", "clicks", "query-3", "--location", str(tmp_path)])
    assert done.exit_code == 2
    assert "it has query-1, query-2" in " ".join(done.output.split())
    assert CliRunner().invoke(app, ["forget", "clicks", "query-1", "--location", str(tmp_path)]).exit_code == 0
    assert positions.names() == ["query-2"]
    assert positions.needed_from(1) is None
    with pytest.raises(FileNotFoundError):
        positions.advance("query-1", 0, 10)
    positions.advance("query-2", 0, 10)
    assert (positions.names(), positions.needed_from(0)) == (["query-2"], 10)
