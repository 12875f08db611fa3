# SPDX-License-Identifier: Apache-2.0
"""Public names of models and datasets, without paths of this machine."""

import os
import re
from difflib import get_close_matches
from importlib.metadata import metadata
from pathlib import Path


# A repository in the Hub's cache: .../models--user--name/snapshots/<commit>
_IN_CACHE = re.compile(r"(?:models|datasets)--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$")
# A path in the middle of a text, such as that of an error
_PATH_IN_TEXT = re.compile(r"(?<![\w.:/\\~-])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'\"`,;]+[\\/])+([^\s\\/'\"`,;]+)[\\/]?")


def repository() -> str | None:
    """Return the address of paco_trl's repository, if the installed package has one (`url` in setup.cfg)."""
    package = metadata("paco_trl")
    return package["Home-page"] if "Home-page" in package else None


def is_local(name: str) -> bool:
    """Return whether a name is a directory or file of this machine, not a Hub id."""
    is_path = name.startswith(("/", "~", ".", "\\")) or re.match(r"[A-Za-z]:[\\/]", name) is not None
    return is_path or os.path.exists(name)


def check_adapter_name(name: str) -> None:
    """Raise an error if an adapter is neither an existing path nor a Hub id."""
    if not os.path.exists(name) and (is_local(name) or "/" not in name):
        raise FileNotFoundError(f"There is no adapter '{name}': no file or directory, and no Hub id, `user/name`.")


def check_model_name(name: str | Path) -> None:
    """Raise an error for a name that is neither a directory nor a Hub id; libraries would only speak of the id."""
    name = os.fspath(name)
    if not name:
        raise ValueError("The name of the model is empty. Give a directory, or a Hub id, `user/name`.")
    if os.path.isdir(name) or not is_local(name) and name.count("/") == 1 and not name.endswith(".safetensors"):
        return
    parent, last = os.path.split(os.path.expanduser(name))
    folders = [path.name for path in Path(parent).glob("*/") if path.is_dir()]
    near = "".join(f" Did you mean '{os.path.join(parent, best)}'?" for best in get_close_matches(last, folders, 1))
    raise FileNotFoundError(
        f"There is no directory '{name}' of a model.{near} Check the path, or give a Hub id, `user/name`."
    )


def public_name(name: str) -> str:
    """Return the name of a model or dataset without a path of this machine."""
    if not is_local(name):
        return name
    cached = _IN_CACHE.search(name)
    return f"{cached[1]}/{cached[2]}" if cached else re.split(r"[\\/]", name.rstrip("\\/"))[-1]


def is_on_hub(public: str) -> bool:
    """Return whether a public name is a Hub id: [`public_name`] leaves no slash in a local name."""
    return "/" in public


def public_text(text: str) -> str:
    """Reduce each path of this machine in a text to its last part."""
    if not re.search(r"\s", text) and is_local(text):
        return public_name(text)
    return _PATH_IN_TEXT.sub(r"\1", text)


def relative_name(name: str) -> str:
    """Return a name that works in code on any machine, or a path relative to the working directory."""
    public = public_name(name)
    if "/" in public or not is_local(name):
        return public
    path = os.path.relpath(os.path.expanduser(name)).replace(os.sep, "/")
    return public if path.startswith(".") else path


def is_same_model(first: str, second: str) -> bool:
    """Return whether two names may refer to the same model."""
    # A path, even one from another machine, does not name an owner: then only the last parts are compared.
    # A relative path such as "." is made absolute first, to have a last part.
    names = [public_name(os.path.abspath(name) if os.path.exists(name) else name) for name in (first, second)]
    if not all(name.count("/") == 1 and "\\" not in name and not is_local(name) for name in names):
        names = [re.split(r"[\\/]", name.rstrip("\\/"))[-1] for name in names]
    return names[0].lower() == names[1].lower()


class OtherBaseError(ValueError):
    """An adapter that was made for another model."""


def check_adapter_base(adapter: str, named: str | None, base: str | None) -> None:
    """Raise an error if an adapter was made for another model: it would load if the architectures are the same."""
    if not named or not base or is_same_model(named, base):
        return
    raise OtherBaseError(
        f"The adapter '{adapter}' was made for '{named}', not for '{base}'. Pass `--model_name_or_path {named}`, or "
        "its path. If both are one model, change `base_model_name_or_path` in a copy of the adapter."
    )
