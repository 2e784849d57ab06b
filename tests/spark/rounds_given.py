"""The rows that stages of ``soak_growing.py`` have written, and the plain model of the rows that they may write."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.dataset as datasets


def rows_of(folder: Path) -> pd.DataFrame:
    """Return the rows of all files that a sink has finished."""
    files = [str(path) for path in folder.glob("part-*.parquet")]
    return datasets.dataset(files).to_table().to_pandas() if files else pd.DataFrame()


def wrong_rows(given: pd.DataFrame, rounds: int | None = None) -> str:
    """Compare rows of a stage with the model, which knows nothing of Flux: of each key the rounds from one on, each once.

    Rows with ``n`` are groups, one for each change of a key: its first and last round and their number. Other rows are rounds.
    ``rounds``: the number of all rounds, if the last must be there. Returns the deviation in words; empty: there is none."""
    if given.empty:
        return "" if rounds is None else "no row has come"
    of_key = given.groupby("key")
    if "n" in given:
        last = of_key["last"].max()
        wrong = (given["last"] - given["first"] + 1 != given.n) | (given["first"] != of_key["first"].transform("first"))
        wrong |= given.duplicated(["key", "n"])
        if wrong.any():
            return f"groups that are not those of the rounds from one on, such as {given[wrong].head(3).to_dict('records')}"
    else:
        last = of_key["round"].max()
        expected = last - of_key["round"].min() + 1
        wrong = (of_key["round"].count() != expected) | (of_key["round"].nunique() != expected)
        if wrong.any():
            return f"rounds that are lost or doubled, of keys {wrong[wrong].head(3).index.tolist()}"
        wrong = given.get("before", given["round"]) != given["round"]
        if wrong.any():
            return f"rounds behind lost, doubled or unordered rows, such as {given[wrong].head(3).to_dict('records')}"
    if rounds is not None and (last != rounds - 1).any():
        return f"round {rounds - 1}, the last, is missing of {int((last != rounds - 1).sum())} keys"
    return ""
