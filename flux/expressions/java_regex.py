"""Regular expressions of Java, translated.

Two engines compute them. RE2, inside Arrow, takes columns whole, but has no lookaround, no references back and no
possessive quantifiers, and sees line ends and case otherwise; Python's ``re`` has nearly all of Java, and is called
once for each different value. A pattern says for which values RE2 gives the answers of Java: for all, for those
without line terminators, or for those in ASCII. The rest goes to ``re``.

A construct of Java that neither has is refused by its name when the expression is made.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from dataclasses import dataclass, field
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flux.errors import UsageError

#: Line terminators of Java, which ``.`` does not match.
TERMINATORS = "\n\r\x85\u2028\u2029"
_RE2_TERMINATORS = r"\n\r\x{85}\x{2028}\x{2029}"
_END = r"(?=(?:\r\n|(?<!\r)\n|[\r\x85\u2028\u2029])?\Z)"
_POSIX = {
    "Lower": "a-z",
    "Upper": "A-Z",
    "ASCII": r"\x00-\x7f",
    "Alpha": "a-zA-Z",
    "Digit": "0-9",
    "Alnum": "a-zA-Z0-9",
    "Punct": r"!-/:-@\[-`{-~",
    "Graph": "!-~",
    "Print": " -~",
    "Blank": r" \t",
    "Cntrl": r"\x00-\x1f\x7f",
    "XDigit": "0-9a-fA-F",
    "Space": r" \t\n\x0b\f\r",
}
_SPACE = r" \t\n\x0b\f\r"
_NOT_SPACE = r"\x00-\x08\x0e-\x1f!-\U0010ffff"
#: Letters, digits and the marks on them, with the flag u.
_WORD = r"\w\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20f0\ufe00-\ufe0f\ufe20-\ufe2f"
_SIMPLE = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "a": "\x07", "e": "\x1b"}
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")


@dataclass(frozen=True)
class JavaPattern:
    """A pattern in both forms. ``re2`` is None where only ``python`` has its constructs."""

    text: str
    python: re.Pattern[str]
    re2: str | None
    #: RE2 gives the answers of Java only for values without line terminators.
    terminators_matter: bool
    #: RE2 gives the answers of Java only for values in ASCII.
    ascii_only: bool
    #: The pattern matches empty text somewhere.
    empty: bool
    #: The text without any special meaning that the pattern stands for; None: it has a special meaning.
    literal: str | None

    @property
    def groups(self) -> int:
        return self.python.groups

    def odd(self, values: pa.Array) -> Any:
        """Return a boolean array of the values that ``re`` has to take; None: there are none."""
        found = None
        if self.terminators_matter:
            found = pc.match_substring_regex(values, f"[{_RE2_TERMINATORS}]")
        if self.ascii_only:
            foreign = pc.invert(pc.string_is_ascii(values))
            found = foreign if found is None else pc.or_(found, foreign)
        if found is None:
            return None
        found = pc.fill_null(found, False)
        return found if pc.any(found).as_py() else None


@functools.lru_cache(maxsize=512)
def translated(text: str) -> JavaPattern:
    """Return the pattern. UsageError names what Java has and this does not, and what no engine can read."""
    reader = _Reader(text)
    reader.read()
    python = "".join(reader.python)
    try:
        compiled = re.compile(python, re.ASCII | (re.IGNORECASE if reader.ignore_case else 0))
    except (re.error, RecursionError, OverflowError) as error:
        raise _refused(text, f"it cannot be read: {error}") from error
    parsed = parser.parse(python, re.ASCII)
    re2 = ("(?i)" if reader.ignore_case else "") + "".join(reader.re2)
    usable = not reader.python_only and not _repeats_emptiness(parsed) and _re2_reads(re2)
    return JavaPattern(
        text,
        compiled,
        re2 if usable else None,
        reader.terminators_matter,
        reader.ascii_only or reader.ignore_case,
        parsed.getwidth()[0] == 0,
        "".join(reader.literal) if reader.literal is not None and not reader.ignore_case else None,
    )


def _re2_reads(pattern: str) -> bool:
    try:
        pc.match_substring_regex(pa.array(["x"]), pattern)
    except (pa.ArrowException, ValueError):
        return False
    return True


def _repeats_emptiness(parsed: Any) -> bool:
    """Tell whether a repeated part may be empty: groups inside may then keep other text in RE2."""
    for operation, argument in parsed:
        if operation in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            _, high, body = argument
            if (high > 1 and body.getwidth()[0] == 0) or _repeats_emptiness(body):
                return True
        elif operation is constants.SUBPATTERN:
            if _repeats_emptiness(argument[3]):
                return True
        elif operation is constants.BRANCH and any(_repeats_emptiness(each) for each in argument[1]):
            return True
    return False


def _refused(text: str, reason: str) -> UsageError:
    return UsageError(
        f"the regular expression {text!r} cannot be computed where rows are read: {reason}. "
        "Write it without that, or compute the column before the rows come to Flux"
    )


def _literal(character: str) -> tuple[str, str]:
    """Return a character without special meaning in both forms."""
    if character.isalnum() or character in "_ \"'<>,;:!@#%=`/":
        return character, character
    if ord(character) < 0x80 and character.isprintable():
        return f"\\{character}", f"\\{character}"
    return f"\\U{ord(character):08x}", f"\\x{{{ord(character):x}}}"


@functools.cache
def _categories() -> np.ndarray[Any, Any]:
    """Return the general category of each character, by its code point."""
    return np.array(list(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))))


@functools.cache
def _category(name: str) -> str:
    """Return the ranges of a general category of Unicode, such as L or Lu."""
    inside = np.char.startswith(_categories(), name).astype(np.int8)
    edges = np.flatnonzero(np.diff(inside, prepend=0, append=0))
    return "".join(f"\\U{low:08x}-\\U{high - 1:08x}" for low, high in edges.reshape(-1, 2).tolist())


def _for_re2(ranges: str) -> str:
    return re.sub(r"\\U([0-9a-f]{8})", lambda found: f"\\x{{{int(found[1], 16):x}}}", ranges)


@dataclass
class _Reader:
    """One pass over a pattern, which writes both forms."""

    text: str
    at: int = 0
    python: list[str] = field(default_factory=list)
    re2: list[str] = field(default_factory=list)
    literal: list[str] | None = field(default_factory=list)
    python_only: bool = False
    terminators_matter: bool = False
    ascii_only: bool = False
    ignore_case: bool = False
    dot_all: bool = False

    def read(self) -> None:
        self._flags()
        while self.at < len(self.text):
            character = self._next()
            if character == "\\":
                self._escape()
            elif character == "[":
                self._class()
            elif character == "(":
                self._group()
            elif character == ".":
                self._dot()
            elif character == "$":
                self._end()
            elif character in "^|)":
                self._write(character)
            elif character in "*+?{":
                self._quantifier(character)
            else:
                self._plain(character)

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise _refused(self.text, "it ends in the middle of a construct")
        self.at += 1
        return self.text[self.at - 1]

    def _peek(self, start: str) -> bool:
        return self.text.startswith(start, self.at)

    def _write(self, python: str, re2: str | None = None) -> None:
        self.python.append(python)
        self.re2.append(python if re2 is None else re2)
        self.literal = None

    def _plain(self, character: str) -> None:
        python, re2 = _literal(character)
        self.python.append(python)
        self.re2.append(re2)
        if self.literal is not None:
            self.literal.append(character)

    def _flags(self) -> None:
        found = re.match(r"\(\?([a-zA-Z]+)\)", self.text)
        if found:
            for flag in found[1]:
                if flag not in "is":
                    raise _refused(self.text, f"the flag {flag} is not supported, only i and s")
            self.ignore_case, self.dot_all = "i" in found[1], "s" in found[1]
            self.at = found.end()
            self.literal = None
            if self.ignore_case and not self.text.isascii():
                self.python_only = True  # RE2 folds the case of all letters, Java of ASCII alone

    def _dot(self) -> None:
        if self.dot_all:
            self._write("(?s:.)")
        else:
            self._write(f"[^{TERMINATORS}]", f"[^{_RE2_TERMINATORS}]")

    def _end(self) -> None:
        self.terminators_matter = True
        self._write(_END, r"\z")

    def _quantifier(self, first: str) -> None:
        found = _QUANTIFIER.match(self.text, self.at - 1)
        if found is None:
            raise _refused(self.text, f"there is a {first} that repeats nothing; write \\{first} for the character")
        self.at = found.end()
        mode = self._next() if self.text[self.at : self.at + 1] in ("?", "+") else ""
        if mode == "+":
            self.python_only = True
        self._write(found[0] + mode)

    def _group(self) -> None:
        if not self._peek("?"):
            self._write("(")
            return
        for start in ("?=", "?!", "?<=", "?<!", "?>"):
            if self._peek(start):
                self.at += len(start)
                self.python_only = True
                self._write(f"({start}")
                return
        named = re.compile(r"\?<([a-zA-Z][a-zA-Z0-9]*)>").match(self.text, self.at)
        if named:
            self.at = named.end()
            self._write(f"(?P<{named[1]}>")
        elif self._peek("?:"):
            self.at += 2
            self._write("(?:")
        else:
            raise _refused(self.text, "flags are supported at its beginning only, as in (?i)")

    def _escape(self) -> None:
        character = self._next()
        if character in "dDwW":
            self._write(f"\\{character}")
        elif character == "s":
            self._write(f"[{_SPACE}]")
        elif character == "S":
            self._write(f"[^{_SPACE}]")
        elif character in "bB":
            self._boundary(character)
        elif character == "A":
            self._write("^")
        elif character == "z":
            self._write(r"\Z", r"\z")
        elif character == "Z":
            self._end()
        elif character == "Q":
            end = self.text.find("\\E", self.at)
            for each in self.text[self.at : end if end >= 0 else None]:
                self._plain(each)
            self.at = end + 2 if end >= 0 else len(self.text)
        elif character in "pP":
            ranges = self._property()
            self._write(
                f"[{'^' if character == 'P' else ''}{ranges}]", f"[{'^' if character == 'P' else ''}{_for_re2(ranges)}]"
            )
        elif character in "123456789":
            self.python_only = True
            self._write(f"(?:\\{character})")
        elif character == "k":
            name = re.compile(r"<([a-zA-Z][a-zA-Z0-9]*)>").match(self.text, self.at)
            if name is None:
                raise _refused(self.text, "\\k needs the name of a group, as in \\k<name>")
            self.at, self.python_only = name.end(), True
            self._write(f"(?P={name[1]})")
        else:
            self._plain(self._code(character))

    def _boundary(self, character: str) -> None:
        # In RE2 letters are those of ASCII. In Java they are all there are, with the marks on them.
        self.ascii_only = True
        inside, outside = f"(?u:(?<=[{_WORD}])(?=[{_WORD}]))", f"(?u:(?<![{_WORD}])(?![{_WORD}]))"
        edge = f"(?u:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))"
        self._write(edge if character == "b" else f"(?:{inside}|{outside})", f"\\{character}")

    def _code(self, character: str) -> str:
        """Return the character that an escape stands for."""
        if character in _SIMPLE:
            return _SIMPLE[character]
        for start, form in (("x", r"([0-9a-fA-F]{2})|\{([0-9a-fA-F]+)\}"), ("u", r"([0-9a-fA-F]{4})")):
            if character == start:
                found = re.compile(form).match(self.text, self.at)
                if found is None:
                    raise _refused(self.text, f"\\{start} needs hexadecimal digits")
                self.at = found.end()
                code = int(found[found.lastindex or 1], 16)
                if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
                    raise _refused(self.text, f"there is no character {code:x}")
                return chr(code)
        if character == "0":
            found = re.compile(r"[0-3]?[0-7]{1,2}").match(self.text, self.at)
            if found is None:
                raise _refused(self.text, "\\0 needs octal digits")
            self.at = found.end()
            return chr(int(found[0], 8))
        if character.isascii() and character.isalnum():
            raise _refused(self.text, f"\\{character} is not supported")
        return character

    def _property(self) -> str:
        name = self._next()
        if name == "{":
            end = self.text.find("}", self.at)
            name, self.at = self.text[self.at : end], end + 1
        if name in _POSIX:
            return _POSIX[name]
        short = name.removeprefix("Is")
        if short in ("C", "L", "M", "N", "P", "S", "Z") or re.fullmatch(
            "L[ultmo]|M[nce]|N[dlo]|P[cdseifo]|S[mcko]|Z[slp]", short
        ):
            return _category(short)
        raise _refused(self.text, f"the class \\p{{{name}}} is not supported")

    def _class(self) -> None:
        python, re2 = ["["], ["["]
        if self._peek("^"):
            self.at += 1
            python.append("^")
            re2.append("^")
        first = True
        while True:
            character = self._next()
            if character == "]":
                if first:
                    raise _refused(self.text, "a class begins with ]; write \\]")
                break
            if character == "[" or (character == "&" and self._peek("&")):
                raise _refused(self.text, "unions and intersections of classes are not supported")
            first = False
            for form, part in zip((python, re2), self._member(character), strict=True):
                form.append(part)
        self._write("".join([*python, "]"]), "".join([*re2, "]"]))

    def _member(self, character: str) -> tuple[str, str]:
        """Return one member of a class in both forms: a character, a range or a class."""
        if character == "\\":
            escaped = self._next()
            if escaped in "dDwW":
                return f"\\{escaped}", f"\\{escaped}"
            if escaped in "sS":
                ranges = _SPACE if escaped == "s" else _NOT_SPACE
                return ranges, _for_re2(ranges)
            if escaped == "p":
                ranges = self._property()
                return ranges, _for_re2(ranges)
            if escaped in "PbBAzZQEk" or escaped in "123456789":
                raise _refused(self.text, f"\\{escaped} inside of a class is not supported")
            character = self._code(escaped)
        elif character == "-" and not (self._peek("]") or self.text[self.at - 2] in "[^"):
            raise _refused(self.text, "a - inside of a class is neither first nor last; write \\-")
        python, re2 = _literal(character)
        if self._peek("-") and not self._peek("-]") and not self._peek("-["):
            self.at += 1
            last = self._next()
            last = self._code(self._next()) if last == "\\" else last
            if last < character:
                raise _refused(self.text, f"the range {character}-{last} is empty")
            high = _literal(last)
            return f"{python}-{high[0]}", f"{re2}-{high[1]}"
        return python, re2
