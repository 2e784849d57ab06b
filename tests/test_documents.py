"""The documents hold together: links lead somewhere, rules have one name each, and named variants exist. So do the files of
the code: each is short, and has a name of its own where names are looked up without folders."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import flux
from benchmarks import figures
from flux.connectors.files.parquet_sink import to_parquet
from flux.connectors.files.source import files as read_files
from flux.connectors.kafka.sink_options import to_kafka
from flux.connectors.kafka.source import kafka
from tests import language
from tests.simulation.known_seeds import OF_VARIANTS

ROOT = Path(__file__).resolve().parent.parent


def _module(path: Path) -> Any:
    """Load a module that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: The part of mkdocs.yml that leads links to the pages of the site.
hooks = _module(ROOT / "docs" / "site" / "hooks.py")
DOCUMENTS = [
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
PACKAGES = ("partitioning", "flux", "controller", "spark_integration", "benchmarks", "tests")
RULES = [*(ROOT / "docs").rglob("*.md")]
MODULES = [path for folder in (*PACKAGES, "examples") for path in (ROOT / folder).rglob("*.py")]
#: A longer file is likely to hold two ideas. The limit is generous, so that it never decides where a function goes.
#: Kernels are exempt: numba compiles many small functions together.
LINES_MAX = 700

_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
_CITATION = re.compile(r"\(design: ([a-z0-9-]+(?:, [a-z0-9-]+)*)[);]")
_FILE = re.compile(
    r"`((?:partitioning|flux|controller|spark_integration|benchmarks|tests|examples|docs)/[\w/]*(?:\.\w+)?)`"
)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: A README is read in five minutes, a list of changes in three; the pages under docs have the rest.
README_WORDS_MAX = 1300
CHANGES_MAX = 40
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_VARIANTS = re.compile(r"\*Variants?[^*]*:\*([^*]*?\.)(?:\s|$)")


def anchors(text: str) -> list[str]:
    """Explicit anchors, and those that hosts of Markdown give to headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in _HEADING.findall(text))
    return [*_ANCHOR.findall(text), *headings]


def dead_links(text: str, folder: Path, own: Path | None = None) -> Iterator[str]:
    """Relative links of a document in ``folder`` that lead nowhere."""
    for link in _LINK.findall(_CODE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, fragment = link.partition("#")
        target = folder / name if name else own
        where = (
            anchors(text if target is None else target.read_text())
            if fragment and (target is None or target.is_file())
            else []
        )
        if (target is not None and not target.exists()) or (fragment and fragment not in where):
            yield link


def test_every_relative_link_leads_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)}: {link}" for path in DOCUMENTS for link in dead_links(path.read_text(), path.parent)
    ]
    assert len(DOCUMENTS) > 5
    assert not dead, "\n".join(dead)


def test_a_link_to_nothing_is_found() -> None:
    text = "# A title\n[a](nowhere.md) [b](README.md) [c](README.md#no-such-part) [d](#a-title) `[e](code.md)`"
    assert list(dead_links(text, ROOT)) == ["nowhere.md", "README.md#no-such-part"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS_MAX


def test_the_newest_changes_are_a_short_list() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert 0 < len(re.findall(r"^- ", newest, re.MULTILINE)) <= CHANGES_MAX


def test_each_benchmark_has_one_table_that_names_command_and_commit() -> None:
    _, *sections = re.split(r"^## ", (ROOT / "benchmarks" / "README.md").read_text(), flags=re.MULTILINE)
    assert len(sections) > 10
    for section in sections:
        heads = re.findall(r"^(\|.*\|)\n\|[-|]+\|$", section, re.MULTILINE)
        assert [head.endswith(" commit |") for head in heads] == [True], section
        assert re.search(r"`(flux bench|pytest benchmarks/)", section), section
        rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]
        assert all(re.search(r"\| [0-9a-f]{7} \|$", row) for row in rows), section


def test_the_readme_links_to_every_page_for_users() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall((ROOT / "README.md").read_text())}
    missing = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - linked
    assert not missing, "README.md, documents, has a link to each page for users"


def test_every_example_in_python_can_be_compiled() -> None:
    examples = [(path, code) for path in DOCUMENTS for code in _EXAMPLE.findall(path.read_text())]
    assert len(examples) > 25
    for path, code in examples:
        compile(code, str(path.relative_to(ROOT)), "exec", ast.PyCF_ONLY_AST)


def test_the_site_has_every_page() -> None:
    named = re.findall(r"^ *- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    outside = {page for source, page in hooks.PAGES.items() if (ROOT / source).exists()}
    assert sorted(named) == sorted({*pages, *outside}), "mkdocs.yml names each page once, under nav"
    assert {path for path in DOCUMENTS if not path.is_relative_to(ROOT / "docs")} == {
        ROOT / source for source in hooks.PAGES if (ROOT / source).exists()
    }


def test_links_lead_to_the_pages_of_the_site() -> None:
    text = (
        "[a](docs/sinks.md#files) ![b](docs/images/c.svg) [e](ARCHITECTURE.md) [f](tests/run.py) [g](#here) `[h](x.md)`"
    )
    led = "[a](sinks.md#files) ![b](images/c.svg) [e](architecture.md) f [g](#here) `[h](x.md)`"
    assert hooks.linked(text, "README.md", "index.md") == led
    text = "[a](../../README.md) [b](code.md#laws) [c](../security.md) [d](../../tests/transcripts/move.txt)"
    led = "[a](../index.md) [b](code.md#laws) [c](../security.md) [d](../transcripts/move.txt)"
    assert hooks.linked(text, "docs/design/moves.md", "design/moves.md") == led


def test_lists_of_the_site_begin_behind_an_empty_line() -> None:
    text = "Text:\n- one\n  more\n- two\n\n```\ntext\n- code\n```\n1. first\n2. second"
    assert hooks.spaced(text) == "Text:\n\n- one\n  more\n- two\n\n```\ntext\n- code\n```\n\n1. first\n2. second"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert len(named) == len(set(named))
    found = [pkgutil.resolve_name(name) for name in named]
    public = {name: getattr(flux, name) for name in flux.__all__ if name != "testing"}
    assert [name for name, value in public.items() if not any(value is each for each in found)] == []


def test_editors_and_the_reference_see_every_public_name() -> None:
    """Editors do not run ``flux.__getattr__``, which loads most names when they are used."""
    tree = ast.parse((ROOT / "flux" / "__init__.py").read_text())
    imported = {(each.asname or each.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)
                for each in node.names}  # fmt: skip
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(flux.__all__) - imported - defined == set()


def test_the_picture_of_the_readme_shows_its_table() -> None:
    assert figures.draw(figures.table(figures.README.read_text())) == figures.PICTURE.read_text(), (
        "python -m benchmarks.figures draws it anew"
    )


def test_every_rule_has_a_name_of_its_own() -> None:
    named = Counter(name for path in RULES for name in _ANCHOR.findall(path.read_text()))
    assert len(named) > 50
    assert [name for name, times in named.items() if times > 1] == []


def test_every_variant_that_a_rule_names_exists() -> None:
    code = "".join(path.read_text() for path in (ROOT / "tests" / "simulation").glob("*.py"))
    named = {
        name
        for path in RULES
        for listed in _VARIANTS.findall(path.read_text())
        for name in re.findall(r"`(\w+)`", listed)
    }
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in code} == set()


def test_every_file_that_a_document_names_exists() -> None:
    """CHANGELOG.md is left out: it also names files of earlier releases."""
    kept = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    named = {(path, name) for path in kept for name in _FILE.findall(path.read_text())}
    assert len(named) > 60
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_class_and_file_that_a_page_for_contributors_names_exists() -> None:
    """Pages give bare names, such as ``Sweep`` and ``sweep.py``. Some classes are pyspark's."""
    code = "\n".join(path.read_text() for path in MODULES)
    known = {*re.findall(r"^ *class (\w+)|^(\w+) = NewType\(", code, re.MULTILINE)}
    classes = {name for pair in known for name in pair} | {"None", "StreamingQuery"}
    files = {path.name for path in MODULES}
    for path in [ROOT / "ARCHITECTURE.md", ROOT / "docs" / "glossary.md", *(ROOT / "docs" / "design").glob("*.md")]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        assert set(re.findall(r"`([A-Z][a-z]\w+)[.`(]", text)) - classes == set(), path.name
        assert set(re.findall(r"`(\w+\.py)`", text)) - files == set(), path.name


def test_every_test_that_a_document_names_exists() -> None:
    """Documents name a test like ``tests/kafka/test_sink.py::test_null_values_are_tombstones``."""
    named = {(path, *pair) for path in RULES for pair in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text())}
    assert len(named) > 25
    missing = [each for each in named if f"def {each[2]}(" not in (ROOT / each[1]).read_text()]
    assert [f"{path.relative_to(ROOT)}: {file}::{name}" for path, file, name in sorted(missing)] == []


