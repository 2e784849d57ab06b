"""Check for a Java that Spark can use. It says in one line what to install if there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

JAVA_MIN = 17


def find_java() -> str:
    """Return the path of the java that Spark will start. RuntimeError says in one line what to install."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on PATH and JAVA_HOME is not set"
        raise RuntimeError(f"Spark needs Java {JAVA_MIN} or newer, but {where}. {_advice()}")
    printed = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60).stderr
    match = re.search(r'version "(\d+)', printed)
    if match is None or int(match[1]) < JAVA_MIN:
        found = match[1] if match else printed.strip()[:80]
        raise RuntimeError(f"Spark needs Java {JAVA_MIN} or newer, but {java} is version {found}. {_advice()}")
    return java


def _advice() -> str:
    debian, mac = f"apt-get install openjdk-{JAVA_MIN}-jre-headless", f"brew install openjdk@{JAVA_MIN}"
    return f"Install one (Debian, Ubuntu: {debian}; macOS: {mac})"


if __name__ == "__main__":
    try:
        find_java()
    except RuntimeError as error:
        sys.exit(str(error))
