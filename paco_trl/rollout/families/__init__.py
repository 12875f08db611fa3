# SPDX-License-Identifier: Apache-2.0
"""What differs between model families: a page for each."""

from .base import Family
from .flux import FluxFamily


# Pipeline class -> its page
FAMILIES = {"FluxPipeline": FluxFamily}


def family_of(pipeline) -> Family:
    """
    The page of a pipeline's family.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`] or `str`):
            Pipeline to train, or the name of its class.

    Returns:
        [`Family`].

    Raises:
        ValueError: there is no page for the pipeline's class.
    """
    name = pipeline if isinstance(pipeline, str) else type(pipeline).__name__
    if name not in FAMILIES:
        raise ValueError(
            f"There is no family page for {name}. Known: {', '.join(sorted(FAMILIES))}. A new family is one class in "
            "`paco_trl/rollout/families/`: `base.py` says what it provides."
        )
    return FAMILIES[name]()


__all__ = ["FAMILIES", "Family", "FluxFamily", "family_of"]
