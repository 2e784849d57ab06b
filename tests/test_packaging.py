"""An installation by ``pip install .`` is whole, and starts without the modules that it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import Distribution

import flux

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("partitioning", "flux", "controller", "spark_integration", "benchmarks")
#: Each of these takes longer to load than a command that only prints something.
HEAVY = ("pyspark", "numba", "pyarrow", "numpy", "pandas", "zmq", "flux.expressions.steps")

LOADED = f"import json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
HELP = f"""
import sys
from controller.operate.cli import app
try:
    app(["--help"])
except SystemExit as end:
    assert not end.code
{LOADED}
"""


def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """List the files of the wheel, as setuptools finds them; nothing is built."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files(["setup.cfg"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    return {str(Path(path).relative_to(build.build_lib)) for path in build.get_outputs(include_bytecode=False)}


def test_the_wheel_has_every_module_that_is_here_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert len(here) > 100
    assert {path for path in installed(monkeypatch) if path.endswith(".py")} == here


def test_the_wheel_says_that_its_packages_have_types(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = {path for path in installed(monkeypatch) if path.endswith("py.typed")}
    assert typed == {f"{package}/py.typed" for package in PACKAGES if package != "benchmarks"}


def loaded(code: str) -> list[str]:
    """List the heavy packages that a new process has loaded after this program."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_importing_flux_loads_nothing_heavy() -> None:
    assert loaded(f"import flux, sys; {LOADED}") == []


def test_the_help_of_the_command_loads_nothing_heavy() -> None:
    assert loaded(HELP) == []


def test_a_worker_loads_no_kernels_of_expressions_before_a_plan_has_some() -> None:
    """While a worker in place of a lost one begins, the others catch up, and its start takes processor time from them."""
    assert {"pandas", "flux.expressions.steps"}.isdisjoint(
        loaded(f"import flux.worker.core, flux.dataflow.flow, sys; {LOADED}")
    )


def test_what_is_loaded_is_seen() -> None:
    assert "pyarrow" in loaded(f"import flux, sys; flux.stage; {LOADED}")


def test_every_public_name_is_there() -> None:
    assert all(getattr(flux, name) is not None for name in flux.__all__)
    assert set(flux.__all__) <= set(dir(flux))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flux.nothing  # noqa: B018