def test_the_table_of_rooms_names_every_package() -> None:
    rows = re.findall(r"^\| `([\w/]+)/` \| .* \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    folders = {path.parent for package in PACKAGES if package != "tests" for path in (ROOT / package).rglob("*.py")}
    assert {ROOT / folder for folder in rows} == folders


def test_the_docstring_of_each_package_lists_its_modules() -> None:
    for package in PACKAGES:
        for init in (ROOT / package).rglob("__init__.py") if package != "tests" else ():
            found = {path.stem for path in init.parent.glob("*.py") if not path.stem.startswith(("_", "test_"))}
            listed = re.findall(r"^(\w+)(?=  )", ast.get_docstring(ast.parse(init.read_text())) or "", re.MULTILINE)
            assert sorted(listed) == sorted(found), init.relative_to(ROOT)


def test_every_module_but_the_kernels_is_short_enough_for_one_idea() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert len(lengths) > 300
    kernels = {f"{folder}/kernels.py" for folder in ("partitioning", "flux/connectors/kafka/records")}
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LINES_MAX}
    assert set(long) <= kernels, long


#: Lines of code of a function, without docstring and comments; constructors, which list the fields of a machine, may have more.
FUNCTION_MAX, CONSTRUCTOR_MAX = 60, 70
#: Methods of a class that others may call. Classes with more, and files of rooms with more, may only lose some.
METHODS_MAX, ROOM_MAX = 30, 14
LARGE_CLASSES: dict[str, int] = {}
IMPORTS_MAX = 15
WIRING = {
    "controller/decide/controller.py",
    "controller/decide/losses.py",
    "controller/operate/cli/bench.py",  # one import for each benchmark
    "controller/operate/request_handler.py",
    "controller/planning/compiler.py",
    "controller/server.py",
    "flux/__init__.py",
    "flux/connectors/kafka/sink_options.py",
    "flux/connectors/kafka/source.py",
    "flux/dataflow/flow.py",
    "flux/replica/replica.py",
    "flux/shadows/shadow_hosts.py",
    "flux/shell/worker_loop.py",
    "flux/worker/core.py",
    "flux/worker/replica_lifecycle.py",
    "flux/worker/source_scheduler.py",
    "flux/worker/subscriptions.py",
    "spark_integration/query/query.py",
    "spark_integration/query/run.py",
    "spark_integration/query/start.py",
    "spark_integration/service/stream_service.py",
}
LARGE_ROOMS: dict[str, int] = {}


