# SPDX-License-Identifier: Apache-2.0
"""Load the card of a published model from a YAML file."""

from pathlib import Path

import yaml

from ..hub.licenses import base_license
from .content import ImageModelCard, ImageSettings, JudgeCard, JudgeSettings, LoRA, Published, Result, Reward, Table


def load_reference_card(path: str | Path) -> ImageModelCard | JudgeCard:
    """
    Load a reference card from a YAML file.

    The file has the fields of [`ImageModelCard`] (`kind: image model`) or [`JudgeCard`] (`kind: judge`), with mappings
    for the dataclasses in them. The license is the base model's, and the tables' results are published ones.
    """
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    is_judge = {"judge": True, "image model": False}[values.pop("kind")]
    values["lora"] = LoRA(**values["lora"])
    values["license"] = base_license(values["base_model"])
    values["settings"] = (JudgeSettings if is_judge else ImageSettings)(**values["settings"])
    if not is_judge:
        values["rewards"] = [Reward(**reward) for reward in values["rewards"]]
    published = values["published"]
    published["tables"] = [Table(**table) for table in published["tables"]]
    published["results"] = [Result(**result) for result in published["results"]]
    values["published"] = Published(**published)
    return (JudgeCard if is_judge else ImageModelCard)(**values)
