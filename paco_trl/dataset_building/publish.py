# SPDX-License-Identifier: Apache-2.0
"""Stage 7: publish the dataset, as Parquet files with the images inside, and a card."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.pairs import check_pair_columns
from ..data.rankings import check_ranking_columns
from ..generation.sample_sheet import pairs_sheet, rankings_sheet
from ..hub.licenses import License, read_license
from .dataset_card import dataset_card, describe_pairs, describe_rankings
from .pairs import check_disjoint


if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, DatasetDict
    from huggingface_hub import DatasetCard, HfApi


_PAIRS = "pairs"
_RANKINGS = "rankings"
# What to do when the Hub is down
_REMEDY = "Nothing is lost: run the stage again, which sends only what is missing."
_IMAGE_COLUMNS = {_PAIRS: ["images"], _RANKINGS: ["reference", "candidates"]}


def publish_dataset(
    pairs: "DatasetDict",
    rankings: "Dataset | None",
    repo_id: str,
    report: Mapping[str, Mapping[str, Any]],
    *,
    private: bool = True,
    license: str | None = None,
    generator: str | None = None,
    token: str | None = None,
    max_shard_size: int | str = "500MB",
    pretty_name: str | None = None,
) -> str:
    """
    Push pairs and rankings to the Hub, with a card that describes them.

    The repository has the configurations `pairs` (the default, with the splits of `pairs`) and `rankings` (split
    `test`), as [`~datasets.DatasetDict.push_to_hub`] writes them, with the images inside, named by their digests.
    Everything is checked before anything is sent; data go first and the card last. Interrupted uploads resume.

    Args:
        pairs ([`~datasets.DatasetDict`]), rankings ([`~datasets.Dataset`] or `None`):
            Pairs, in `train`, `test` or both; rankings of prompts that are not in `train`.
        repo_id (`str`):
            Repository, such as `"user/name"`; a name alone is put under the user of the token. It is created if
            needed, and refused if it has other files.
        report (`Mapping[str, Mapping]`):
            Reports of the stages `prompts`, `grids`, `ranking`, `pairs` and `reasons`, as `paco-trl build` makes them;
            the card lists every value.
        private (`bool`, *optional*, defaults to `True`):
            Whether the repository is private.
        license (`str`, *optional*):
            License, as the Hub names it (`"apache-2.0"`, `"other"`, ...). If `None`, that on the card of `generator`.
        generator (`str`, *optional*):
            Hub id or directory of the model that generated the images.
        token (`str`, *optional*):
            Token that may write to the repository; that of `hf auth login` if `None`.
        max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
            Size of a Parquet file.
        pretty_name (`str`, *optional*):
            Title of the card; the name of the repository if `None`.

    Returns:
        `str`: address of the repository.

    Raises:
        ValueError, PermissionError: Before anything is sent: data, `repo_id`, token or license cannot be used.
        ConnectionError: If the Hub cannot be reached, or an upload fails.
    """
    from datasets import DatasetDict
    from huggingface_hub import HfApi

    from ..hub.account import find_repository, hub_errors

    parts = _check_splits(pairs, rankings)
    api = HfApi(token=token, library_name="paco_trl")
    with tempfile.TemporaryDirectory(prefix="paco-trl-publish-") as name:
        folder = Path(name)
        (folder / "images").mkdir()
        digests: dict[tuple[str, str], set[str]] = {part: set() for part in parts}
        named = {part: _name_images(data, part, folder / "images", digests[part]) for part, data in parts.items()}
        _check_held_out(parts, digests)
        repo_id, earlier = find_repository(api, repo_id, private, "dataset")
        if earlier is not None:
            _check_contents(repo_id, earlier, rankings is not None)
        if license is None and generator is None:
            raise ValueError("Neither `license` nor `generator` is given, so the license is not known. Give one.")
        known_license = License(license) if license is not None else read_license(str(generator), api.token)

        sheets = {"pairs.png": folder / "pairs.png"}
        pairs_sheet(next(iter(parts.values())), sheets["pairs.png"])
        if rankings is not None:
            sheets["rankings.png"] = folder / "rankings.png"
            rankings_sheet(rankings, sheets["rankings.png"])
        card = dataset_card(
            {split: describe_pairs(dataset, len(digests[_PAIRS, split])) for split, dataset in pairs.items()},
            describe_rankings(rankings, len(digests[_RANKINGS, "test"])) if rankings is not None else None,
            repo_id,
            report,
            known_license,
            generator,
            license is None,
            pretty_name,
            list(sheets),
        )
        _check_card(api, card)
        with hub_errors(api, repo_id, _REMEDY):
            if earlier is not None:
                _clear_card(api, repo_id, card)
            for config in dict.fromkeys(config for config, _ in parts):
                splits = DatasetDict({split: data for (name, split), data in named.items() if name == config})
                options = {"private": private, "token": api.token, "max_shard_size": max_shard_size}
                splits.push_to_hub(repo_id, config, commit_message=f"Upload {config}", **options)
            _push_card(api, repo_id, card, sheets)
    return f"{api.endpoint}/datasets/{repo_id}"


def _check_splits(pairs: "DatasetDict", rankings: "Dataset | None") -> dict[tuple[str, str], "Dataset"]:
    """Check the formats; return each split by the names of its configuration and its own."""
    if not pairs or not set(pairs) <= {"train", "test"}:
        raise ValueError(f"`pairs` has the splits {list(pairs)}, but must have `train`, `test` or both. Rename them.")
    parts = {(_PAIRS, split): pairs[split] for split in ("train", "test") if split in pairs}
    for part, dataset in parts.items():
        check_pair_columns(dataset, _name_of(part))
    if rankings is not None:
        check_ranking_columns(rankings, "rankings")
        parts[_RANKINGS, "test"] = rankings
    return parts


def _name_of(part: tuple[str, str]) -> str:
    return f'pairs["{part[1]}"]' if part[0] == _PAIRS else "rankings"


def _name_images(dataset: "Dataset", part: tuple[str, str], folder: Path, digests: set[str]) -> "Dataset":
    """
    Check that all images of a split open, and refer to links that are named by the digests of the bytes: `datasets`
    stores these names with the bytes. Adds the digests.
    """
    import pyarrow as pa

    links: dict[str, str] = {}

    def link(value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [link(image, where) for image in value]
        path = None if value is None or value["bytes"] is not None else value["path"]
        if path not in links:
            name = _read_image(value, where)
            digests.add(name)
            if path is None:
                return value
            links[path] = str(folder / name)
            if not (folder / name).exists():
                (folder / name).symlink_to(os.path.abspath(path))
        return {"path": links[path]}

    def link_columns(table: "pa.Table", rows: list[int]) -> "pa.Table":
        for column in _IMAGE_COLUMNS[part[0]]:
            values = zip(rows, table.column(column).to_pylist(), strict=True)
            linked = [link(value, f"`{column}` of row {row} of `{_name_of(part)}`") for row, value in values]
            place, field = table.schema.get_field_index(column), table.schema.field(column)
            table = table.set_column(place, field, pa.array(linked, field.type))
        return table

    options: dict[str, Any] = {"features": dataset.features, "load_from_cache_file": False}
    options |= {"batched": True, "batch_size": 64, "with_indices": True}
    named = dataset.with_format("arrow").map(link_columns, desc=f"Checking images of {_name_of(part)}", **options)
    return named.with_format(None)


def _read_image(image: Mapping[str, Any] | None, where: str) -> str:
    """Check that an image opens; return its name by its digest."""
    from PIL import Image

    try:
        if image is None:
            raise ValueError("it is missing (None)")
        content = Path(image["path"]).read_bytes() if image["bytes"] is None else image["bytes"]
        with Image.open(BytesIO(content)) as opened:
            return f"{hashlib.sha256(content).hexdigest()[:32]}.{str(opened.format).lower()}"
    # A path that is None, and what Pillow raises
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"An image in {where} cannot be read ({problem}). Rerun its stage, or leave the row out."
        ) from error


def _check_held_out(parts: Mapping[tuple[str, str], "Dataset"], digests: Mapping[tuple[str, str], set[str]]) -> None:
    """Check that held-out splits share no prompt and no image with the training pairs."""
    train = (_PAIRS, "train")
    contents: dict[tuple[str, str], dict[str, set[str]]] = {}
    for part, dataset in parts.items() if train in parts and len(parts) > 1 else ():
        if "group" not in dataset.column_names:
            raise ValueError(f"`{_name_of(part)}` has no column `group`, by which splits are compared. Add it.")
        contents[part] = {"prompts": set(dataset.with_format(None)["group"][:]), "images": digests[part]}
        if part != train:
            check_disjoint(contents[train], contents[part], f"`{_name_of(train)}`", f"`{_name_of(part)}`")


def _check_contents(repo_id: str, info: Any, has_rankings: bool) -> None:
    """Check that the repository has an earlier version of the same and nothing else."""
    expected = {".gitattributes", "README.md", "assets", _PAIRS, *([_RANKINGS] if has_rankings else [])}
    others = sorted(name.rfilename for name in info.siblings if name.rfilename.split("/")[0] not in expected)
    if others:
        raise ValueError(
            f"{repo_id} has {len(others)} files of something else, such as {others[0]!r}. Choose another `repo_id`."
        )


def _check_card(api: "HfApi", card: "DatasetCard") -> None:
    """Let the Hub check the metadata, which it would otherwise refuse after hours of uploads."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    from ..hub.account import hub_errors

    with hub_errors(api, "the check of cards", _REMEDY):
        # Not `card.validate`, which queries huggingface.co, whatever the endpoint (huggingface_hub 1)
        content = {"content": str(card), "repoType": "dataset"}
        response = get_session().post(f"{api.endpoint}/api/validate-yaml", json=content)
        if response.status_code != 400:
            hf_raise_for_status(response)
            return
    raise ValueError(
        f"{api.endpoint} refuses the metadata of the card: {' '.join(response.text.split())}. Correct the license "
        f"({card.data.license!r}) or the `language` in the report of the prompts."
    )


