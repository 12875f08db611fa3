# SPDX-License-Identifier: Apache-2.0
"""What differs between model families: a class for each."""

from .base import Family
from .flux import FluxFamily, FluxKontextFamily
from .flux2 import Flux2Family, Flux2KleinFamily
from .krea2 import Krea2Family
from .longcat_image import LongCatImageEditFamily, LongCatImageFamily, OvisImageFamily
from .qwen_image import QwenImageEditFamily, QwenImageEditPlusFamily, QwenImageFamily
from .qwen_image_21 import QwenImage21Family
from .stable_diffusion_3 import StableDiffusion3Family
from .unlisted import UnlistedFamily
from .z_image import ZImageFamily


# Name of the pipeline class -> family class
FAMILIES: dict[str, type[Family]] = {
    "FluxPipeline": FluxFamily,
    "FluxKontextPipeline": FluxKontextFamily,
    "Krea2Pipeline": Krea2Family,
    "LongCatImagePipeline": LongCatImageFamily,
    "LongCatImageEditPipeline": LongCatImageEditFamily,
    "OvisImagePipeline": OvisImageFamily,
    "QwenImagePipeline": QwenImageFamily,
    "QwenImageEditPipeline": QwenImageEditFamily,
    "QwenImageEditPlusPipeline": QwenImageEditPlusFamily,
    "QwenImage21Pipeline": QwenImage21Family,
    "StableDiffusion3Pipeline": StableDiffusion3Family,
    "Flux2Pipeline": Flux2Family,
    "Flux2KleinPipeline": Flux2KleinFamily,
    "ZImagePipeline": ZImageFamily,
}


def find_family(pipeline) -> Family | None:
    """Return the family of a pipeline, or of the name of its class; `None` where the class is not in `FAMILIES`."""
    family = FAMILIES.get(pipeline if isinstance(pipeline, str) else type(pipeline).__name__)
    return None if family is None else family()


def get_family(pipeline) -> Family:
    """
    Return the family of a pipeline.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`] or `str`):
            Pipeline to train, or the name of its class.

    Returns:
        [`Family`]: an [`UnlistedFamily`], with a warning, if the pipeline's class is not in `FAMILIES`.

    Raises:
        ValueError: the pipeline cannot be trained without a family class of its own.
    """
    return find_family(pipeline) or UnlistedFamily(pipeline)
