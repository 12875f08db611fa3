# SPDX-License-Identifier: Apache-2.0
"""Images that rows of a dataset name: which are opened, which are refused, and what downloads may take."""

import json

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature

from paco_trl.data import (
    SourceImages,
    load_consistency_rank,
    load_edit_prompts,
    load_image_set_prompts,
    load_paco_dataset,
    make_pair,
    validate_pairs,
)
from paco_trl.data.dataset_files import load_split
from paco_trl.data.pairs import pair_features
from paco_trl.utils.stage_folder import StageFolder, save_with_paths
from paco_trl.utils.vision_language import load_image
from testing_utils import noise, write_image


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_CACHE", "EXTRACTED_DATASETS_PATH", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(f"datasets.config.{name}", tmp_path / "cache" / name)
    return tmp_path / "cache"


def edits_file(folder, image) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "edits.jsonl").write_text(json.dumps({"prompt": "Add a hat.", "image": image}) + "\n")
    return str(folder / "edits.jsonl")


def references_file(folder, image):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sets.jsonl").write_text(json.dumps({"prompt": "A fox.", "references": [image]}) + "\n")
    return folder / "sets.jsonl"


def paco_folder(folder, image):
    folder.mkdir(parents=True, exist_ok=True)
    turns = [{"from": "human", "value": "Are both red?"}, {"from": "gpt", "value": "Yes"}]
    (folder / "own.json").write_text(json.dumps([{"conversations": turns, "images": [image, image]}]))
    return folder


def rank_folder(folder, image):
    folder.mkdir(parents=True, exist_ok=True)
    record = {"folder": "0", "ref_image": image, "comp_images": ["1.png", "2.png"], "rank_images": ["1.png", "2.png"]}
    (folder / "consistency_full_rank.jsonl").write_text(json.dumps(record))
    (folder / "prompt_data.jsonl").write_text(json.dumps({"idx": "0", "prompt": "A fox."}))
    for name in ("1.png", "2.png"):
        write_image(folder / "images" / "0" / name)
    return folder


def saved(folder, image):
    dataset = Dataset.from_list([{"prompt": "Add a hat.", "image": image}])
    save_with_paths(dataset.cast_column("image", ImageFeature()), folder)
    return folder


def pairs_of(image) -> Dataset:
    return Dataset.from_list([make_pair(image, image, "Are both red?", "Yes")], features=pair_features())


def saved_pairs(folder, image):
    save_with_paths(pairs_of(image), folder)
    return folder


LOADERS = {
    "edits": lambda folder, image: load_edit_prompts(edits_file(folder, image))[0]["image"],
    "edits of the Hub": lambda folder, image: load_edit_prompts(saved(folder, image))[0]["image"],
    "references": lambda folder, image: load_image_set_prompts(references_file(folder, image))[0]["references"][0],
    "pairs": lambda folder, image: load_split(saved_pairs(folder, image), "train")[0]["images"][1],
    "PaCo-Dataset": lambda folder, image: load_paco_dataset(paco_folder(folder, image), ["own"])[0]["images"][1],
    "rankings": lambda folder, image: load_consistency_rank(rank_folder(folder, image))[0]["reference"],
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
class TestEveryLoader:
    def test_addresses(self, load, tmp_path):
        for address in ("http://127.0.0.1/a.png", f"file://{write_image(tmp_path / 'a.png')}"):
            with pytest.raises(ValueError, match="is an address"):
                load(tmp_path / "data", address)

    def test_paths(self, load, tmp_path):
        secret = write_image(tmp_path / "secret.png", 3)
        below = "images/0/" if load is LOADERS["rankings"] else ""
        (tmp_path / "data" / below).mkdir(parents=True)
        (tmp_path / "data" / below / "link.png").symlink_to(secret)
        for outside in (secret, "../../../secret.png", "x/../../../../secret.png", "link.png"):
            with pytest.raises(ValueError, match="leaves"):
                load(tmp_path / "data", outside)
        write_image(tmp_path / "data" / below / "a" / "b.png", 4)
        assert np.array_equal(load(tmp_path / "data", "a/b.png"), noise(4))


def test_only_a_download_links_to_blobs(tmp_path):
    """A link into a directory that happens to be called `blobs` would read any file that its owner put there."""
    for parent, is_download in (("snapshots", True), ("versions", False)):
        blob = write_image(tmp_path / parent / "blobs" / "secret.png", 3)
        folder = tmp_path / parent / parent / "commit"
        folder.mkdir(parents=True)
        (folder / "a.png").symlink_to(blob)
        if is_download:
            assert np.array_equal(load_edit_prompts(edits_file(folder, "a.png"))[0]["image"], noise(3))
        else:
            with pytest.raises(ValueError, match="leaves"):
                load_edit_prompts(edits_file(folder, "a.png"))


def test_absolute_paths_inside_stay(tmp_path):
    inside = write_image(tmp_path / "data" / "a.png", 4)
    for dataset in (
        load_split(saved(tmp_path / "data", inside), "train"),
        load_edit_prompts(edits_file(tmp_path / "data", inside)),
        load_edit_prompts(edits_file(tmp_path / "rows", "a.png"), image_folder=tmp_path / "data"),
    ):
        assert np.array_equal(dataset[0]["image"], noise(4))


def test_stages_name_images_of_earlier_stages(tmp_path):
    panels, pairs = StageFolder(tmp_path / "build" / "panels"), StageFolder(tmp_path / "build" / "pairs")
    panels.finish(Dataset.from_dict({"id": ["a"]}), {})
    image = write_image(panels.images / "a" / "0.png", 5)

    def finish(image):
        pairs.finish(DatasetDict({"train": pairs_of(image)}), {})
        dataset = tmp_path / "build" / "pairs" / "dataset"
        assert len(load_split(dataset / "train", "train")) == 1
        return load_split(dataset, "train")

    assert np.array_equal(finish(image)[0]["images"][0], noise(5))
    for outside in (
        write_image(tmp_path / "x.png"),
        write_image(tmp_path / "build" / "x.png"),
        write_image(tmp_path / "build" / "y" / "images" / "x.png"),
    ):
        with pytest.raises(ValueError, match="leaves"):
            finish(outside)


def test_what_was_not_loaded_here_is_not_fetched(tmp_path):
    for named in ("http://127.0.0.1/a.png", f"file://{write_image(tmp_path / 'a.png')}"):
        with pytest.raises(ValueError, match="address"):
            load_image({"bytes": None, "path": named}, 14, "It")
        with pytest.raises(ValueError, match="address"):
            validate_pairs(pairs_of(named))
        with pytest.raises(ValueError, match="address"):
            SourceImages(Dataset.from_dict({"image": [named]}).cast_column("image", ImageFeature()), "it")


def test_a_file_has_one_split_and_a_known_ending(tmp_path):
    """Training and evaluation rows of a judge would be the same."""
    (tmp_path / "rows.jsonl").write_text('{"text": "two"}\n')
    assert load_split(tmp_path / "rows.jsonl", "train")["text"][:] == ["two"]
    (tmp_path / "rows.xml").write_text("<a/>")
    for name, split in (("rows.jsonl", "test"), ("rows.xml", "train")):
        with pytest.raises(ValueError, match=name):
            load_split(tmp_path / name, split)
