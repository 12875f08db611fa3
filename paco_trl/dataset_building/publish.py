# SPDX-License-Identifier: Apache-2.0
"""Publish a built dataset: pairs and rankings as Parquet files with their images inside, and a card."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from ..data.pairs import check_pair_columns
from ..data.rankings import check_ranking_columns
from ..hub.licenses import License, read_license
from .dataset_card import (
    dataset_card,
    describe_pairs,
    describe_rankings,
    pairs_sheet,
    rankings_sheet,
)


if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, DatasetDict
    from huggingface_hub import DatasetCard, HfApi


_PAIRS = "pairs"
_RANKINGS = "rankings"
# What to do when the Hub is down
_REMEDY = "Nothing is lost: run the stage again, and it sends only what has not arrived."
_IMAGE_COLUMNS = {_PAIRS: ["images"], _RANKINGS: ["reference", "candidates"]}


class _ImageFile(NamedTuple):
    """What a file has in it: the digest of its bytes, and its format as Pillow calls it."""

    sha256: str
    format: str


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
    Push pairs and rankings to the Hub, with a card that fills itself in.

    The repository has the configurations `pairs` (the default, with the splits of `pairs`) and `rankings` (split
    `test`), as [`~datasets.DatasetDict.push_to_hub`] writes them: sharded Parquet files that hold the bytes of the
    images. An image is called by the digest of its bytes there. All that can be checked here is checked before anything
    is sent. Data go first and the card last. After an error run it again: what arrived is not sent twice.

    Args:
        pairs ([`~datasets.DatasetDict`]):
            Pairs, in `train`, `test` or both.
        rankings ([`~datasets.Dataset`] or `None`):
            Rankings of prompts that are not in `train`.
        repo_id (`str`):
            Repository, such as `"user/name"`; a name alone is put under the user of the token. It is made if it is not
            there. One that has other files in it is refused.
        report (`Mapping[str, Mapping]`):
            What the stages report. The card lists everything in it that has a value, and knows these keys:

            - `prompts`: `source` (Hub id of where they come from), `model` (that wrote them), `language` (list of ISO
              codes, for the metadata);
            - `grids`: any, such as `num_inference_steps`, `seeds`, `layouts`;
            - `ranking`: what [`agreement_report`] gives, `by` (list of `"people"`, `"judge"`, `"automatic"`), `judges`
              (their names among the annotators) and `excluded` (names of those who are not counted);
            - `pairs`: what [`build_pairs`] reports;
            - `reasons`: `model` (that wrote them), and what [`write_reasons`] reports.
        private (`bool`, *optional*, defaults to `True`):
            Whether the repository is private.
        license (`str`, *optional*):
            Licence, as the Hub names it (`"apache-2.0"`, `"other"`, ...). When left out, that of `generator`, which its
            card on the Hub, or in its folder, names.
        generator (`str`, *optional*):
            Model that drew the images: Hub id or folder.
        token (`str`, *optional*):
            Token that may write to the repository. The one of `hf auth login` when left out.
        max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
            Size of a Parquet file.
        pretty_name (`str`, *optional*):
            Title of the card. The name of the repository when left out.

    Returns:
        `str`: address of the repository.

    Raises:
        TypeError: If `pairs` is no [`~datasets.DatasetDict`].
        ValueError: If pairs or rankings are not in their formats, a split is empty or has another name, an image is
            missing, a prompt or an image is both in `train` and in what is held out, `repo_id` is no such id or has
            something else in it, or the licence is not known.
        PermissionError: If there is no token, or it is wrong, or it may not write there.
        ConnectionError: If the Hub cannot be reached, or an upload does not come to its end.
    """
    from huggingface_hub import HfApi

    from ..hub.account import asking, check_account

    parts = _check_splits(pairs, rankings)
    known: dict[str, _ImageFile] = {}  # by path
    digests = {part: _check_images(dataset, part, known) for part, dataset in parts.items()}
    _check_held_out(parts, digests)
    api = HfApi(token=token, library_name="paco_trl")
    repo_id = check_account(api, repo_id)
    earlier = _check_repository(api, repo_id, private, rankings is not None)
    found = License(license) if license is not None else _find_license(generator, api.token)

    with tempfile.TemporaryDirectory(prefix="paco-trl-publish-") as folder:
        pictures = _draw_pictures(parts, Path(folder))
        card = dataset_card(
            {
                split: describe_pairs(parts[name, split], len(digests[name, split]))
                for name, split in parts
                if name == _PAIRS
            },
            describe_rankings(rankings, len(digests[_RANKINGS, "test"])) if rankings is not None else None,
            repo_id,
            report,
            found,
            generator,
            license is None,
            pretty_name,
            list(pictures),
        )
        _check_card(api, card, found)
        links = _link_images(known, Path(folder) / "images")
        named = {part: _with_names(dataset, part[0], links) for part, dataset in parts.items()}
        with asking(api, repo_id, _REMEDY):
            _push(api, repo_id, named, card, pictures, private, max_shard_size, is_update=earlier)
    return f"{api.endpoint}/datasets/{repo_id}"