@cache
def product() -> list[tuple[Path, str, ast.Module]]:
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py") if package not in ("tests", "benchmarks") else ():
            text = path.read_text()
            found.append((path, text, language.parsed(text)))
    return found


def test_functions_and_classes_are_short() -> None:
    long, large = [], {}
    for path, text, module in product():
        lines = text.splitlines()
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and path.stem != "kernels":
                first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
                body = [line.strip() for line in lines[first.lineno - 1 : node.end_lineno]]
                code = sum(bool(line) and not line.startswith("#") for line in body)
                if code > (CONSTRUCTOR_MAX if node.name == "__init__" else FUNCTION_MAX):
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {code} lines")
            elif isinstance(node, ast.ClassDef):
                public = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                count = sum(not name.startswith("_") for name in public)
                if count > METHODS_MAX:
                    large[node.name] = count
    assert not long, long
    assert large == LARGE_CLASSES, "a class of at most 30 public methods; lower the number here when one loses some"


def project_imports(of: Iterable[ast.AST]) -> set[str]:
    """Return the modules of the project that these statements import."""
    found = set()
    for node in of:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for name in node.names:
                inner = ROOT / node.module.replace(".", "/") / f"{name.name}.py"
                found.add(f"{node.module}.{name.name}" if inner.exists() else node.module)
    return found


