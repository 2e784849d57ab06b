"""The first query after an installation: if the driver shares its files with the workers, it compiles the kernels once.

Otherwise all workers compile the same at once, and on a small machine that takes longer than they may take to join.
"""

from __future__ import annotations

import logging

from flux.shell import pulse
from partitioning.warm_up import is_warm, warm_up

log = logging.getLogger("flux")


def compile_once() -> None:
    """Compile the kernels. Returns at once if the disk cache has them."""
    if not is_warm():
        log.warning("first start after an installation: compiling the kernels, which takes up to a minute")
        warm_up()
        pulse.warm_up()