def _check_splits(pairs: "DatasetDict", rankings: "Dataset | None") -> dict[tuple[str, str], "Dataset"]:
    """Check the formats; give each split by the names of its configuration and its own."""
    from datasets import DatasetDict

    if not isinstance(pairs, DatasetDict):
        raise TypeError(
            f"`pairs` is a `{type(pairs).__name__}`, but must be a `datasets.DatasetDict` of the splits `train`, `test` "
            'or both: `DatasetDict({"train": dataset})`.'
        )
    if not pairs or not set(pairs) <= {"train", "test"}:
        raise ValueError(f"`pairs` has the splits {list(pairs)}, but must have `train`, `test` or both. Rename them.")
    for split, dataset in pairs.items():
        check_pair_columns(dataset, f'pairs["{split}"]')
    parts = {(_PAIRS, split): pairs[split] for split in ("train", "test") if split in pairs}
    if rankings is not None:
        check_ranking_columns(rankings, "rankings")
        parts[_RANKINGS, "test"] = rankings
    return parts


def _name_of(part: tuple[str, str]) -> str:
    return f'pairs["{part[1]}"]' if part[0] == _PAIRS else "rankings"


def _stored_images(table: "pa.Table", column: str) -> list[list[dict[str, Any] | None]]:
    """The images of each row, as they are stored: bytes and path."""
    return [value if isinstance(value, list) else [value] for value in table.column(column).to_pylist()]


def _check_images(dataset: "Dataset", part: tuple[str, str], known: dict[str, _ImageFile]) -> set[str]:
    """Check that all images are there and open; give their digests. What is in each file goes into `known`."""
    columns, row, digests = _IMAGE_COLUMNS[part[0]], 0, set()
    with tqdm(total=len(dataset), desc=f"Checking images of {_name_of(part)}", unit="row") as bar:
        for batch in dataset.with_format("arrow").select_columns(columns).iter(batch_size=64):
            for column in columns:
                for offset, images in enumerate(_stored_images(batch, column)):
                    where = f"`{column}` of row {row + offset} of `{_name_of(part)}`"
                    digests.update(_check_image(image, where, known) for image in images)
            row += len(batch)
            bar.update(len(batch))
    return digests


def _check_image(image: Mapping[str, Any] | None, where: str, known: dict[str, _ImageFile]) -> str:
    from PIL import Image

    remedy = "Run the stage that made it again, or leave the row out."
    if image is None or image["bytes"] is None and not image["path"]:
        raise ValueError(f"{where} has an image that is missing (None). {remedy}")
    if image["bytes"] is None and image["path"] in known:
        return known[image["path"]].sha256
    try:
        content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
        with Image.open(BytesIO(content)) as opened:
            found = _ImageFile(hashlib.sha256(content).hexdigest(), opened.format)
    except FileNotFoundError as error:
        raise ValueError(f"{where} is the file {image['path']}, which does not exist. {remedy}") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        name = f"the file {image['path']}" if image["bytes"] is None else "an embedded image"
        raise ValueError(
            f"{where} is {name}, which does not open: {type(error).__name__}: {error}. {remedy}"
        ) from error
    if image["bytes"] is None:
        known[image["path"]] = found
    return found.sha256


