"""Flows of registered texts, kept in the location with the answers of Spark's analyser, so that a service starts without asking
again (design: kept-flows).

Reading a text takes Spark a tenth of a second. *Law:* a flow is used only if all that it follows from is as it was: the
definitions of its query and of the inputs, the settings of SQL, and the code of Flux, Spark and Arrow. A question of the
compiler without a kept answer has the service read all texts anew. So a flow that is kept is never needed, and an error in
keeping one is no error.

A flow has expressions of Spark's, which no file can hold. Each is kept as a mark: the compiler only gives expressions to
Spark, and finds the answers by the identity of the objects that have them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyspark
from pyspark.sql import Column, SparkSession

import flux
from flux.dataflow.flow import Flow
from flux.errors import FluxError
from flux.eventlog.streams import StreamCatalogue
from flux.registry.definitions import QueryDefinition
from flux.registry.query_catalogue import QueryCatalogue
from flux.vault.location import Place
from spark_integration.expressions.analyser_answers import AnswerRecord, objects_of
from spark_integration.settings import session_text

log = logging.getLogger("flux")

#: The folder of kept flows, below the location.
_FOLDER = "flows"
#: The packages on whose code a flow depends.
_PACKAGES = ("partitioning", "flux", "controller", "spark_integration")
#: A setting of SQL on which no flow depends.
_OTHER_SETTING = "spark.sql.warehouse.dir"


class NotKept(Exception):
    """Question about an expression that is kept as a mark."""


class ColumnMark:
    """A mark in the place of one of Spark's expressions."""

    def __getattr__(self, name: str) -> Any:
        raise NotKept(f"the compiler asks an expression for {name}")


class ReadText(NamedTuple):
    """A text that was read: its query, the flows that it reads, by name, and its own flow."""

    definition: QueryDefinition
    inputs: Mapping[str, Flow]
    flow: Flow


class _Document(msgspec.Struct):
    """The flow of one query, in the location."""

    #: The digest of all that it follows from.
    origin: bytes
    #: The names of its inputs, in the order of the text.
    names: list[str]
    #: The pickle of the flow, and of the questions about its objects with their answers.
    pickled: bytes


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Document)


class KeptFlow:
    """One flow of an earlier life of the service."""

    def __init__(self, document: _Document, answers: AnswerRecord) -> None:
        self.names = document.names
        self._pickled, self._answers = document.pickled, answers

    def flow(self, inputs: Mapping[str, Flow]) -> Flow:
        """Return the flow over inputs. NotKept: it cannot be read."""
        try:
            made, asked = _FlowReader(self._pickled, inputs).load()
        except Exception as error:
            raise NotKept(f"a flow cannot be read: {error}") from error
        for question, answer in asked:
            self._answers.give(question, answer)
        found: Flow = made
        return found


class KeptFlows:
    """The flows of a location. ``answers`` has the answers about those that were read."""

    def __init__(self, place: Place, base: str) -> None:
        """Take a place. ``base``: a text of all that flows follow from, without the definitions of queries and inputs."""
        self._place, self._folder, self._base = place, place.below(_FOLDER, new=True), base
        self.answers = AnswerRecord()

    @classmethod
    def open(cls, spark: SparkSession, streams: StreamCatalogue) -> KeptFlows:
        """Open those of a location, for the settings that the session has now."""
        return cls(streams.place, "\0".join((*_settings(spark), *_code())))

    def of(self, definition: QueryDefinition) -> KeptFlow | None:
        """Return the flow of a definition; None: none is kept, or it follows from something else."""
        if not definition.sql:
            return None
        try:
            found = _decoder.decode(self._folder.read(_document(definition.name)))
        except (OSError, msgspec.MsgspecError):
            return None
        if found.origin != self._origin(definition, found.names):
            return None
        return KeptFlow(found, self.answers)

    def keep(self, text: ReadText, asked: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        """Keep the flow of a text, with the answers to those of the questions that are about its objects."""
        names = list(text.inputs)
        try:
            pickled = _pickled(text, asked)
            made = _Document(self._origin(text.definition, names), names, pickled)
            self._folder.write(_document(text.definition.name), _encoder.encode(made))
        except (OSError, FluxError, pickle.PicklingError, TypeError, AttributeError) as error:
            log.info("the flow of query %s is not kept: %s", text.definition.name, error)

    def forget_others(self, names: Iterable[str]) -> None:
        """Remove the flows of all other queries."""
        kept = set(map(_document, names))
        for each in self._folder.names():
            if each not in kept:
                self._folder.remove(each)

    def _origin(self, definition: QueryDefinition, names: Iterable[str]) -> bytes:
        """Return the digest of all that the flow of a definition follows from."""
        streams, queries = StreamCatalogue(self._place).all(), QueryCatalogue(self._place).all()
        inputs = [[name, streams.get(name), queries[name].definition if name in queries else None] for name in names]
        told = msgspec.json.encode([self._base, definition, inputs])
        return hashlib.sha256(told).digest()


def _document(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _settings(spark: SparkSession) -> list[str]:
    """Return the settings of SQL."""
    listed = session_text(spark).split("\0")
    return sorted(each for each in listed if "spark.sql." in each and _OTHER_SETTING not in each)


@cache
def _code() -> tuple[str, ...]:
    """Return the releases of all that makes flows, and the sizes and times of the files of Flux."""
    found = [platform.python_version(), pyspark.__version__, pa.__version__]
    root = Path(flux.__file__).parents[1]
    for package in _PACKAGES:
        for folder, _, files in sorted(os.walk(root / package)):
            for file in sorted(each for each in files if each.endswith(".py")):
                told = os.stat(os.path.join(folder, file))
                found.append(f"{folder}/{file} {told.st_size} {told.st_mtime_ns}")
    return tuple(found)


# ---- pickles


def _pickled(text: ReadText, asked: Sequence[tuple[tuple[Any, ...], Any]]) -> bytes:
    """Return the pickle of a flow, with the questions about its objects."""
    own = _FlowWriter(io.BytesIO(), text.inputs)
    own.dump(text.flow)
    questions = [
        (question, answer) for question, answer in asked if all(id(each) in own.met for each in objects_of(question))
    ]
    with io.BytesIO() as file:
        _FlowWriter(file, text.inputs).dump((text.flow, questions))
        return file.getvalue()


class _FlowWriter(pickle.Pickler):
    """Pickler of a flow. Its inputs are named, and its expressions marked. ``met`` has the ids of all its objects."""

    def __init__(self, file: io.BytesIO, inputs: Mapping[str, Flow]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._inputs = {id(flow): name for name, flow in inputs.items()}
        self.met: set[int] = set()

    def persistent_id(self, obj: Any) -> Any:
        self.met.add(id(obj))
        if (name := self._inputs.get(id(obj))) is not None:
            return "input", name
        return ("mark", id(obj)) if isinstance(obj, Column) else None


class _FlowReader(pickle.Unpickler):
    """Unpickler of a flow over inputs."""

    def __init__(self, pickled: bytes, inputs: Mapping[str, Flow]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._inputs = inputs
        self._marks: dict[int, ColumnMark] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, which = pid
        return self._inputs[which] if kind == "input" else self._marks.setdefault(which, ColumnMark())
