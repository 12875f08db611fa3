# SPDX-License-Identifier: Apache-2.0
"""
Convert ranking instances to tasks of a Label Studio project, and read the rankings made there.

Formats: https://labelstud.io/tags/ranker and https://labelstud.io/guide/task_format, as of label-studio-sdk 2.1.2.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..data.columns import by_id
from ..utils.files import digest, read_template, write_atomically
from ..utils.text import shorten


if TYPE_CHECKING:
    from datasets import Dataset


def export_label_studio(
    instances: "Dataset", panels: "Dataset", prompts: "Dataset", path: str | Path, root: str | Path
) -> Path:
    """
    Write the ranking instances as tasks for Label Studio, and next to them its labeling configuration.

    Args:
        instances, panels, prompts ([`~datasets.Dataset`]):
            The ranking instances, their panels (with images given by path) and prompts.
        path (`str` or `Path`):
            The file of the tasks, `.json`. [`import_annotations`] reads what Label Studio exports as JSON.
        root (`str` or `Path`):
            Directory that Label Studio serves files from (`LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT`): above all panels.

    Returns:
        `Path`: the labeling configuration, with the suffix `.xml`.
    """
    path = Path(path)
    images, texts, root = by_id(panels, "image"), by_id(prompts, "prompt"), Path(root).resolve()

    def address(panel: str) -> str:
        path = Path(images[panel]["path"]).resolve()
        if not path.is_relative_to(root):
            raise ValueError(f"The panel {panel!r} ({path}) is not below {root}, which Label Studio serves.")
        # Not a data URL: the list's HTML is sanitized, and loses these
        # (https://github.com/HumanSignal/label-studio/blob/develop/web/libs/editor/src/utils/html.js)
        return f"/data/local-files/?d={quote(str(path.relative_to(root)))}"

    tasks = []
    for row in instances.with_format(None):
        # In an order that does not tell how they were made. The id is shown too, and plain numbers would be sorted
        # (https://github.com/HumanSignal/label-studio/blob/develop/web/libs/editor/src/components/Ranker/Item.tsx)
        shown = sorted(range(len(row["candidates"])), key=lambda index: digest([row["id"], index]))
        candidates = [
            {"id": f"#{place}", "candidate": index, "html": f'<img src="{html.escape(address(name))}">'}
            for place, (index, name) in enumerate(((index, row["candidates"][index]) for index in shown), start=1)
        ]
        data = {
            "instance": row["id"],
            "digest": row.get("digest"),
            "prompt": texts[row["prompt_id"]],
            "reference": address(row["reference"]),
            "candidates": candidates,
        }
        tasks.append({"data": data})
    write_atomically(path, json.dumps(tasks, indent=2, ensure_ascii=False) + "\n")
    write_atomically(path.with_suffix(".xml"), read_template("label_studio.xml"))
    return path.with_suffix(".xml")


def records_of_label_studio(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of annotations in exported tasks, by annotators named `label-studio-<user id>`."""
    records = []
    for task in tasks:
        try:
            data = task["data"]
            known = {name: data[name] for name in ("instance", "digest") if data[name] is not None}
            indices = {item["id"]: item["candidate"] for item in data["candidates"]}
            for annotation in sorted(task["annotations"], key=lambda annotation: annotation["id"]):
                user = annotation["completed_by"]  # an id, or an object that has it
                user = user["id"] if isinstance(user, dict) else user
                record = {"annotator": f"label-studio-{user}", **known}
                if annotation.get("was_cancelled"):
                    records.append(record | {"skipped": True})
                    continue
                (names,) = [
                    result["value"]["ranker"]["ranking"]
                    for result in annotation["result"]
                    if result["type"] == "ranker"
                ]
                records.append(record | {"ranking": [indices[name] for name in names]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"The task {shorten(task)} is not one of this dataset with a ranking by Label Studio's Ranker "
                f"({type(error).__name__}: {error}). Export the project as JSON."
            ) from error
    return records
