"""Counts of habits that make docstrings and comments hard to read, room by room: ``python -m tests.language [-v] [PATH...]``.

A room is a package folder. Each habit has a pattern or a rule of its own in ``HABITS``; ``survey`` reads source files and
returns every finding with its file and line. Consecutive comment lines are one text, as a docstring is.

The measures find patterns only. A text without findings may still be hard to read.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

ROOT = Path(__file__).parent.parent
#: Packages whose text is measured.
PACKAGES = ("flux", "controller", "partitioning", "spark_integration", "benchmarks", "tests", "examples")
#: Packages in which a class name may stand in one file only. The others are programs and tests beside each other.
PRODUCT = PACKAGES[:4]

#: Habits of sentences, by the name under which they are counted.
SENTENCE_HABITS = {
    "relative opener": re.compile(r"^(What|Who|Whoever|Whose|Those|That which|Whatever|Where|Which)\b"),
    "clause for a noun": re.compile(
        r"\b(what|who|whoever|whose|whatever) (is|are|was|were|has|have|had|it|he|they|leads|reads|comes|came|waits|wants"
        r"|gets|may|might|can|could|needs|a|the|this|these|others|nobody|somebody|other)\b"
    ),
    "so many": re.compile(r"\bso (many|much|long|often|far|few)\b"),
    "opens with Of": re.compile(r"^(Of|The same|As in|As far)\b"),
    "somebody": re.compile(r"\b(somebody|nobody|anybody|everybody)\b", re.IGNORECASE),
    "he": re.compile(r"\b(he|his|him|himself)\b", re.IGNORECASE),
}
#: First words after which a docstring has no verb or noun of its own.
HEADLESS = re.compile(r"(Of|By|For|In|With|As|That|Those|What|Who|Whose|Where|From|So|Not|Nothing)\b")
#: First words of a function's docstring that are certainly no verb. A property is described by a noun.
NO_VERB = re.compile(
    r"(A|An|The|This|These|It|Its|They|All|Any|Each|Every|Some|None|No|One|Two|Both|Several|Whether|How|When|If|Once"
    r"|Until|Up to|To|Because|There|Or|And|Where|Which)\b"
)
HEADLESS_NAME, NO_VERB_NAME, SHARED_NAME = "no head word", "function without verb", "class name in several files"
HABITS = (*SENTENCE_HABITS, HEADLESS_NAME, NO_VERB_NAME, SHARED_NAME)

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Fields of statements that hold other statements, or parts with statements.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_PROPERTIES = {"property", "cached_property", "setter"}
#: A string, which may have ``#`` in it, or a comment. In valid code, each match begins where one of them does.
_STRING_OR_COMMENT = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r"|#[^\n]*",
    re.DOTALL,
)
#: Trees that a caller of ``parsed`` still has.
_trees: WeakValueDictionary[str, ast.Module] = WeakValueDictionary()


class Finding(NamedTuple):
    """One offending sentence, docstring or class name."""

    habit: str
    #: Relative to the project's root.
    path: str
    line: int
    text: str

    @property
    def room(self) -> str:
        return self.path.rpartition("/")[0]


class Passage(NamedTuple):
    """A docstring, or a block of comment lines, that begins at ``line``."""

    line: int
    text: str


class Definition(NamedTuple):
    """A module, a class, a function or a property, without its body."""

    kind: str
    name: str
    line: int
    docstring: Passage | None


class Comment(NamedTuple):
    """A comment of one line."""

    line: int
    column: int
    text: str
    #: Whether nothing else is in the line.
    alone: bool


def source_files(root: Path = ROOT) -> list[Path]:
    """List the measured files of a checkout."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def parsed(source: str) -> ast.Module:
    """Parse a module, once as long as a caller keeps the tree. The trees of all tests would take 250 MiB, and the search for
    garbage among them more time than parsing."""
    if (tree := _trees.get(source)) is None:
        tree = _trees[source] = ast.parse(source)
    return tree


@cache
def definitions(source: str) -> list[Definition]:
    """List a module and its classes and functions. Only statements hold them, and most nodes are expressions: to look at these,
    too, takes half of a survey."""
    tree = parsed(source)
    found, pending = [Definition("module", "", 1, _docstring(tree))], list(tree.body)
    for node in pending:  # grows meanwhile
        if isinstance(node, _DEFINITIONS):
            found.append(Definition(_kind(node), node.name, node.lineno, _docstring(node)))
        for name in _BLOCKS:
            pending += getattr(node, name, ())
    return found


def _kind(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in node.decorator_list}
    return "property" if names & _PROPERTIES else "function"


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Passage | None:
    text = ast.get_docstring(node)
    return Passage(node.body[0].lineno, text) if text else None


def passages(source: str) -> Iterator[Passage]:
    """Yield all docstrings and comments of a module."""
    yield from (each.docstring for each in definitions(source) if each.docstring is not None)
    yield from _comments(source)


