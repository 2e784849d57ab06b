"""Documents of a location with definitions by name: each is read and written as a whole (design: registered-streams)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec

from flux.errors import QueryFailed
from flux.vault.location import Place

T = TypeVar("T", bound=msgspec.Struct)


class NamedEntries(Generic[T]):
    """The entries of one document, by name. Other programs may change them, so each method reads the document.

    An entry has a place of its own, ``WHAT/ID``. *Law:* a place without an entry is named by the document, so that the next
    change removes it: the program that made it, or was to remove it, may be lost in between (design: registered-streams)."""

    def __init__(self, place: Place, what: str, kind: type[T]) -> None:
        """``what`` names the entries, and the document after them: "streams" are in streams.json."""
        self.place = place
        #: The places that are to be without an entry after the change under way.
        self._left: list[str] = []
        self._what, self._document = what, f"{what}.json"
        self._decoder = msgspec.json.Decoder(kind)

    def all(self) -> dict[str, T]:
        """Return all entries. QueryFailed: the document is damaged, lost, or of another release."""
        try:
            data = self.place.read(self._document)
        except FileNotFoundError:
            check_not_lost(self.place, self._document, self._what)
            return {}
        try:
            parts = _parts.decode(data)
            if self._what not in parts:
                raise msgspec.ValidationError(f"it has no {self._what}")
            return {name: self._decoder.decode(entry) for name, entry in _parts.decode(parts[self._what]).items()}
        except msgspec.MsgspecError as error:
            raise QueryFailed(
                f"{self.place}/{self._document} cannot be read: {error}. Restore it from a copy, or start the release that "
                "wrote it"
            ) from error

    @contextmanager
    def changing(self) -> Iterator[dict[str, T]]:
        """Lock the location, remove places that were left without an entry, and give all entries. Changes of them are durable at
        the end, unless an error ends it."""
        with self.place.locked():
            found = self.all()
            before, leftover = dict(found), self._leftover()
            for id_ in leftover:
                self.place_of(id_).clear()
            self._left = []
            yield found
            if found != before or self._left != leftover:
                self._write(found, self._left)

    def begin_place(self, id_: str) -> None:
        """Note a place that is made from now on, and gets its entry in the change under way."""
        self._write(self.all(), [*self._left, id_])

    def leave_place(self, id_: str) -> None:
        """Note a place whose entry goes in the change under way."""
        self._left.append(id_)

    def place_of(self, id_: str) -> Place:
        return self.place.below(f"{self._what}/{id_}")

    def _leftover(self) -> list[str]:
        try:
            parts = _parts.decode(self.place.read(self._document))
        except FileNotFoundError:
            return []
        return _ids.decode(parts[_LEFTOVER]) if _LEFTOVER in parts else []

    def _write(self, entries: dict[str, T], leftover: list[str]) -> None:
        content = {"format": 1, self._what: entries, **({_LEFTOVER: leftover} if leftover else {})}
        self.place.write(self._document, msgspec.json.format(msgspec.json.encode(content)))


def check_not_lost(place: Place, document: str, folder: str) -> None:
    """Check that a document which is missing was never there. QueryFailed: the folder that it describes has something in it. The
    document is written before anything comes into the folder."""
    try:
        is_used = place.below(folder).used()
    except FileNotFoundError:
        return
    if is_used:
        raise QueryFailed(
            f"{place}/{document} is missing, and {place}/{folder} has what it describes: the location has lost it. Restore "
            f"{document} from a copy of the location, or begin with another location"
        )


#: The part of a document with the ids of places without an entry.
_LEFTOVER = "leftover"
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ids = msgspec.json.Decoder(list[str])
