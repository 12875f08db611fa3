# SPDX-License-Identifier: Apache-2.0
"""Describes the options of the configs for the command line, which imports no config to parse: `make options`."""

import inspect
import json
from dataclasses import is_dataclass
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from paco_trl import PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig
from paco_trl.commands import options as command_options
from paco_trl.rollout.families import FAMILIES
from paco_trl.trainer.config_utils import REFUSED_GRPO_FIELDS, REFUSED_SFT_FIELDS


UNSUPPORTED = {
    PaCoGRPOConfig: REFUSED_GRPO_FIELDS, PaCoNFTConfig: REFUSED_GRPO_FIELDS, PaCoRewardConfig: REFUSED_SFT_FIELDS,
}  # fmt: skip


def text() -> str:
    """The file, with a line for each option."""
    bases = {config.__name__: [kind for kind in config.__mro__[::-1] if is_dataclass(kind)] for config in UNSUPPORTED}
    options: dict[str, dict[str, Any]] = {}
    for kinds in bases.values():
        for kind in kinds:
            own = inspect.get_annotations(kind)
            options[kind.__name__] = found = {
                name: option for name, option in command_options.declared_options(kind).items() if name in own
            }
            # What every config of this kind refuses is in no help
            for name in set.intersection(
                *(names for config, names in UNSUPPORTED.items() if issubclass(config, kind))
            ):
                found.get(name, {}).pop("help", None)
    options["TrainingArguments"]["report_to"]["choices"] = [*INTEGRATION_TO_CALLBACK, "all", "none"]
    lines = ["{", '"bases": {']
    lines += [
        ",\n".join(
            f"{json.dumps(name)}: {json.dumps([kind.__name__ for kind in kinds])}" for name, kinds in bases.items()
        )
    ]
    lines += ["},", '"unsupported": {']
    lines += [
        ",\n".join(
            f"{json.dumps(config.__name__)}: {json.dumps(sorted(names))}" for config, names in UNSUPPORTED.items()
        )
    ]
    defaults = {name: family.training_defaults for name, family in FAMILIES.items() if family.training_defaults}
    lines += ["},", f'"family_defaults": {json.dumps(defaults)},', '"options": {']
    of_classes = []
    for kind, found in options.items():
        of_class = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(option, default=list)}" for name, option in found.items()
        )
        of_classes.append(f"{json.dumps(kind)}: {{\n{of_class}\n}}")
    return "\n".join([*lines, ",\n".join(of_classes), "}", "}", ""])


if __name__ == "__main__":
    from pathlib import Path

    Path(command_options.__file__).with_name("config_options.json").write_text(text(), encoding="utf-8")
