# SPDX-License-Identifier: Apache-2.0
"""`paco-trl push`: which model of a folder it takes, where it goes, and what it says when it cannot."""

import json
import os
from pathlib import Path

import pytest

from hub_server import TOKEN, HubServer
from paco_trl.checkpointing.checkpoints import find_saved_model
from paco_trl.commands.main import main
from paco_trl.commands.push import PushArguments
from paco_trl.hub.card_data import ImageModelCardData, save_card_data
from paco_trl.hub.cards import render_card, save_card
from paco_trl.hub.files import JUDGE, JUDGE_ADAPTER, PIPELINE_ADAPTER, TRANSFORMER, find_published_patterns
from paco_trl.hub.pushing import reset_push_dir
from paco_trl.utils.model_files import CARD_DATA_FILE


def card_of(title: str, repo_id: str = "run", **fields) -> ImageModelCardData:
    return ImageModelCardData(title, repo_id, "someone/base", **fields)


def save_adapter(folder: Path, text: str, step: int = 0, **fields) -> Path:
    """Files of a pipeline's adapter, as an earlier version recorded it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        (folder / name).write_text(text)
    save_card(card_of(text, settings={"optimizer_steps": step}, **fields), folder)
    return folder


def save_checkpoint(output_dir: Path, step: int, **fields) -> Path:
    folder = save_adapter(output_dir / f"checkpoint-{step}", f"step {step}", step, **fields)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "run.json").write_text(json.dumps({"run": {}, "files": files}))
    return folder


class TestWhichModel:
    def test_the_newest(self, tmp_path):
        save_checkpoint(tmp_path, 20)
        latest = save_checkpoint(tmp_path, 100)
        assert find_saved_model(tmp_path) == latest
        save_adapter(tmp_path, "the end", 100)
        assert find_saved_model(tmp_path) == tmp_path
        # The run went on after it was saved
        continued = save_checkpoint(tmp_path, 120)
        assert find_saved_model(tmp_path) == continued
        assert find_saved_model(tmp_path / "checkpoint-20") == tmp_path / "checkpoint-20"

    @pytest.mark.parametrize(("steps", "saved"), [(80, "after"), (200, "before")])
    def test_the_dates_of_a_copy_say_nothing(self, tmp_path, steps, saved):
        """The best weights of a run are of an earlier step; a run that was begun anew has made fewer steps."""
        dates = {"before": "2026-01-01T10:00:00.000+00:00", "after": "2026-01-01T12:00:00.000+00:00"}
        checkpoint = save_checkpoint(tmp_path, 100, saved_at="2026-01-01T11:00:00.000+00:00")
        save_adapter(tmp_path, "the end", steps, saved_at=dates[saved])
        newest = {"before": checkpoint, "after": tmp_path}[saved]
        for touched in (checkpoint, tmp_path):
            for path in touched.glob("*.*"):
                os.utime(path)
            assert find_saved_model(tmp_path) == newest

    def test_a_checkpoint_that_is_cut_short_is_passed_over(self, tmp_path):
        whole, broken = save_checkpoint(tmp_path, 20), save_checkpoint(tmp_path, 40)
        assert find_saved_model(tmp_path) == broken
        (broken / "adapter_model.safetensors").write_text("st")
        assert find_saved_model(tmp_path) == whole
        (tmp_path / "none" / "checkpoint-20").mkdir(parents=True)
        for folder in (broken, tmp_path / "none", tmp_path / "nowhere"):
            with pytest.raises(ValueError, match=folder.name):
                find_saved_model(folder)

    def test_kinds(self, tmp_path):
        adapter = save_adapter(tmp_path / "adapter", "")
        assert find_published_patterns(adapter) is PIPELINE_ADAPTER
        (adapter / "pytorch_lora_weights.safetensors").unlink()
        assert find_published_patterns(adapter) is JUDGE_ADAPTER
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
        assert find_published_patterns(adapter) is None
        (tmp_path / "whole" / "transformer").mkdir(parents=True)
        (tmp_path / "whole" / "transformer" / "config.json").touch()
        assert find_published_patterns(tmp_path / "whole") is TRANSFORMER
        (tmp_path / "judge").mkdir()
        (tmp_path / "judge" / "config.json").touch()
        assert find_published_patterns(tmp_path / "judge") is None
        (tmp_path / "judge" / "model-00001-of-00002.safetensors").touch()
        assert find_published_patterns(tmp_path / "judge") is JUDGE


class TestCommand:
    @pytest.fixture
    def hub(self):
        with HubServer({TOKEN: "tester"}) as server:
            yield server

    @pytest.fixture
    def push(self, hub, tmp_path):
        """Runs the command with clients of this Hub; returns its exit code and what it printed."""

        def call(*words, token: str | None = TOKEN) -> tuple[int, str]:
            outcome = hub.call(tmp_path / "cache", main, ["push", *map(str, words)], client_token=token)
            return outcome["result"], outcome["log"]

        return call

    def test_a_checkpoint_of_a_run_that_was_never_pushed(self, hub, push, tmp_path):
        run = tmp_path / "run"
        folder = save_checkpoint(run, 20)
        for name in ("me_at_home.png", "curves.png"):  # the second is a picture of the card
            (folder / name).write_text("pixels")
        with (folder / "README.md").open("a") as readme:
            readme.write("Written by hand.\n")
        (folder / "run.json").unlink()  # the card has another length than is written there
        code, said = push(run)
        assert code == 1 and "--hub_model_id" in said
        code, said = push(run, "--hub_model_id", "mine", "--private", "True", "--hub_revision", "try")
        assert code == 0 and f"{hub.url}/tester/mine" in said
        assert "uploading to tester/mine what is in '" in said and "adapter_model.safetensors, curves.png, " in said
        assert "me_at_home.png" not in said and "run.json" not in said
        assert "metadata block" not in said  # nothing of the client's own about cards
        files = hub.files("tester/mine", "model", "try")
        assert set(files) == {".gitattributes", *(path.name for path in folder.iterdir())} - {"me_at_home.png"}
        assert hub.repos["model", "tester/mine"].private
        assert "Upload model, checkpoint 20" in hub.repos["model", "tester/mine"].titles.values()
        # What it says of loading is true there, what was added stays, and the checkpoint is as it was
        there = str(render_card(card_of("step 20", "tester/mine", settings={"optimizer_steps": 20})))
        assert files["README.md"].decode() == f"{there}Written by hand.\n"
        assert json.loads(files[CARD_DATA_FILE])["repo_id"] == "tester/mine"
        assert 'load_lora_weights("run")' in (folder / "README.md").read_text()
        # The second time it knows where to, also of one checkpoint
        save_checkpoint(run, 40)
        assert push(run)[0] == push(run / "checkpoint-40")[0] == 0
        there = str(render_card(card_of("step 40", "tester/mine", settings={"optimizer_steps": 40})))
        assert hub.files("tester/mine", "model", "try")["README.md"].decode() == there

    def test_what_was_asked_for_one_repository_is_not_for_another(self, hub, push, tmp_path):
        run = tmp_path / "run"
        reset_push_dir(run, "tester/mine", None, private=True)
        save_checkpoint(run, 40)
        hub.add_repo("tester/taken", {"README.md": b"", "letter.txt": b""})
        code, said = push(run, "--hub_model_id", "tester/taken")
        assert code == 1 and "other files" in said
        assert push(run, "--hub_model_id", "other")[0] == push("--folder", run)[0] == 0
        assert hub.repos["model", "tester/mine"].private and not hub.repos["model", "tester/other"].private
        assert b"# step 40" in hub.files("tester/mine", "model")["README.md"]
        assert sorted(path.name for path in (run / ".pushing").iterdir()) == ["repository.json"]

    @pytest.mark.parametrize("kind", ["pipeline", "judge", "adapter"])
    def test_what_was_not_saved_here(self, hub, push, tmp_path, kind):
        """A base model, whose name was mistaken for that of a run, would be published, and public."""
        folder = save_adapter(tmp_path / "base", "") if kind == "adapter" else tmp_path / "base"
        if kind != "adapter":
            weights = folder / "transformer" if kind == "pipeline" else folder
            weights.mkdir(parents=True)
            (weights / "config.json").write_text("{}")
            (weights / ("model.safetensors" if kind == "judge" else "diffusion_pytorch_model.safetensors")).touch()
        (folder / "README.md").write_text("---\ntags:\n- paco-trl\n---\n")
        (folder / CARD_DATA_FILE).unlink(missing_ok=True)
        before = sorted(folder.rglob("*"))
        code, said = push(folder, "--hub_model_id", "mine")
        assert code == 1 and "hf upload" in said
        assert not hub.repos and sorted(folder.rglob("*")) == before
        (folder / "README.md").unlink()
        save_card_data(card_of("mine"), folder)
        assert push(folder, "--hub_model_id", "mine")[0] == 0
        assert b'("tester/mine")' in hub.files("tester/mine", "model")["README.md"]

    def test_refused_before_anything_is_written(self, hub, push, tmp_path):
        run = save_adapter(tmp_path / "run", "one")
        for words, message in (
            ((run,), "has no repository yet. Pass `--hub_model_id user/name`"),  # what needs no token is said first
            ((tmp_path, "--hub_model_id", "new"), "has no complete saved model"),
            ((run, "--hub_model_id", "new"), "There is no token of the Hub. Log in with `hf auth login`"),
        ):
            code, said = push(*words, token=None)
            assert code == 1 and message in said
            assert len(said.splitlines()) == 1
        assert not hub.repos and not (run / ".pushing").exists()


def test_options(capsys):
    assert main(["push", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "push FOLDER" in shown
    assert all(f"--{name}" in shown for name in PushArguments.__dataclass_fields__ if name != "folder")
    assert main(["push", "/nowhere", "--hub_token", TOKEN]) == 1
    shown = capsys.readouterr()
    assert "`--hub_token`" in shown.err and TOKEN not in shown.out + shown.err
