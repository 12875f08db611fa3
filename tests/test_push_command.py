# SPDX-License-Identifier: Apache-2.0
"""`paco-trl push`: which model of a folder it takes, where it goes, and what it says when it cannot."""

import json
import os
from pathlib import Path

import pytest

from hub_server import HubServer
from paco_trl.commands.main import main
from paco_trl.commands.push import PushArguments, find_saved_model
from paco_trl.hub.files import JUDGE, JUDGE_ADAPTER, PIPELINE_ADAPTER, SETTINGS, TRANSFORMER, published_files_of
from paco_trl.hub.pushing import remember_repository


LOADING = '```python\npipe.load_lora_weights("run")\n```\n'
TOKEN = "hf_rightTokenOfTheTester"


def card(text: str) -> str:
    return f"---\ntags:\n- paco-trl\n---\n{text}"


def save_adapter(folder: Path, text: str, minutes: int = 0, base: str | None = "someone/base") -> Path:
    """Files of a pipeline's adapter, saved at some minute."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        (folder / name).write_text(text)
        os.utime(folder / name, (1e9 + 60 * minutes, 1e9 + 60 * minutes))
    (folder / "README.md").write_text(card(text))
    return folder


def save_checkpoint(output_dir: Path, step: int, minutes: int) -> Path:
    folder = save_adapter(output_dir / f"checkpoint-{step}", f"step {step}", minutes)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "run.json").write_text(json.dumps({"run": {}, "files": files}))
    return folder


class TestWhichModel:
    def test_the_newest(self, tmp_path):
        save_checkpoint(tmp_path, 20, 1)
        latest = save_checkpoint(tmp_path, 100, 2)
        assert find_saved_model(tmp_path) == latest
        save_adapter(tmp_path, "the end", 3)
        assert find_saved_model(tmp_path) == tmp_path
        os.utime(tmp_path / "checkpoint-20" / "README.md")  # touched now
        assert find_saved_model(tmp_path) == tmp_path
        # The run went on after it was saved
        continued = save_checkpoint(tmp_path, 120, 4)
        assert find_saved_model(tmp_path) == continued
        assert find_saved_model(tmp_path / "checkpoint-20") == tmp_path / "checkpoint-20"

    def test_a_checkpoint_that_is_cut_short_is_passed_over(self, tmp_path):
        whole, broken = save_checkpoint(tmp_path, 20, 1), save_checkpoint(tmp_path, 40, 2)
        assert find_saved_model(tmp_path) == broken
        (broken / "adapter_model.safetensors").write_text("st")
        assert find_saved_model(tmp_path) == whole
        with pytest.raises(ValueError, match="or none that is complete"):
            find_saved_model(broken)
        (tmp_path / "none" / "checkpoint-20").mkdir(parents=True)
        for name, token in (("none", "has no saved model"), ("nowhere", "not a directory")):
            with pytest.raises(ValueError, match=token):
                find_saved_model(tmp_path / name)

    def test_kinds(self, tmp_path):
        adapter = save_adapter(tmp_path / "adapter", "")
        assert published_files_of(adapter) is PIPELINE_ADAPTER
        (adapter / "pytorch_lora_weights.safetensors").unlink()
        assert published_files_of(adapter) is JUDGE_ADAPTER
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
        assert published_files_of(adapter) is None
        (tmp_path / "whole" / "transformer").mkdir(parents=True)
        (tmp_path / "whole" / "transformer" / "config.json").touch()
        assert published_files_of(tmp_path / "whole") is TRANSFORMER
        (tmp_path / "judge").mkdir()
        (tmp_path / "judge" / "config.json").touch()
        assert published_files_of(tmp_path / "judge") is None
        (tmp_path / "judge" / "model-00001-of-00002.safetensors").touch()
        assert published_files_of(tmp_path / "judge") is JUDGE


class TestCommand:
    @pytest.fixture
    def hub(self):
        with HubServer({TOKEN: "tester"}) as server:
            yield server

    @pytest.fixture
    def push(self, hub, tmp_path):
        """Runs the command, with clients of this Hub, once for each of some lists of words."""

        def call(*commands: list, token: str | None = TOKEN) -> list[dict]:
            said = []
            for words in commands:
                with hub.connected(tmp_path / "cache", token) as log:
                    code = main(["push", *map(str, words)])
                assert TOKEN not in log.getvalue()
                said.append({"code": code, "said": log.getvalue()})
            return said

        return call

    def test_a_checkpoint_of_a_run_that_was_never_pushed(self, hub, push, tmp_path):
        run = tmp_path / "run"
        folder = save_checkpoint(run, 20, 1)
        (folder / "README.md").write_text(card(LOADING))
        for name in ("me_at_home.png", "curves.png"):  # the second is a picture of the card
            (folder / name).write_text("pixels")
        (folder / "run.json").unlink()  # the card has another length than is written there
        options = ["--hub_model_id", "mine", "--hub_private_repo", "True", "--hub_revision", "try"]
        nowhere, done = push([run], [run, *options])
        assert nowhere["code"] == 1 and "Give `--hub_model_id`" in nowhere["said"]
        assert done["code"] == 0, done
        assert f"{hub.url}/tester/mine" in done["said"]
        files = hub.files("tester/mine", "model", "try")
        saved = {path.name for path in folder.iterdir()}
        (folder / "me_at_home.png").unlink()
        assert {"me_at_home.png", "curves.png"} <= saved
        saved.remove("me_at_home.png")
        assert set(files) == {".gitattributes", *saved}
        assert hub.repos["model", "tester/mine"].private
        assert "Upload model, checkpoint 20" in hub.repos["model", "tester/mine"].titles.values()
        # What it says of loading is true there, and the checkpoint is as it was
        assert files["README.md"].decode() == card(LOADING.replace("run", "tester/mine"))
        assert '"run"' in (folder / "README.md").read_text()
        # The second time it knows where to, also of one checkpoint
        save_checkpoint(run, 40, 2)
        assert [done["code"] for done in push([run], [run / "checkpoint-40"])] == [0, 0]
        assert hub.files("tester/mine", "model", "try")["README.md"].decode() == card("step 40")

    def test_what_waits_goes_first(self, hub, push, tmp_path):
        run = tmp_path / "run"
        remember_repository(run, "tester/mine", None, private=True)
        save_checkpoint(run, 40, 2)
        for step in (20, 40):  # of `hub_strategy="all_checkpoints"`
            waiting = run / ".pushing" / f"{step}-step"
            save_adapter(waiting, f"step {step}")
            save_adapter(waiting / f"checkpoint-{step}", f"step {step}")
            there = {"repo_id": "tester/mine", "revision": None, "message": f"Training in progress, step {step}"}
            (waiting / ".push.json").write_text(json.dumps(there))
        taken = ["--hub_model_id", "tester/taken"]
        hub.add_repo("tester/taken", {"README.md": b"", "letter.txt": b""})
        refused, elsewhere, done = push([run, *taken], [run, "--hub_model_id", "other"], ["--folder", run])
        assert refused["code"] == 1 and "files of something else" in refused["said"]
        # What waits is for the run's own repository, which it stays
        assert elsewhere["code"] == done["code"] == 0
        assert not any(name.startswith("checkpoint-") for name in hub.files("tester/other", "model"))
        # So is what was asked for it
        assert hub.repos["model", "tester/mine"].private and not hub.repos["model", "tester/other"].private
        files = hub.files("tester/mine", "model")
        assert {"checkpoint-20/README.md", "checkpoint-40/README.md"} <= set(files)
        assert files["README.md"].decode() == card("step 40")
        assert sorted(path.name for path in (run / ".pushing").iterdir()) == [".lock", "repository.json"]

    @pytest.mark.parametrize("kind", ["pipeline", "judge", "adapter"])
    def test_what_was_not_saved_here(self, hub, push, tmp_path, kind):
        """A base model, whose name was mistaken for that of a run, would be published, and public."""
        folder = save_adapter(tmp_path / "base", "") if kind == "adapter" else tmp_path / "base"
        weights = folder / {"pipeline": "transformer", "judge": "", "adapter": ""}[kind]
        weights.mkdir(parents=True, exist_ok=True)
        if kind != "adapter":
            (weights / "config.json").write_text("{}")
            (weights / ("model.safetensors" if kind == "judge" else "diffusion_pytorch_model.safetensors")).touch()
        (folder / "README.md").write_text("---\ntags:\n- diffusers\n---\n")
        before = sorted(folder.rglob("*"))
        (refused,) = push([folder, "--hub_model_id", "mine"])
        assert refused["code"] == 1 and "hf upload" in refused["said"]
        assert not hub.repos and sorted(folder.rglob("*")) == before
        (folder / SETTINGS).write_text("{}")  # of an image model, whose card may be gone
        (folder / "README.md").unlink()
        assert push([folder, "--hub_model_id", "mine"])[0]["code"] == 0

    def test_private_but_there_and_public(self, hub, push, tmp_path):
        run = save_adapter(tmp_path / "run", "one")
        (refused,) = push([run, "--hub_model_id", "new"], token=None)
        assert refused["code"] == 1 and "There is no token" in refused["said"] and "Traceback" not in refused["said"]
        assert not hub.repos
        hub.add_repo("tester/open", {"README.md": b""})
        (refused,) = push([run, "--hub_model_id", "open", "--hub_private_repo", "True"])
        assert refused["code"] == 1 and "public" in refused["said"]
        assert set(hub.files("tester/open", "model")) == {"README.md"} and not (run / ".pushing").exists()

    def test_the_folder_anywhere(self, hub, push, tmp_path):
        run = save_adapter(tmp_path / "run", "one")
        done = push(
            ["--hub_private_repo", "True", run, "--hub_model_id", "mine"], [f"--folder={run}"],
            [run], ["--hub_model_id=mine", run],
        )  # fmt: skip
        assert [one["code"] for one in done] == [0] * 4
        # Twice to the same place, and nothing of the client's own about cards
        assert not any("metadata block" in one["said"] for one in done)
        assert [one["code"] for one in push([run, "--hub_private_repo", "True"], ["--folder"])] == [0, 1]


def test_options(capsys):
    assert main(["push", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "push FOLDER" in shown
    for name, field in PushArguments.__dataclass_fields__.items():
        assert f"--{name}" in shown
        assert field.metadata["help"].split(".")[0] in shown
    assert main(["push", "/nowhere", "--hub_token", TOKEN]) == 2  # a token on a command line is seen by others
    shown = capsys.readouterr()
    assert "hf auth login" in shown.err and TOKEN not in shown.out + shown.err
    assert main(["push", "/nowhere"]) == 1
    assert "'/nowhere' is not a directory" in capsys.readouterr().err
