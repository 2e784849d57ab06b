"""The parts of a checkout that ``flux bench nexmark`` needs and that are not installed: queries, their generator, the oracle."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import flux
from flux.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
#: The names of all queries.
QUERIES = tuple(f"q{number}" for number in range(23))


def module(name: str) -> Any:
    """Import a module of the checkout. UsageError: there is none, or a package that it needs is missing."""
    if str(ROOT) not in sys.path and (ROOT / "examples" / "nexmark").exists():
        sys.path.append(str(ROOT))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"flux bench nexmark runs in a checkout of the project with the packages of its tests, and {name} cannot be "
            f"imported: {error}"
        ) from error


def query(name: str, nexmark: Any) -> Any:
    """Return the flow of a query."""
    return module(f"examples.nexmark.{name}").query(nexmark)


def events(count: int, partitions: int, **options: Any) -> Any:
    """Return generated events with all of their columns."""
    return module("examples.nexmark.generator").Events(count, partitions, **options).ask_for_all()


def flows(reader: Any) -> Any:
    """Return the flows of the events that a reader gives. It has an attribute ``events`` as the generator has it."""
    made = module("examples.nexmark.flows").Nexmark
    return made(flux.source(reader, name="nexmark"), reader.events.asked)


def generator(count: int, partitions: int, pace: float | None = None, **options: Any) -> Any:
    """Return a reader of generated events, which makes the columns that flows ask for."""
    return module("examples.nexmark.generator").Generator(count, partitions, pace, **options)


def oracle(generated: Any) -> Any:
    """Return the oracle over generated events."""
    return module("tests.oracles.nexmark").NexmarkOracle(map(generated.batches, range(generated.partitions)))