@cache
def comments(source: str) -> list[Comment]:
    """List the comments of a module. ``tokenize`` finds the same ones in more than ten times the time."""
    found = []
    line, counted = 1, 0
    for match in _STRING_OR_COMMENT.finditer(source) if "#" in source else ():
        at = match.start()
        if source[at] != "#":
            continue
        line, counted = line + source.count("\n", counted, at), at
        begin = source.rfind("\n", 0, at) + 1
        found.append(Comment(line, at - begin, match[0], not source[begin:at].strip()))
    return found


def _comments(source: str) -> Iterator[Passage]:
    """Join comment lines that follow each other in the same column. A comment behind code stands alone."""
    block: list[str] = []
    begin, last, column = 0, -1, -1
    for line, at, text, alone in comments(source):
        if re.match(r"#\s*(noqa|type:|fmt:|pragma)", text):
            continue
        if not (alone and line == last + 1 and at == column):
            if block:
                yield Passage(begin, " ".join(block))
            block, begin = [], line
        block.append(text.lstrip("#: "))
        last, column = (line, at) if alone else (-1, -1)
    if block:
        yield Passage(begin, " ".join(block))


def sentences(passage: Passage) -> Iterator[Passage]:
    """Split a passage after each full stop, colon, semicolon and question mark, and at empty lines and list items."""
    at = 0
    for match in re.finditer(r"(?<=[.:;?])\s+|\n\s*\n\s*|\n\s*[-*]\s+|\Z", passage.text):
        text = passage.text[at : match.start()]
        if text.strip():
            line = passage.line + passage.text[:at].count("\n")
            yield Passage(line, re.sub(r"\s+", " ", re.sub(r"\(design:[^)]*\)", "", text)).strip())
        at = match.end()


def findings_of(path: str, source: str) -> Iterator[Finding]:
    """Yield the offending sentences and docstrings of one module."""
    for passage in passages(source):
        for line, text in sentences(passage):
            for habit, pattern in SENTENCE_HABITS.items():
                if pattern.search(text):
                    yield Finding(habit, path, line, text)
    for kind, _, line, docstring in definitions(source):
        if docstring is None or kind == "module":
            continue
        text = docstring.text
        first = re.sub(r"\s+", " ", text)[:120]
        if HEADLESS.match(text):
            yield Finding(HEADLESS_NAME, path, line, first)
        elif kind == "function" and NO_VERB.match(text):
            yield Finding(NO_VERB_NAME, path, line, first)


def shared_class_names(sources: dict[str, str]) -> Iterator[Finding]:
    """Yield every class of the product whose name stands in another file, too."""
    places: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, source in sources.items():
        if path.partition("/")[0] in PRODUCT:
            for each in definitions(source):
                if each.kind == "class":
                    places[each.name].append((path, each.line))
    for name, where in places.items():
        for path, line in where:
            others = sorted({other for other, _ in where} - {path})
            if others:
                yield Finding(SHARED_NAME, path, line, f"{name}: also in {', '.join(others)}")


def survey(sources: dict[str, str]) -> list[Finding]:
    """Find all habits in modules given by path, sorted by file and line."""
    found = [finding for path, source in sources.items() for finding in findings_of(path, source)]
    return sorted([*found, *shared_class_names(sources)], key=lambda each: (each.path, each.line, each.habit))


def read_sources(root: Path = ROOT) -> dict[str, str]:
    """Read the measured files, by path relative to ``root``."""
    return {path.relative_to(root).as_posix(): path.read_text() for path in source_files(root)}


def counts_by_room(findings: Iterable[Finding]) -> dict[str, dict[str, int]]:
    """Count findings by room and habit. Rooms and habits without findings are left out."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        counts[finding.room][finding.habit] += 1
    return {room: {habit: n for habit in HABITS if (n := counts[room][habit])} for room in sorted(counts)}


def _selected(sources: dict[str, str], paths: list[str]) -> set[str]:
    """Choose the files under any of the given paths; all of them if no path is given."""
    wanted = [Path(each).resolve() for each in paths] or [ROOT]
    return {path for path in sources if any((ROOT / path).resolve().is_relative_to(each) for each in wanted)}


def main(arguments: list[str]) -> int:
    """Print a table of counts, and with ``-v`` each finding before it."""
    parser = argparse.ArgumentParser(prog="python -m tests.language", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="print each sentence with its file and line")
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="a file or folder (all measured packages, if none is given)"
    )
    given = parser.parse_args(arguments)
    sources = read_sources()
    selected = _selected(sources, given.paths)
    findings = [each for each in survey(sources) if each.path in selected]  # class names are compared with all files
    if given.verbose:
        for each in findings:
            print(f"{each.path}:{each.line}: {each.habit}: {each.text}")
    columns = [*HABITS]
    total = Counter(each.habit for each in findings)
    rows = {**counts_by_room(findings), "all": dict(total)}
    width = max(map(len, rows))
    for number, habit in enumerate(columns):
        print(f"{'':{width}} {'     |' * number}      {habit}")
    for room, counts in rows.items():
        print(f"{room:{width}} " + "".join(f"{counts.get(habit, 0):6d}" for habit in columns))
    n = sum(1 for path in selected for passage in passages(sources[path]) for _ in sentences(passage))
    print(f"{len(selected)} files, {n} sentences")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
