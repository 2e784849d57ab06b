"""``python -m tests.transcripts`` prints one transcript or all; ``--write`` renews the files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tests.transcripts.flows import FLOWS

FOLDER = Path(__file__).parent


def made(name: str) -> str:
    flow = FLOWS[name]
    return flow().text(flow.__doc__ or "")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="which; all if none is named")] = None,
    write: Annotated[bool, typer.Option("--write", help="into the files, instead of on the screen")] = False,
) -> None:
    for name in names or FLOWS:
        if write:
            (FOLDER / f"{name}.txt").write_text(made(name))
        else:
            print(made(name))


if __name__ == "__main__":
    typer.run(main)
