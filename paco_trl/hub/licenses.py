# SPDX-License-Identifier: Apache-2.0
"""Lookup of a base model's license, which the models trained from it inherit."""

import functools
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, constants, model_info
from huggingface_hub.errors import HFValidationError

from ..utils.files import read_template
from ..utils.names import is_local, public_name
from .repositories import HTTPError


@dataclass(frozen=True)
class License:
    """A license in the Hub's metadata. A license that the Hub does not know is `"other"`, with a name and a link."""

    identifier: str
    name: str | None = None
    link: str | None = None


# Licenses of the paper's models, copied from their cards to avoid a request
_LICENSES = {model: License(*values) for model, values in yaml.safe_load(read_template("licenses.yaml")).items()}


def read_license(model: str, token: str | bool | None = None) -> License:
    """
    Read the license from the card of a model, in its directory or on the Hub.

    Raises:
        ValueError: If there is no card, or it names no license.
    """
    name = public_name(model)
    try:
        if is_local(model):
            data = ModelCard.load(Path(model) / "README.md", ignore_metadata_errors=True).data
        else:
            data = model_info(model, token=token).card_data
    except (HTTPError, HFValidationError, OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"The card of {model!r}, which names its license, cannot be read ({type(error).__name__})."
        ) from error
    identifier = data.get("license") if data is not None else None
    if data is None or not isinstance(identifier, str):
        raise ValueError(f"The card of {model!r} names no license (it has {identifier!r}).")
    link = data.get("license_link")
    if link is not None and "://" not in link:  # a file in the repository, possibly in the Hub's cache
        link = f"{constants.ENDPOINT}/{name}/blob/main/{link}" if "/" in name or name == model else None
    return License(identifier, data.get("license_name"), link)


_read_license_once = functools.lru_cache(maxsize=16)(read_license)  # errors, such as outages, are not cached


def remember_license(base: str, token: str | None = None) -> None:
    """Read a base model's license from the Hub now, so that an outage does not keep it from [`base_license`] later."""
    base_license(base, online=True, token=token)


def base_license(base: str, online: bool = False, token: str | None = None) -> License | None:
    """Return the license of a base model from a table, its directory or, if `online`, the Hub; `None` if unknown."""
    if (name := public_name(base)) in _LICENSES:
        return _LICENSES[name]
    if not online and not is_local(base):
        return None
    try:
        return _read_license_once(base, token)
    except ValueError:  # the card is missing, unreachable, or without a license
        return None
