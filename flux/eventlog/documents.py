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
    """The entries of one document, by name. Other programs may change them, so each method reads the document."""

    def __init__(self, place: Place, what: str, kind: type[T]) -> None:
        """``what`` names the entries, and the document after them: "streams" are in streams.json."""
        self.place = place
        self._what, self._document = what, f"{what}.json"
        self._decoder = msgspec.json.Decoder(kind)

    def all(self) -> dict[str, T]:
        """Return all entries. QueryFailed: the document is damaged, or of another release."""
        try:
            data = self.place.read(self._document)
        except FileNotFoundError:
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
        """Lock the location and give all entries. Changes of them are durable at the end, unless an error ends it."""
        with self.place.locked():
            found = self.all()
            before = dict(found)
            yield found
            if found != before:
                content = {"format": 1, self._what: found}
                self.place.write(self._document, msgspec.json.format(msgspec.json.encode(content)))


_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