def _check_held_out(parts: Mapping[tuple[str, str], "Dataset"], digests: Mapping[tuple[str, str], set[str]]) -> None:
    """Check that what is held out has no prompt and no image of the pairs to train on."""
    train = (_PAIRS, "train")
    others = [part for part in parts if part != train and train in parts]
    for part in others:
        missing = [_name_of(one) for one in (train, part) if "group" not in parts[one].column_names]
        if missing:
            raise ValueError(
                f"`{missing[0]}` has no column `group`, which names the prompt: nobody could tell whether the same "
                "prompts are in what is trained on and what is held out. Add it."
            )
        contents = {
            "prompts": [set(parts[one].with_format(None)["group"][:]) for one in (train, part)],
            "images": [digests[one] for one in (train, part)],
        }
        for what, (trained, held_out) in contents.items():
            shared = sorted(trained & held_out)
            if shared:
                raise ValueError(
                    f"{len(shared)} {what} are both in `{_name_of(train)}` and in `{_name_of(part)}`, such as "
                    f"{shared[0]!r}: a judge could be measured on what it was trained on. Make the split anew."
                )


def _check_repository(api: "HfApi", repo_id: str, private: bool, has_rankings: bool) -> bool:
    """Check that the repository is free, or has an earlier state of the same; tell whether it is there."""
    from huggingface_hub.errors import RepositoryNotFoundError

    from ..hub.account import asking

    with asking(api, repo_id, _REMEDY):
        try:
            info = api.dataset_info(repo_id)
        except RepositoryNotFoundError:
            return False
    ours = {".gitattributes", "README.md", "assets", _PAIRS, *([_RANKINGS] if has_rankings else [])}
    others = sorted(name.rfilename for name in info.siblings if name.rfilename.split("/")[0] not in ours)
    if others:
        raise ValueError(
            f"The repository {repo_id} has {len(others)} files that are not part of what is published, such as "
            f"{others[0]!r}: the card would not tell of them. Give another `repo_id`, or delete them there."
        )
    if private and not info.private:
        raise ValueError(
            f"`private` is True, but the repository {repo_id} is there and public. Make it private in its settings, or "
            "set `private` to False."
        )
    return True


def _find_license(generator: str | None, token: str | bool | None) -> License:
    """Give the licence that the card of the generating model names."""
    remedy = (
        'Set `license` to what the images may be published under, such as "apache-2.0", or "other" for a licence that the '
        "Hub has no name of."
    )
    if generator is None:
        raise ValueError(f"Neither `license` nor `generator` is given, so that the licence is not known. {remedy}")
    try:
        return read_license(generator, token)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from error


def _draw_pictures(parts: Mapping[tuple[str, str], "Dataset"], folder: Path) -> dict[str, Path]:
    """Draw what the card shows; give the files by their names."""
    pictures = {"pairs.png": folder / "pairs.png"}
    pairs_sheet(next(iter(parts.values())), pictures["pairs.png"])
    if (_RANKINGS, "test") in parts:
        pictures["rankings.png"] = folder / "rankings.png"
        rankings_sheet(parts[_RANKINGS, "test"], pictures["rankings.png"])
    return pictures


