"""``make oldest``: tests with the oldest releases that setup.cfg allows, in an environment of their own; about ten minutes."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / ".venv-oldest"
TESTS = (
    "tests/flux",
    "tests/spark/test_every_command.py",
    "tests/spark/test_sinks.py",
    "tests/spark/test_two_queries.py",
)


def oldest() -> list[str]:
    """List the oldest allowed versions in the format of pip's constraints."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    asked = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    found = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(asked), re.MULTILINE)
    return sorted({f"{name}=={version}" for name, version in found})


def main() -> int:
    python = str(ENVIRONMENT / "bin" / "python")
    constraints = ENVIRONMENT / "oldest.txt"
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    constraints.write_text("\n".join(oldest()) + "\n")
    print(constraints.read_text(), flush=True)
    wanted = f"{ROOT}[kafka,test]"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", str(constraints), "-e", wanted], check=True)
    return subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
