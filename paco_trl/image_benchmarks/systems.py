# SPDX-License-Identifier: Apache-2.0
"""Systems whose images are evaluated, and what their results have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..evaluation.runs import check_protocol
from .image_sets import FoundImages


# Settings that two systems must share to be comparable
CONDITIONS = ("seeds", "num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt", "height", "width", "dtype")  # fmt: skip


@dataclass
class System:
    """Describe a model that generated images, or a directory of images."""

    role: str  # `"base"` or `"tuned"`; any word for a system alone
    name: str  # for reports
    found: FoundImages  # its images
    folder: Path  # with its scores
    settings: dict[str, Any] = field(default_factory=dict)  # how the images were generated, as far as known

    def describe(self, counts: dict[str, int]) -> dict[str, Any]:
        """Describe the system in results, with counts of its images."""
        return {"role": self.role, "name": self.name, "settings": self.settings, "counts": counts}


def check_results_arguments(systems: Sequence[System], missing: str, protocol: str) -> None:
    """Check the arguments of [`t2is_results`] and [`gedit_results`], and that no image is missing unless that counts 0."""
    check_protocol(protocol)
    if missing not in ("error", "zero"):
        raise ValueError(f"`missing` is {missing!r}, but must be 'error' or 'zero'.")
    if len(systems) not in (1, 2):
        raise ValueError(f"There are {len(systems)} systems, but one is evaluated alone or two are compared.")
    if len({Path(one.folder).resolve() for one in systems}) < len(systems):
        raise ValueError(f"Both systems are {systems[0].folder}: a model is not compared with itself.")
    for system in systems if missing == "error" else ():
        system.found.check_complete()


def condition_notes(systems: Sequence[System]) -> list[str]:
    """List the conditions under which the images of two systems were generated differently."""
    if len(systems) < 2:
        return []
    first, second = [one.settings for one in systems]
    if not (first and second):
        unknown = " and ".join(repr(one.name) for one in systems if not one.settings)
        return [f"How {unknown} generated is not known: the difference may come from other settings."]
    pairs = {name: (first.get(name), second.get(name)) for name in CONDITIONS}
    other = [f"{name} {one!r} and {two!r}" for name, (one, two) in pairs.items() if one != two]
    return [f"The two systems generated under different conditions: {'; '.join(other)}."] if other else []


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    return {name: version(name) for name in ("paco_trl", "torch", "transformers", "diffusers", "peft")}
