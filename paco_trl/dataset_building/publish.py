# SPDX-License-Identifier: Apache-2.0
"""Stage 7: publish the dataset as Parquet files with embedded images, and a card."""

import hashlib
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from huggingface_hub import CommitOperationAdd, DatasetCard, DatasetCardData, HfApi
from huggingface_hub.utils import get_session, hf_raise_for_status
from PIL import Image

from ..data.pairs import check_pair_columns
from ..data.rankings import check_ranking_columns
from ..hub.licenses import License, read_license
from ..hub.repositories import check_repo, explain_outages
from ..plots.sample_sheet import pairs_sheet, rankings_sheet
from ..utils.images import reading
from .dataset_card import count_pairs, count_rankings, dataset_card


def publish_dataset(
    pairs: DatasetDict,
    rankings: Dataset | None,
    repo_id: str,
    report: Mapping[str, Mapping[str, Any]],
    *,
    private: bool = True,
    license: str | None = None,
    generator: str | None = None,
    token: str | None = None,
    max_shard_size: int | str = "500MB",
) -> str:
    """
    Push pairs and rankings to the Hub, with a card that describes them.

    The repository has the configurations `pairs` (the default, with the splits of `pairs`) and `rankings` (split
    `test`), written by [`~datasets.DatasetDict.push_to_hub`] with embedded images. Everything is checked before
    anything is sent; the data are sent first, and the card last. Interrupted uploads resume.

    Args:
        pairs ([`~datasets.DatasetDict`]), rankings ([`~datasets.Dataset`] or `None`):
            Pairs in `train`, `test` or both; rankings of prompts that are not in `train`.
        repo_id (`str`):
            Repository, for example `"user/name"`; a name alone belongs to the user of the token. It is created if
            needed, and rejected if it has other files.
        report (`Mapping[str, Mapping]`):
            Reports of the stages `prompts`, `grids`, `ranking`, `pairs` and `reasons`, as written by `paco-trl build`.
            The card lists all values.
        private (`bool`, *optional*, defaults to `True`):
            Whether the repository is private.
        license (`str`, *optional*):
            License, by its Hub identifier (`"apache-2.0"`, `"other"`, ...). Defaults to the license on the card of
            `generator`.
        generator (`str`, *optional*):
            Hub id or directory of the model that generated the images.
        token (`str`, *optional*):
            Token with write access to the repository. Defaults to the token of `hf auth login`.
        max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
            Largest size of a Parquet file.

    Returns:
        `str`: address of the repository.

    Raises:
        ValueError, HfHubHTTPError: If data, `repo_id`, token or license cannot be used, before anything is sent.
        ConnectionError: If the Hub cannot be reached.
    """
    if not pairs or not set(pairs) <= {"train", "test"}:
        raise ValueError(f"`pairs` has the splits {list(pairs)}, but must have `train`, `test` or both. Rename them.")
    configs = {"pairs": pairs} | ({} if rankings is None else {"rankings": DatasetDict(test=rankings)})
    digests = _check_splits(configs)
    api = HfApi(token=token, library_name="paco_trl")
    repo_id, info = check_repo(api, repo_id, private, "dataset")
    own_names = {".gitattributes", "README.md", "assets", *configs}
    files = [] if info is None else [file.rfilename for file in info.siblings]
    if other_files := sorted(name for name in files if name.split("/")[0] not in own_names):
        raise ValueError(
            f"{repo_id} has {len(other_files)} other files, such as {other_files[0]!r}. Choose another `repo_id`."
        )
    if license is None and generator is None:
        raise ValueError("Neither `license` nor `generator` is given, so the license is not known. Pass one of them.")
    card = dataset_card(
        splits={split: count_pairs(data, len(digests[f"pairs/{split}"])) for split, data in pairs.items()},
        rankings=None if rankings is None else count_rankings(rankings, len(digests["rankings/test"])),
        repo_id=repo_id,
        report=report,
        license=License(license) if license is not None else read_license(str(generator), api.token),
        generator=generator,
        is_generators_license=license is None,
    )
    with (
        tempfile.TemporaryDirectory(prefix="paco-trl-publish-") as folder,
        explain_outages(api, "Nothing is lost. Rerun the stage, which only sends what is missing."),
    ):
        pairs_sheet(pairs["train" if "train" in pairs else "test"], f"{folder}/pairs.png")
        if rankings is not None:
            rankings_sheet(rankings, f"{folder}/rankings.png")
        _validate_metadata(api, card)
        if "README.md" in files:
            _clear_other_card(api, repo_id, card)
        for config, splits in configs.items():
            options = {"private": private, "token": api.token, "max_shard_size": max_shard_size}
            splits.push_to_hub(repo_id, config, commit_message=f"Upload {config}", **options)
        _add_pushed_metadata(api, repo_id, card)
        operations = [CommitOperationAdd(f"assets/{path.name}", path) for path in Path(folder).iterdir()]
        operations.append(CommitOperationAdd("README.md", str(card).encode()))
        api.create_commit(repo_id, operations, commit_message="Upload dataset card", repo_type="dataset")
    return f"{api.endpoint}/datasets/{repo_id}"