def _clear_card(api: "HfApi", repo_id: str, card: "DatasetCard") -> None:
    """Remove the text of an earlier card, so that no card describes other data than are there."""
    earlier = _load_card(api, repo_id)
    if earlier is not None and earlier.text.strip() not in ("", card.text.strip()):
        earlier.text = ""
        _commit_card(api, repo_id, earlier, "Remove the card of earlier data", {})


def _push_card(api: "HfApi", repo_id: str, card: "DatasetCard", sheets: Mapping[str, Path]) -> None:
    """Push the card with the metadata that `push_to_hub` has written."""
    from huggingface_hub import DatasetCardData

    pushed = _load_card(api, repo_id).data.to_dict()
    # Not by `set_default`, which is lost when the default configuration is pushed a second time (datasets 5.2)
    configs = [
        {**config, "default": True} if config["config_name"] == _PAIRS else config for config in pushed["configs"]
    ]
    card.data = DatasetCardData(**{**pushed, "configs": configs, **card.data.to_dict()})
    _commit_card(api, repo_id, card, "Upload dataset card", sheets)


def _commit_card(api: "HfApi", repo_id: str, card: "DatasetCard", message: str, sheets: Mapping[str, Path]) -> None:
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(f"assets/{name}", path) for name, path in sheets.items()]
    operations.append(CommitOperationAdd("README.md", str(card).encode()))
    api.create_commit(repo_id, operations, commit_message=message, repo_type="dataset")


def _load_card(api: "HfApi", repo_id: str) -> Any:
    """Load the card from the Hub, if it has one."""
    from huggingface_hub import DatasetCard
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        # Forced: clients fall back to the cache when the Hub is down
        path = api.hf_hub_download(repo_id, "README.md", repo_type="dataset", force_download=True)
    except RemoteEntryNotFoundError:
        return None
    return DatasetCard.load(path)
