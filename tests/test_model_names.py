# SPDX-License-Identifier: Apache-2.0
"""Names of models: paths that lead nowhere, files and adapters in the place of directories and pipelines."""

import os

import pytest
import torch

from hub_server import HubServer
from paco_trl import PaCoReward, generation
from paco_trl.commands.merge import MergeArguments, merge
from paco_trl.data import load_image_set_prompts
from paco_trl.rewards import ClipTReward
from paco_trl.rollout.adapters import SavedAdapter
from paco_trl.rollout.loading import load_pipeline, read_index
from paco_trl.utils.names import check_model_name


LOADERS = {
    "clip": ClipTReward,
    "judge": PaCoReward.from_pretrained,
    "adapter": lambda name: SavedAdapter.read(name, "base"),
    "pipeline": lambda name: load_pipeline(name, torch.float32),
    "pipeline of a benchmark": lambda name: generation.load_for_inference(name, dtype=torch.float32)[0],
    "merge": lambda name: merge(MergeArguments(name, "merged")),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_a_path_is_no_hub_id(loader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="'./nope'"):
        loader("./nope")
    (tmp_path / "a.safetensors").touch()
    with pytest.raises((FileNotFoundError, ValueError), match="a.safetensors'"):
        loader("a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_name_without_an_owner_is_no_hub_id():
    for loader in LOADERS.values():
        with pytest.raises(FileNotFoundError, match="'o-judg'.* Hub id, `user/name`"):
            loader("o-judg")


@pytest.mark.parametrize("name", ["pipeline", "pipeline of a benchmark"])
def test_a_hub_that_cannot_be_reached(name, tmp_path):
    with pytest.raises(ConnectionError, match=r"model makers/base \(`HF_HUB_OFFLINE` is set\).*Pass a directory"):
        LOADERS[name]("makers/base")
    with HubServer({}) as hub, hub.connected(tmp_path):
        with pytest.raises(OSError, match="not a valid model identifier"):  # it can
            LOADERS[name]("makers/base")
        hub.stop()
        with pytest.raises(ConnectionError, match=r"model makers/base \(.*refused"):
            LOADERS[name]("makers/base")
        hub.start()


@pytest.mark.parametrize(("index", "message"), [("{}", "has no `_class_name`"), ("[", "cannot be read: .*JSON")])
def test_an_index_that_is_none(tmp_path, index, message):
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ValueError, match=f"The model_index.json of '{tmp_path}' {message}"):
        read_index(str(tmp_path), {})


def test_an_empty_name():
    for read in (check_model_name, load_image_set_prompts):
        with pytest.raises(ValueError, match="name of the .* is empty"):
            read("")


def test_what_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("../a", "~/a", "a/b/c", "a.safetensors", "name"):
        with pytest.raises(FileNotFoundError, match="a model. Check the path"):
            check_model_name(name)
    (tmp_path / "tiny-flux").mkdir()
    for name in ("user/name", "tiny-flux", str(tmp_path)):
        check_model_name(name)
    for name in ("tiny-fluxx", "./tinyflux", str(tmp_path / "tiny-flx")):
        with pytest.raises(FileNotFoundError, match=f"Did you mean '{os.path.dirname(name) or ''}.*tiny-flux'"):
            check_model_name(name)
