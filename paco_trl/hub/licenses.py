# SPDX-License-Identifier: Apache-2.0
"""Find the licenses of models, which models trained from them inherit."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..utils.files import read_template
from ..utils.names import is_local, public_name


class License(NamedTuple):
    """A license as in the Hub's metadata: `identifier` is `"other"` where the Hub has none, then with `name` and `link`."""

    identifier: str
    name: str | None = None
    link: str | None = None


# Of the models that the paper trains, as in their cards: known without a request
_KNOWN = {model: License(*values) for model, values in yaml.safe_load(read_template("licenses.yaml")).items()}


def read_license(model: str, token: str | bool | None = None, readme: str | Path | None = None) -> License:
    """
    Read the license in the card of a model: `readme`, else that of its directory, else from the Hub.

    Raises:
        ValueError: If there is no card, or no license in it.
    """
    from huggingface_hub import ModelCard, constants
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    readme = Path(model) / "README.md" if readme is None else Path(readme)
    try:
        data = ModelCard.load(readme if readme.is_file() else model, token=token, ignore_metadata_errors=True).data
    # A directory without a card is not a valid id either
    except (HfHubHTTPError.__bases__[0], EntryNotFoundError, HFValidationError, OSError, yaml.YAMLError) as error:
        raise ValueError(f"The card of {model!r} with its license cannot be read ({type(error).__name__}).") from error
    if not isinstance(data.license, str):
        raise ValueError(f"The card of {model!r} names no license (it has {data.license!r}).")
    link = data.get("license_link")
    if link is not None and "://" not in link:  # a file of the repository
        name = public_name(model)
        is_on_hub = name == model or "/" in name  # or in the cache of the Hub's clients
        link = f"{constants.ENDPOINT}/{name}/blob/main/{link}" if is_on_hub else None
    return License(data.license, data.get("license_name"), link)


def base_license(base: str, online: bool = False, token: str | None = None) -> License | None:
    """Return the license of a base model: from its directory, table, cached card or, with `online`, the Hub."""
    from huggingface_hub import try_to_load_from_cache

    name = public_name(base)
    if name in _KNOWN:
        return _KNOWN[name]
    readme: Any = Path(base) / "README.md"
    if not is_local(base):
        try:
            readme = try_to_load_from_cache(base, "README.md")
        except ValueError:  # not a valid id: the class of a pipeline built in memory
            return None
        if not isinstance(readme, str):
            return _fetch_license(base, token) if online else None
    try:
        return read_license(base, readme=readme) if Path(readme).is_file() else None
    except ValueError:
        return None


@functools.lru_cache(maxsize=16)
def _fetch_license(model: str, token: str | None) -> License | None:
    try:
        return read_license(model, token)
    except ValueError:  # missing, not reachable, or without a license
        return None