def test_modules_import_in_no_circle() -> None:
    """Imports inside functions, and imports for type checkers alone, do not count."""
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): project_imports(module.body)
        for path, _, module in product()
    }
    list(TopologicalSorter({name: found - {name} for name, found in graph.items()}).static_order())


def test_modules_know_few_others() -> None:
    """Only modules that put many parts together (``WIRING``) import more."""
    imports = {str(path.relative_to(ROOT)): project_imports(ast.walk(module)) for path, _, module in product()}
    assert {path for path, found in imports.items() if len(found) > IMPORTS_MAX} <= WIRING


def test_rooms_have_few_files() -> None:
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path, _, _ in product())
    assert {room: files for room, files in rooms.items() if files > ROOM_MAX} == LARGE_ROOMS


def test_every_module_of_tests_that_is_in_no_package_has_a_name_of_its_own() -> None:
    """Otherwise tests of two folders could not run together, and executors find helpers by name."""
    folders = {path.parent for path in MODULES if path.is_relative_to(ROOT / "tests")}
    loose = [folder for folder in folders if not (folder / "__init__.py").exists()]
    assert len(loose) > 5
    times = Counter(path.name for path in MODULES if path.parent in loose)
    assert [name for name, found in times.items() if found > 1] == []


def cited(text: str) -> list[str]:
    """List the rules that a module cites, as in ``(design: release-rule, commit)``."""
    return [name for names in _CITATION.findall(text) for name in names.split(", ")]


def test_every_cited_rule_exists() -> None:
    rules = {name for path in RULES for name in _ANCHOR.findall(path.read_text())}
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != Path(__file__)]
    found = [(str(path.relative_to(ROOT)), name) for path in modules for name in cited(path.read_text())]
    assert len(found) > 60
    assert [(path, name) for path, name in found if name not in rules] == []


def test_a_citation_is_read_whole() -> None:
    assert cited("Waits (design: copy, no-such-rule). (design: pulse)") == ["copy", "no-such-rule", "pulse"]


def test_the_first_hour_breaks_a_law_with_a_seed_that_shows_it() -> None:
    """Seeds of a variant are renewed when they no longer show it; the seed of the page is to be renewed with them."""
    first_hour = (ROOT / "CONTRIBUTING.md").read_text().split("See a law break")[1].split("Understand it")[0]
    shown = {int(seed) for seed in re.findall(r"SEED=(\d+)", first_hour)}
    assert shown
    assert shown <= set(OF_VARIANTS["sends_before_it_is_committed"])
    (replaced,) = re.findall(r"`(producer\.release_from = \w+)`", first_hour)
    assert (ROOT / "flux" / "replica" / "release.py").read_text().count(replaced) == 2


def test_every_run_of_a_variant_that_a_document_names_shows_it() -> None:
    """Seeds in the file of variants are renewed when they no longer show a variant, so documents may name only those."""
    runs = [run for path in DOCUMENTS for run in re.findall(r"make sim SEED=(\d+) VARIANT=(\w+)", path.read_text())]
    assert runs
    for seed, name in runs:
        assert int(seed) in OF_VARIANTS[name], name