def _check_card(api: "HfApi", card: "DatasetCard", license: License) -> None:
    """Let the Hub check the metadata, which it would otherwise refuse after hours of uploads."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    from ..hub.account import asking

    with asking(api, "the check of cards", _REMEDY):
        # Not `card.validate`, which asks huggingface.co, whatever the endpoint (huggingface_hub 1)
        content = {"content": str(card), "repoType": "dataset"}
        response = get_session().post(f"{api.endpoint}/api/validate-yaml", json=content)
        if response.status_code != 400:
            hf_raise_for_status(response)
            return
    raise ValueError(
        f"{api.endpoint} does not take the metadata of the card: {' '.join(response.text.split())}. If it is the licence "
        f'({license.identifier!r}), set `license` to one that the Hub knows, or to "other"; if it is the language, '
        "correct `language` in the report of the prompts."
    )


def _link_images(known: Mapping[str, _ImageFile], folder: Path) -> dict[str, str]:
    """Give each image file a second name, its digest, without a copy: `datasets` stores the name beside the bytes."""
    folder.mkdir()
    links = {}
    for path, found in known.items():
        link = folder / f"{found.sha256[:32]}.{found.format.lower()}"
        links[path] = str(link)
        if link.exists():
            continue
        try:
            link.symlink_to(os.path.abspath(path))
        except OSError:  # Windows lets only administrators and developers make links
            shutil.copyfile(path, link)
    return links


def _rename(table: "pa.Table", columns: list[str], links: Mapping[str, str]) -> "pa.Table":
    import pyarrow as pa

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(image) for image in value]
        return value if value["bytes"] is not None else {"bytes": None, "path": links[value["path"]]}

    for column in columns:
        place = table.schema.get_field_index(column)
        values = [renamed(value) for value in table.column(column).to_pylist()]
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    return table


def _with_names(dataset: "Dataset", name: str, links: Mapping[str, str]) -> "Dataset":
    """The dataset with the second names of its image files. Texts only: no image is read."""
    if not links:  # all images are embedded
        return dataset
    renamed = dataset.with_format("arrow").map(
        _rename,
        batched=True,
        features=dataset.features,
        fn_kwargs={"columns": _IMAGE_COLUMNS[name], "links": links},
        keep_in_memory=True,
        desc="Naming images",
    )
    return renamed.with_format(None)


def _push(
    api: "HfApi",
    repo_id: str,
    parts: Mapping[tuple[str, str], "Dataset"],
    card: "DatasetCard",
    pictures: Mapping[str, Path],
    private: bool,
    max_shard_size: int | str,
    is_update: bool,
) -> None:
    """Data first, the card last: at no time does the card tell of more than is there."""
    from datasets import DatasetDict
    from huggingface_hub import CommitOperationAdd, DatasetCardData

    if is_update:
        earlier = _load_card(api, repo_id)
        if earlier is not None and earlier.text.strip() not in ("", card.text.strip()):
            earlier.text = ""
            _commit(
                api, repo_id, [CommitOperationAdd("README.md", str(earlier).encode())], "New data are on their way"
            )
    for name in dict.fromkeys(name for name, _ in parts):
        splits = DatasetDict({split: dataset for (of, split), dataset in parts.items() if of == name})
        splits.push_to_hub(
            repo_id,
            name,
            commit_message=f"Upload {name}",
            private=private,
            token=api.token,
            max_shard_size=max_shard_size,
        )
    pushed = _load_card(api, repo_id)
    # Not by `set_default`: pushed a second time, the default configuration is no default any more (datasets 5.2)
    configs = [
        {**config, "default": True} if config["config_name"] == _PAIRS else config for config in pushed.data["configs"]
    ]
    card.data = DatasetCardData(**{**pushed.data.to_dict(), "configs": configs, **card.data.to_dict()})
    operations = [CommitOperationAdd(f"assets/{name}", path) for name, path in pictures.items()]
    operations.append(CommitOperationAdd("README.md", str(card).encode()))
    _commit(api, repo_id, operations, "Upload dataset card")


def _commit(api: "HfApi", repo_id: str, operations: list[Any], message: str) -> None:
    api.create_commit(repo_id, operations, commit_message=message, repo_type="dataset")


def _load_card(api: "HfApi", repo_id: str) -> "DatasetCard | None":
    """The card as it is on the Hub now: not one of the cache, which clients fall back to when the Hub is down."""
    from huggingface_hub import DatasetCard
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with tempfile.TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(
                repo_id, "README.md", repo_type="dataset", local_dir=folder, force_download=True
            )
        except RemoteEntryNotFoundError:
            return None
        return DatasetCard.load(path)
