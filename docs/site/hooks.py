"""Pages of the site that stand elsewhere in the repository, and the links from and to them (hooks of mkdocs).

A document links to others as they stand in the repository, so that its links work wherever it is read. The site has the documents
in other places: links are led there. A link to a file that is no document has no place on the site and becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Documents outside docs, by their path in the repository, and their pages.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/notes.md": "benchmark-notes.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
#: The first line of an item of a list, and a line of a paragraph outside lists.
_ITEM = re.compile(r"(-|\d+\.) ")
_PARAGRAPH = re.compile(r"(?!(-|\d+\.) )\S")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`(?!\]\())", re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents outside docs, and the transcripts."""
    from mkdocs.structure.files import File  # inside: the tests of the links need no mkdocs

    for source, page in {**PAGES, **_transcripts()}.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def _transcripts() -> dict[str, str]:
    return {
        f"tests/transcripts/{path.name}": f"transcripts/{path.name}"
        for path in (ROOT / "tests/transcripts").glob("*.txt")
    }


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a document to the pages of the site."""
    own = page.file.src_uri
    source = {to: at for at, to in PAGES.items()}.get(own, f"docs/{own}")
    return spaced(linked(markdown, source, own))


def linked(markdown: str, source: str, own: str) -> str:
    """Return the text of the document ``source`` with its links as its page ``own`` has them."""
    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(lambda found: led(found, source, own), part) for part in parts[::2]]
    return "".join(parts)


def spaced(markdown: str) -> str:
    """Return a text with an empty line before each list. Most readers of Markdown need none, Python-Markdown does."""
    lines: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        in_code ^= line.startswith("```")
        if not in_code and _ITEM.match(line) and lines and _PARAGRAPH.match(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def led(found: re.Match[str], source: str, own: str) -> str:
    """Return a link of the document ``source`` as its page ``own`` has it."""
    mark, text, link = found.groups()
    name, _, fragment = link.partition("#")
    if not name or "://" in link or link.startswith("mailto:"):
        return found[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    if target in (places := {**PAGES, **_transcripts()}):
        target = places[target]
    elif target.startswith("docs/"):
        target = target.removeprefix("docs/")
        target = f"{target}/README.md" if (ROOT / "docs" / target).is_dir() else target
    else:
        return text
    there = posixpath.relpath(target, posixpath.dirname(own) or ".")
    return f"{mark}[{text}]({there}{'#' if fragment else ''}{fragment})"
