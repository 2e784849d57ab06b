"""The lines of a sink's code that are reached while it is called, for a trial of the sink (``sink_check``).

Errors and stops come between the lines of the sink's own code: of the files in which its classes, and functions given to it, are
written. Lines without a call are passed over, because hardly anything can fail there, and clean-up (except and finally): a
fault in it would leave locks behind that no real fault leaves.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from flux.dataflow.sink import Sink

T = TypeVar("T")


class SinkLine(NamedTuple):
    """A line of a sink's code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"line {self.number} of {os.path.basename(self.file)}, in {self.function}()"


class WriteBrokenOff(ConnectionError):
    """Error that a trial raises before a line of ``write``."""


class SinkLines:
    """The lines of a sink, with calls in them, that are reached while it is called, each at its first time."""

    def __init__(self, sink: Sink) -> None:
        codes = [code for kind in type(sink).__mro__ for value in vars(kind).values() for code in _codes(value)]
        codes += [code for value in vars(sink).values() for code in _codes(value)]
        self._files = {code.co_filename for code in codes} - {inspect.getfile(Sink)}
        self._calling = {file: _calling_lines(file) for file in self._files}
        #: The lines reached until now, in order.
        self.reached: list[SinkLine] = []

    def follow(self, call: Callable[[], T], before: Callable[[SinkLine], None] = lambda line: None) -> T:
        """Call, and tell ``before`` each line that has not been reached yet, before it runs."""

        def line(frame: FrameType, event: str, _: Any) -> Any:
            code = frame.f_code
            at = SinkLine(code.co_filename, frame.f_lineno, code.co_name)
            calling = self._calling[at.file]
            if event == "line" and at not in self.reached and (calling is None or at.number in calling):
                self.reached.append(at)
                before(at)
            return line

        def entered(frame: FrameType, event: str, _: Any) -> Any:
            return line if frame.f_code.co_filename in self._files else None

        earlier = sys.gettrace()
        sys.settrace(entered)
        try:
            return call()
        finally:
            sys.settrace(earlier)


class LineStop:
    """A stop of a thread before a line, until it is released."""

    def __init__(self, line: SinkLine, limit_s: float) -> None:
        self._line, self._limit_s = line, limit_s
        self.stopped, self._released = threading.Event(), threading.Event()

    def __call__(self, line: SinkLine) -> None:
        if line == self._line:
            self.stopped.set()
            self._released.wait(self._limit_s)

    def release(self) -> None:
        self._released.set()


class LineError:
    """An error before a line."""

    def __init__(self, line: SinkLine) -> None:
        self._line = line

    def __call__(self, line: SinkLine) -> None:
        if line == self._line:
            raise WriteBrokenOff(f"check_sink has broken write() off before {line}")


def _codes(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, also of a wrapped one or the function of a partial."""
    for each in (
        value,
        getattr(value, "func", None),
        getattr(value, "__wrapped__", None),
        getattr(value, "fget", None),
    ):
        code = getattr(getattr(each, "__func__", each), "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _calling_lines(file: str) -> set[int] | None:
    """Return the lines of a file with calls, which may fail, outside the bodies of except and finally; None if it is not
    a file of Python code."""
    try:
        with open(file, encoding="utf-8") as text:
            tree = ast.parse(text.read())
    except (OSError, SyntaxError, ValueError):
        return None
    bodies = [
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in [*node.finalbody, *(each for handler in node.handlers for each in handler.body)]
    ]
    cleanup = {line for each in bodies for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call)} - cleanup