@pytest.mark.parametrize(
    ("name", "function", "page"),
    [
        ("flux.files", read_files, "docs/files.md"),
        ("to_parquet", to_parquet, "docs/files.md"),
        ("flux.kafka", kafka, "docs/kafka.md"),
        ("to_kafka", to_kafka, "docs/kafka.md"),
    ],
)
def test_a_table_of_arguments_has_each_with_its_default(name: str, function: Any, page: str) -> None:
    text = (ROOT / page).read_text()
    table = text[text.index(f"| `{name}` | default | |") :].split("\n\n")[0]
    told = {found[1]: found[2] for found in re.finditer(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", table, re.MULTILINE)}
    parameters = inspect.signature(function).parameters.values()
    named = {
        each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "flow"
    }
    assert list(told) == list(named)
    for each, default in named.items():
        assert (ast.literal_eval(told[each]) if told[each] else inspect.Parameter.empty) == default, each


def test_every_member_of_a_class_that_a_document_names_exists() -> None:
    """Documents name a member like ``Producer.on_table``. CHANGELOG.md is left out: it also names members of earlier releases."""
    code = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    bodies: dict[str, str] = {}
    for name, body in re.findall(r"^class (\w+)(.*?)(?=^\S|\Z)", code, re.MULTILINE | re.DOTALL):
        bodies[name] = bodies.get(name, "") + body
    kept = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    named = {(path, *pair) for path in kept for pair in re.findall(r"`([A-Z]\w+)\.(\w+)", path.read_text())}
    found = [(path, name, member) for path, name, member in named if name in bodies]
    assert len(found) > 30
    missing = [pair for pair in found if not re.search(rf"\b{pair[2]}\b", bodies[pair[1]])]
    assert [f"{path.relative_to(ROOT)}: {name}.{member}" for path, name, member in missing] == []


_QUOTED = re.compile(r"``([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?``")
#: Names that the text of the product quotes although no identifier of the product is meant: those of other systems, methods that
#: a variable ``flow`` has, a file, and words of Python and Spark.
NOT_OURS = {
    "DataStreamWriter",
    "DataStreamWriter.trigger",
    "Output.get",
    "Py_TPFLAGS_IMMUTABLETYPE",
    "SparkContext.getConf",
    "StreamingQueryProgress",
    "continuous",
    "flow.foreach_batch",
    "flow.to_parquet",
    "flow.writeStream",
    "flux.json",
    "nonlocal",
    "os.fsdecode",
    "pyarrow.fs",
    "pyarrow.fs.FileSystem.from_uri",
    "pyspark.sql.datasource.DataSource",
    "readStream",
    "realTime",
    "repair.atOnce",
    "return",
    "rollBytes",
    "yield",
}


def _texts(tree: ast.Module, source: str) -> Iterator[str]:
    """Yield the docstrings and the comments of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    yield from (comment.text for comment in language.comments(source))


def _identifiers(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines or uses, and the short texts in it, as they may be names of settings."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ImportFrom(module=str(module)):
                yield from module.split(".")
            case ast.Constant(value=str(text)) if len(text) < 40:
                yield from re.findall(r"\w+", text)
            case ast.alias(name=name):
                yield from name.split(".")


def quoted_nowhere(files: Iterable[tuple[Path, str, ast.Module]]) -> list[str]:
    """Return the names in double backticks that no file has: each part must be an identifier, or a module, and the part behind
    the name of a module must be in that module."""
    files = list(files)
    own = {path: {*_identifiers(tree)} for path, _, tree in files}
    modules: dict[str, set[str]] = {}
    for path, names in own.items():
        inner = {
            each for other in own if path.stem == "__init__" and path.parent in other.parents for each in other.parts
        }
        stem = path.parent.name if path.stem == "__init__" else path.stem
        modules.setdefault(stem, set()).update(names, (each.removesuffix(".py") for each in inner))
    known = {*modules, *(name for names in own.values() for name in names)}
    found = []
    for path, source, tree in files:
        for name in (each for text in _texts(tree, source) for each in _QUOTED.findall(text)):
            parts = name.split(".")
            if name in NOT_OURS or parts[0] == "spark":  # settings: other tests compare them
                continue
            lost = any(part not in known for part in parts) or any(
                part not in modules[before] for before, part in itertools.pairwise(parts) if before in modules
            )
            if lost:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return sorted({*found})


def test_every_name_that_the_text_of_the_product_quotes_exists() -> None:
    assert list(quoted_nowhere(product())) == []


def test_a_quoted_name_that_is_nowhere_is_found() -> None:
    text = '''"""Calls ``here``, ``table.Table``, ``table.here`` and ``gone``."""
from partitioning import table  # see ``spark.flux.x``, ``went()``, ``a + b``
def here() -> None: ...'''
    files = {ROOT / "flux" / "a.py": text, ROOT / "partitioning" / "table.py": "class Table: ..."}
    found = quoted_nowhere((path, source, ast.parse(source)) for path, source in files.items())
    assert found == ["flux/a.py: gone", "flux/a.py: table.here", "flux/a.py: went"]
