# SPDX-License-Identifier: Apache-2.0
"""Names of datasets and of their files."""

import os
from pathlib import Path

from .names import is_local
from .text import COMPRESSED


# Name of the dataset that comes with the package
DEMO = "demo"
# Endings of files of rows
JSON_DATA = (".jsonl", ".json", ".ndjson")
TABLES = (".csv", ".tsv")
LINES = ".txt"
PARQUET = ".parquet"
TEXT_DATA = (*JSON_DATA, *TABLES, LINES)


def data_ending(path: Path) -> str:
    """Return the ending of a data file, without that of its compression."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def check_dataset_name(name: str | Path | None) -> None:
    """Raise an error if a dataset is given by a path that does not exist."""
    if name is None or os.path.exists(os.path.expanduser(name)):
        return
    if name != DEMO and str(name).lower() == DEMO:
        raise FileNotFoundError(f"There is no dataset '{name}'. Did you mean `{DEMO}`?")
    is_hub_id = isinstance(name, str) and not is_local(name) and name.count("/") < 2
    if not is_hub_id or data_ending(Path(name)) in (*TEXT_DATA, PARQUET):
        raise FileNotFoundError(f"There is no file or directory '{name}'. Check the path.")
