# SPDX-License-Identifier: Apache-2.0
"""Licences of models, which what is made with them inherits."""

import functools
from pathlib import Path
from typing import NamedTuple

import yaml

from ..utils.names import is_local, public_name


class License(NamedTuple):
    """
    A licence as the Hub's metadata name it.

    Attributes:
        identifier (`str`):
            Identifier, such as `"apache-2.0"`; `"other"` for a licence that the Hub has no identifier of.
        name (`str`, *optional*):
            Name of a licence that is `"other"`.
        link (`str`, *optional*):
            Where it is.
    """

    identifier: str
    name: str | None = None
    link: str | None = None


def _flux_license(model: str) -> License:
    link = f"https://huggingface.co/{model}/blob/main/LICENSE.md"
    return License("other", "flux-1-dev-non-commercial-license", link)


# Of the models that the paper trains, as their cards name them: known without a request
_KNOWN = {
    "black-forest-labs/FLUX.1-dev": _flux_license("black-forest-labs/FLUX.1-dev"),
    "black-forest-labs/FLUX.1-Kontext-dev": _flux_license("black-forest-labs/FLUX.1-Kontext-dev"),
    "Qwen/Qwen-Image": License("apache-2.0"),
    "Qwen/Qwen-Image-Edit": License("apache-2.0"),
    "Qwen/Qwen-Image-Edit-2509": License("apache-2.0"),
    "Qwen/Qwen2.5-VL-7B-Instruct": License("apache-2.0"),
    "Qwen/Qwen2.5-VL-3B-Instruct": License(
        "other", "qwen-research", "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE"
    ),
}


def read_license(model: str, token: str | bool | None = None) -> License:
    """
    Gives the licence that a model's card names. It asks the Hub for the card of a model that is no folder.

    Args:
        model (`str`):
            Hub id or folder.
        token (`str` or `bool`, *optional*):
            Token that may read the repository. The one of `hf auth login` when left out.

    Returns:
        [`License`].

    Raises:
        ValueError: If the card cannot be read, or names no licence.
    """
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    readme = Path(model) / "README.md"
    try:
        return _license_in(readme if readme.is_file() else model, model, token)
    # A folder without a card is no valid id either
    except (HfHubHTTPError.__bases__[0], EntryNotFoundError, HFValidationError, OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"The card of {model!r}, which names its licence, cannot be read ({type(error).__name__})."
        ) from error


def base_license(base: str, online: bool = False, token: str | None = None) -> License | None:
    """
    Gives the licence of a base model, where it can be known: nothing is invented.

    It comes from the card in the model's folder; of a model on the Hub from a table (the models that the paper trains),
    from its card in the cache, or, if asked for, from the Hub, once in a process.

    Args:
        base (`str`):
            Hub id or folder.
        online (`bool`, *optional*, defaults to `False`):
            Whether the Hub may be asked. Without it there is no request.
        token (`str`, *optional*):
            Token that may read the repository. The one of `hf auth login` when left out.

    Returns:
        [`License`], or `None` if it is not known.
    """
    from huggingface_hub import try_to_load_from_cache

    name = public_name(base)
    if name in _KNOWN:
        return _KNOWN[name]
    if is_local(base):
        return _license_or_none(Path(base) / "README.md", base)
    try:
        cached = try_to_load_from_cache(base, "README.md")
    except ValueError:  # no valid id: the class of a pipeline that was put together in memory
        return None
    if isinstance(cached, str):
        return _license_or_none(Path(cached), base)
    return _ask_hub(base, token) if online else None


@functools.lru_cache(maxsize=16)
def _ask_hub(model: str, token: str | None) -> License | None:
    try:
        return read_license(model, token)
    except ValueError:  # not there, not to be reached, or without a licence
        return None


def _license_or_none(readme: Path, model: str) -> License | None:
    try:
        return _license_in(readme, model) if readme.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):  # a card that does not parse, or names no licence
        return None


def _license_in(card: str | Path, model: str, token: str | bool | None = None) -> License:
    from huggingface_hub import ModelCard, constants

    data = ModelCard.load(card, token=token, ignore_metadata_errors=True).data
    if not isinstance(data.license, str):
        raise ValueError(f"The card of {model!r} names no licence (it says {data.license!r}).")
    link = data.get("license_link")
    if link is not None and "://" not in link:  # a file of the repository
        name = public_name(model)
        is_on_hub = name == model or "/" in name  # or in the cache of the Hub's clients
        link = f"{constants.ENDPOINT}/{name}/blob/main/{link}" if is_on_hub else None
    return License(data.license, data.get("license_name"), link)