def _check_splits(configs: Mapping[str, DatasetDict]) -> dict[str, set[str]]:
    """Check the splits of all configurations, also against each other; return the digests of their images."""
    splits_by_name = {
        f"{config}/{split}": data for config, splits in configs.items() for split, data in splits.items()
    }
    for name, dataset in splits_by_name.items():
        if name == "rankings/test":
            check_ranking_columns(dataset, "rankings")
        else:
            check_pair_columns(dataset, name)
    digests = {name: _image_digests(data, name) for name, data in splits_by_name.items()}
    _check_held_out(splits_by_name, digests)
    return digests


def _validate_metadata(api: HfApi, card: DatasetCard) -> None:
    """Let the Hub validate the metadata, which it may otherwise reject after hours of uploads."""
    # `card.validate` only asks huggingface.co
    content = {"content": str(card), "repoType": "dataset"}
    hf_raise_for_status(get_session().post(f"{api.endpoint}/api/validate-yaml", json=content))


def _clear_other_card(api: HfApi, repo_id: str, card: DatasetCard) -> None:
    """Clear the text of another card: after an interrupted upload, it must not describe new data."""
    old_card = _load_card(api, repo_id)
    if old_card.text.strip() not in ("", card.text.strip()):
        old_card.text = ""
        operations = [CommitOperationAdd("README.md", str(old_card).encode())]
        api.create_commit(repo_id, operations, commit_message="Clear the earlier card", repo_type="dataset")


def _add_pushed_metadata(api: HfApi, repo_id: str, card: DatasetCard) -> None:
    """Add the metadata that `push_to_hub` wrote to a card, with `pairs` as the default configuration."""
    pushed = _load_card(api, repo_id).data.to_dict()
    # Not by `set_default`, which is lost when the default configuration is pushed a second time (datasets 5.2)
    for config in pushed["configs"]:
        if config["config_name"] == "pairs":
            config["default"] = True
    card.data = DatasetCardData(**{**pushed, **card.data.to_dict()})


def _load_card(api: HfApi, repo_id: str) -> DatasetCard:
    # `force_download`, or the client returns a cached card while the Hub is down
    return DatasetCard.load(api.hf_hub_download(repo_id, "README.md", repo_type="dataset", force_download=True))


def _image_digests(dataset: Dataset, name: str) -> set[str]:
    """Check that all images of a split open, and return the digests of their files."""
    digests: dict[str | None, str] = {}
    columns = [column for column in ("images", "reference", "candidates") if column in dataset.column_names]
    # As Arrow tables, which have the images as stored, paths or bytes
    tables = dataset.with_format("arrow").select_columns(columns).iter(batch_size=64)
    for row, values in enumerate(values for table in tables for values in table.to_pylist()):
        for image in (image for value in values.values() for image in (value if isinstance(value, list) else [value])):
            with reading(f"An image in row {row} of `{name}`", "Rerun its stage, or leave the row out"):
                if image["bytes"] is not None or image["path"] not in digests:
                    content = image["bytes"] or Path(image["path"]).read_bytes()
                    Image.open(BytesIO(content)).close()
                    key = hashlib.sha256(content).hexdigest()
                    digests[key if image["bytes"] is not None else image["path"]] = key
    return set(digests.values())


def _check_held_out(splits_by_name: Mapping[str, Dataset], digests: Mapping[str, set[str]]) -> None:
    """Check that held-out splits share neither prompts nor images with the training pairs."""
    train = "pairs/train"
    if train not in splits_by_name:
        return
    for name in [split_name for split_name in splits_by_name if split_name != train]:
        prompts = [set(splits_by_name[split_name].with_format(None)["group"][:]) for split_name in (train, name)]
        for kind, overlap in (("prompts", prompts[0] & prompts[1]), ("images", digests[train] & digests[name])):
            if overlap:
                raise ValueError(
                    f"{len(overlap)} {kind} are both in `{train}` and in `{name}`, such as {min(overlap)!r}: a judge "
                    "would be evaluated on its training data. Split again."
                )
