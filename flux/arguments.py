"""Calls of the public functions: arguments that do not fit are a UsageError that names the existing ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from flux.errors import UsageError
from partitioning.ids import ACTIVE, STANDBY, UPSTREAM

RECOVERIES = (ACTIVE, STANDBY, UPSTREAM)
#: The order that the replicas of a partition share: that of its steps, or that of the results at marks of event time.
STEPS, MARKS = ORDERS = ("steps", "marks")
#: The ways in which a stage's copies are read: one of them, a second one while the first brings nothing, or all.
ONE, HEDGED, ALL = FEEDS = ("one", "hedged", "all")
#: The consequences of the loss of a partition's last replica: the query fails, or the partition begins empty.
FAIL, CONVERGE = LOSSES = ("fail", "converge")
PARTITIONS_MAX = 4096
REPLICAS_MAX = 3

P = ParamSpec("P")
R = TypeVar("R")


def checked(
    called: str, options: Callable[[], Iterable[str]] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the calls of a function that users call as ``called``. ``options`` returns the names that its ``**options`` may
    have, in any capitals; without ``options`` the function has to check them itself."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        named = parameters(function)
        looks = options is not None or not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

        def check(kwargs: Any) -> None:
            strange = [name for name in kwargs if name not in named] if looks else []
            if strange:
                more = list(options()) if options is not None else []
                known = {name.lower() for name in more}
                for name in strange:
                    if name.lower() not in known:
                        raise unknown(called, name, [*named, *more])

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                check(kwargs)
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    raise UsageError(f"{called}: {error}; it takes {', '.join(named)}") from None
                return function(*args, **kwargs)
            except UsageError as error:  # the frames of the check say nothing to the caller, in a notebook either
                raise error.with_traceback(None)  # noqa: B904

        return call

    return decorate


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names by which the arguments of a function can be given."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def unknown(called: str, name: str, known: Sequence[str]) -> UsageError:
    """Make an error that names the existing options, and the nearest of them."""
    if name == "feeds":
        return UsageError(
            f"{called} has no option 'feeds': a source is read in one place, so there is no second copy to read it from. feeds= "
            "is for a stage with replicas=2 or more, or for start(), where it is for all stages"
        )
    return UsageError(f"{called} has no option {name!r:.100}{nearest(name, known)}; it has {', '.join(known)}")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the nearest existing name as a part of a message, with ``prefix`` in front of the name; empty if none is near."""
    import difflib

    plain = {each.lower().replace("_", ""): each for each in known}
    found = difflib.get_close_matches(name.lower().replace("_", ""), plain, 1)
    return f", did you mean {prefix + plain[found[0]]!r}?" if found else ""


def partition_names(given: Any) -> tuple[str, ...]:
    """Return names of columns as ``partitionBy`` of PySpark takes them. Raises UsageError with the form that is wanted."""
    names = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"partitionBy must be the name of a column, or a list of names, as in partitionBy=['day']; got {given!r:.100}. "
            "Values that have to be computed first are columns in front of it, as in flow.withColumn('day', F.to_date('at'))"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"partitionBy names column {twice[0]!r} twice; name each column once")
    return tuple(names)


def key_columns(key: Any, name: str = "key") -> tuple[str, ...]:
    """Return the key as a tuple of names. Raises UsageError with the form that is wanted; ``name`` is that of the argument."""
    columns = () if key is None else (key,) if isinstance(key, str) else key
    if isinstance(key, list | tuple) and not key:
        raise UsageError(f"{name}={key!r} names no column: leave {name} out, and batches go to partitions in rotation")
    if isinstance(columns, list | tuple) and all(isinstance(column, str) and column for column in columns):
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            raise UsageError(f"{name} names column {twice[0]!r} twice; name each column once")
        return tuple(columns)
    hint = ""
    if any(type(part).__module__.startswith("pyspark.") for part in (key if isinstance(key, list | tuple) else [key])):
        hint = ". A stage knows no Columns: compute the key in front of it, as in df.withColumn('day', ...), and name it here"
    raise UsageError(
        f"{name} must be the name of a column, or a list or tuple of names, as in {name}='user'; got {key!r}{hint}"
    )


def check_recovery(recovery: Any, replicas: Any, order: Any = STEPS) -> None:
    """Raise UsageError if a kind of replicas is unknown, if it is certain that there are none of it, or if they need an order
    that the stage has not."""
    if order not in ORDERS:
        raise UsageError(f"order must be one of {', '.join(ORDERS)}; got {order!r:.100}")
    if order == MARKS and recovery in RECOVERIES and recovery != ACTIVE:
        raise UsageError(
            f"recovery={recovery!r} repeats the order of steps, and with order={MARKS!r} replicas have none: leave one out"
        )
    if recovery not in RECOVERIES:
        raise UsageError(f"recovery must be one of {', '.join(RECOVERIES)}; got {recovery!r}")
    if recovery != ACTIVE and replicas == 1:
        raise UsageError(
            f"recovery={recovery!r} says what further replicas do: give replicas=2 or more with it, or set spark.flux.replicas"
        )


def check_feeds(feeds: Any, replicas: Any, recovery: Any = ACTIVE) -> None:
    """Raise UsageError if there is no such way to read the copies of a stage, or if it is certain that there is one copy to read.
    None: the way is that of the session."""
    if feeds is None:
        return
    if feeds not in FEEDS:
        raise UsageError(f"feeds must be one of {', '.join(FEEDS)}; got {feeds!r:.100}")
    if feeds != ONE and replicas == 1:
        raise UsageError(
            f"feeds={feeds!r} reads several copies of a stage, and with replicas=1 there is one: give replicas=2 or more with it"
        )
    if feeds != ONE and recovery != ACTIVE:
        raise UsageError(
            f"feeds={feeds!r} reads several copies of a stage, and with recovery={recovery!r} only its primary has rows to read: "
            "leave one out"
        )


def check_on_loss(on_loss: Any, replicas: Any) -> None:
    """Raise UsageError if there is no such consequence of a loss, or if the stage has other replicas."""
    if on_loss not in LOSSES:
        raise UsageError(f"on_loss must be one of {', '.join(LOSSES)}; got {on_loss!r:.100}")
    if on_loss == CONVERGE and replicas is not None and replicas != 1:
        raise UsageError(
            f"on_loss={CONVERGE!r} is for a stage with replicas=1, whose state is lost with its worker; replicas={replicas!r} "
            "keep it: leave one of them out"
        )


def check_counts(name: str, partitions: Any, replicas: Any) -> None:
    """Raise UsageError if numbers of partitions or replicas are out of bounds. None: those of the session."""
    if partitions is not None:
        _check_range(name, "partitions", partitions, PARTITIONS_MAX, "leave it out for spark.flux.partitions")
    if replicas is not None:
        most = "it counts all of them: with 1 there is no other to take over"
        _check_range(name, "replicas", replicas, REPLICAS_MAX, most)


def _check_range(name: str, what: str, value: Any, most: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UsageError(f"stage {name}: {what} must be a whole number from 1 to {most}, got {value!r}; {hint}")
