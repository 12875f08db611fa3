# SPDX-License-Identifier: Apache-2.0
"""What belongs to the user: nothing is removed, overwritten or read that is not the package's own."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from accelerate import PartialState
from datasets import Dataset

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.commands.main import main
from paco_trl.data import make_pair, theme_question
from paco_trl.evaluation.judge_report import save_report
from paco_trl.hub import ImageModelCardData, load_card_data, save_card
from paco_trl.hub.files import JUDGE, PIPELINE_ADAPTER, TRANSFORMER, find_published_patterns, select_files
from paco_trl.rewards import redness_reward
from paco_trl.utils.files import new_folder, write_atomically
from paco_trl.utils.stage_folder import StageFolder
from testing_utils import LORA, SMALL_RUN, files_in, noise, plain


FOREIGN = ["README.md", *(f"images/{n}.png" for n in range(10)), "contact_sheet.png", "curves.png", "evaluation.png"]


def plant(folder: Path, *names: str) -> dict[str, bytes]:
    """Plant files of a user's; return all that is there."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"my own {name}")
    return files_in(folder)


@pytest.fixture(scope="module")
def trained(tiny_flux, prompts, tmp_path_factory):
    """A run of one step that was saved, with a checkpoint."""
    settings = {
        "log_completions": True,
        "plot_curves": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 1,
    }
    args = PaCoGRPOConfig(str(tmp_path_factory.mktemp("runs") / "run"), **SMALL_RUN | settings)
    trainer = PaCoGRPOTrainer(str(tiny_flux), redness_reward, args, prompts, peft_config=LORA)
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture(scope="module")
def make_judge(tiny_qwen):
    pairs = [make_pair(plain(20 * n), noise(n), theme_question("a fox"), bool(n % 2), None) for n in range(2)]
    dataset = Dataset.from_list(pairs)

    def make(output_dir: Path, model: Path = tiny_qwen, **settings) -> PaCoRewardTrainer:
        settings |= {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_steps": 1}
        return PaCoRewardTrainer(
            str(model), PaCoRewardConfig(str(output_dir), per_device_train_batch_size=2, **settings), dataset
        )

    return make


class TestSaving:
    @pytest.mark.parametrize("name", [*FOREIGN[:2], *FOREIGN[-3:], "adapter_model.safetensors", "paco_trl.json"])
    def test_a_folder_of_the_users_is_refused_before_anything_is_written(self, trained, tmp_path, name):
        before = plant(tmp_path, "images/mine.png", "main.py", name)
        with pytest.raises(ValueError, match=name):
            trained.save_model(tmp_path)
        assert files_in(tmp_path) == before
        (tmp_path / name).unlink()
        before.pop(name)
        trained.save_model(tmp_path)
        assert before.items() <= files_in(tmp_path).items()

    def test_all_are_named(self, trained, tmp_path):
        before = plant(tmp_path, *FOREIGN)
        with pytest.raises(ValueError, match=r"README.md, contact_sheet.png, .*images/0.png.*Move"):
            trained.save_model(tmp_path)
        assert files_in(tmp_path) == before

    def test_saved_again_where_it_was_saved(self, trained, tmp_path):
        folder, outside = tmp_path / "model", tmp_path / "outside.png"
        for where in (None, folder):
            trained.save_model(where)
        assert (Path(trained.args.output_dir) / "curves.png").exists()  # where it was plotted
        # As an earlier version listed it, with a picture that the card no longer has, and by somebody else
        settings = json.loads((folder / "paco_trl.json").read_text())
        settings["pictures"] += ["evaluation.png", "images/mine.png", "../outside.png"]
        (folder / "paco_trl.json").write_text(json.dumps(settings))
        before = plant(folder, "images/mine.png", "images/8.png", "evaluation.png")
        outside.write_text("mine")
        trained.save_model(folder)
        after = files_in(folder)
        assert before.keys() - after.keys() == {"evaluation.png"} and outside.exists()
        assert all(after[name] == before[name] for name in ("images/mine.png", "images/8.png"))
        (folder / "images/0.png").unlink()
        trained.save_model(folder)
        again = files_in(folder)
        assert again.keys() == after.keys() and again["images/0.png"] == after["images/0.png"]

    def test_a_model_of_another_kind_is_replaced(self, trained, make_trainer, tmp_path):
        """What was left of it would be pushed, or loaded, in place of the new one."""
        folder = tmp_path / "model"
        full = make_trainer(peft_config=None, output_dir=str(tmp_path / "full"))
        mine = plant(folder, "transformer/notes.txt", "config.json")
        for trainer, kind, others in (
            (trained, PIPELINE_ADAPTER, TRANSFORMER), (full, TRANSFORMER, PIPELINE_ADAPTER),
            (trained, PIPELINE_ADAPTER, TRANSFORMER),
        ):  # fmt: skip
            trainer.save_model(folder)
            assert find_published_patterns(folder) is kind
            weights = {*select_files(folder, others)} - {*select_files(folder, kind)}
            assert not weights, weights
        assert {name: files_in(folder)[name] for name in mine} == mine
        save_card(load_card_data(folder), folder)  # no model
        assert find_published_patterns(folder) is PIPELINE_ADAPTER

    def test_what_was_written_into_the_card(self, trained, tmp_path, caplog):
        folder = tmp_path / "model"
        card, copy = folder / "README.md", folder / "README.before-1.md"
        for _ in range(2):
            trained.save_model(folder)
        assert not copy.exists() and not caplog.messages
        for number in (1, 2):
            rendered = card.read_text()
            card.write_text(edited := f"{rendered}\nMy own words {number}.\n")
            for _ in range(2):
                trained.save_model(folder)
            assert card.read_text() == rendered
            assert (folder / f"README.before-{number}.md").read_text() == edited
        card.write_bytes(latin := "J'ai ajouté cela.".encode("latin-1"))
        trained.save_model(folder)
        assert (folder / "README.before-3.md").read_bytes() == latin
        assert len([message for message in caplog.messages if "keeps it" in message]) == 3

    def test_a_card_that_shows_a_path_was_not_edited(self, tmp_path, monkeypatch, caplog):
        """The data have the last part of the base model's path only."""
        (tmp_path / "models" / "base").mkdir(parents=True)
        (tmp_path / "models" / "base" / "model_index.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        card = ImageModelCardData("run", "run", str(tmp_path / "models" / "base"))
        for _ in range(2):
            save_card(card, "run")
        assert '"models/base"' in Path("run/README.md").read_text()
        assert load_card_data("run").base_model == "base"
        assert not list(Path("run").glob("README.before-*")) and not caplog.messages
        # A script has no accelerator
        monkeypatch.setattr(PartialState, "_shared_state", {})
        Path("run/README.md").write_text("Mine.")
        save_card(card, "run")
        assert Path("run/README.before-1.md").read_text() == "Mine."
        assert [message.partition(" ")[0] for message in caplog.messages] == ["'run/README.md'"]

    def test_a_card_with_unreadable_data_is_kept_too(self, trained, tmp_path):
        """After an upgrade, for example: the check before training passes, and saving must not fail hours later."""
        folder = tmp_path / "model"
        trained.save_model(folder)
        rendered = (folder / "README.md").read_text()
        data = json.loads((folder / "paco_trl.json").read_text())
        (folder / "paco_trl.json").write_text(json.dumps(data | {"gone": 1}))
        with pytest.raises(ValueError, match="cannot be read"):
            load_card_data(folder)
        trained.save_model(folder)
        assert load_card_data(folder) and (folder / "README.before-1.md").read_text() == rendered

    def test_a_directory_that_is_filled_meanwhile(self, tmp_path):
        with (
            pytest.raises(OSError, match="The result is in '.*new-.*'") as raised,
            new_folder(tmp_path / "new") as staged,
        ):
            (staged / "result").write_text("of hours")
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "mine").touch()
        (kept,) = tmp_path.glob("new-*")
        assert (kept / "result").read_text() == "of hours" and str(kept) in str(raised.value)

    def test_beside_what_was_saved(self, trained, tmp_path):
        trained.save_model(tmp_path / "model")
        before = plant(tmp_path / "model", "evaluation.png")
        with pytest.raises(ValueError, match="has evaluation.png, which"):
            trained.save_model(tmp_path / "model")
        assert files_in(tmp_path / "model") == before
        plant(tmp_path / "other", "README.md")
        (tmp_path / "other" / "paco_trl.json").write_text('{"name": "of another program"}')
        with pytest.raises(ValueError, match=r"README.md, paco_trl.json"):
            trained.save_model(tmp_path / "other")

    def test_what_an_upload_links_to_stays(self, trained, tmp_path):
        trained.save_model(tmp_path / "model")
        names = [name for name in files_in(tmp_path / "model") if "/" not in name]
        for name in names:
            os.link(tmp_path / "model" / name, tmp_path / name)
        before = {name: (tmp_path / name).read_bytes() for name in names}
        trained.save_model(tmp_path / "model", use_ema=False)
        trained.create_model_card(model_name="another")
        assert {name: (tmp_path / name).read_bytes() for name in names} == before
        assert files_in(tmp_path / "model")["README.md"] != before["README.md"]

    def test_a_group_can_read_what_the_umask_allows(self, make_trainer, tmp_path):
        before = os.umask(0o002)
        try:
            trainer = make_trainer(output_dir=str(tmp_path / "run"), max_steps=1, save_strategy="steps", save_steps=1)
            trainer.train()
            trainer.save_model()
        finally:
            os.umask(before)
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert len([path for path in files if path.suffix == ".safetensors"]) >= 5
        assert {path: oct(path.stat().st_mode) for path in files if path.stat().st_mode & 0o666 != 0o664} == {}

    def test_a_card_by_hand(self, tmp_path):
        before, card = plant(tmp_path, "README.md", "evaluation.png"), ImageModelCardData("a", "a", "user/base")
        with pytest.raises(ValueError, match=r"README\.md"):
            save_card(card, tmp_path)
        assert files_in(tmp_path) == before
        (tmp_path / "README.md").unlink()
        for _ in range(2):
            save_card(card, tmp_path)
        assert files_in(tmp_path)["evaluation.png"] == before["evaluation.png"]

    def test_a_judge(self, make_judge, tmp_path):
        trainer = make_judge(tmp_path / "run")
        before = plant(tmp_path / "mine", "tokenizer.json", "eval_calibration.png")
        with pytest.raises(ValueError, match=r"eval_calibration.png, tokenizer.json"):
            trainer.save_model(tmp_path / "mine")
        assert files_in(tmp_path / "mine") == before
        trainer.save_model(tmp_path / "new")
        trainer.save_model(tmp_path / "new")

    @pytest.mark.parametrize(
        "patterns, stem", [(TRANSFORMER, "transformer/diffusion_pytorch_model"), (JUDGE, "model")]
    )
    def test_copies_of_weights_are_not_what_was_saved(self, tmp_path, patterns, stem):
        endings = (".safetensors", "-00001-of-00002.safetensors", ".safetensors.index.json")
        plant(
            tmp_path,
            *(f"{stem}{end}" for end in [*endings, "_old.safetensors", ".backup.safetensors", "s.safetensors"]),
        )
        assert select_files(tmp_path, patterns).keys() == {f"{stem}{end}" for end in endings}

    def test_a_push(self, trained, monkeypatch):
        folder = Path(trained.args.output_dir)
        monkeypatch.setattr(trained, "init_hf_repo", lambda *args: pytest.fail("a repository was made"))
        (folder / "README.md").unlink()
        (folder / "paco_trl.json").rename(folder / "away")
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            trained.push_to_hub()
        (folder / "away").rename(folder / "paco_trl.json")


def index_alone(folder: Path) -> Path:
    """A pipeline that cannot be loaded."""
    plant(folder, "pipeline/model_index.json")
    (folder / "pipeline" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    return folder / "pipeline"


def config_alone(folder: Path) -> Path:
    """A judge that cannot be loaded."""
    plant(folder, "judge/config.json")
    (folder / "judge" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    return folder / "judge"


class TestStart:
    """Before a model is loaded: there is none."""

    KINDS = ("grpo", "nft", "reward")

    def start(self, kind: str, folder: Path, *words: str) -> int:
        (folder.parent / "p.txt").write_text("a fox\na hare\n")
        data = [] if kind == "reward" else ["--dataset_name", str(folder.parent / "p.txt")]
        model = config_alone(folder.parent) if kind == "reward" else index_alone(folder.parent)
        words = ("--model_name_or_path", str(model), *words)
        return main([kind, "--output_dir", str(folder), "--use_cpu", *data, *words])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["README.md", "checkpoint-7/model.safetensors"])
    def test_files_of_the_users(self, tmp_path, capsys, kind, name):
        before = plant(tmp_path / "run", name)
        for words in ([], ["--overwrite_output_dir"], ["--resume_from_checkpoint", "auto"]):
            assert self.start(kind, tmp_path / "run", *words) == 1
            assert name.split("/")[0] in capsys.readouterr().err
            assert files_in(tmp_path / "run") == before

    @pytest.mark.parametrize("name", ["contact_sheet.png", "curves.csv", "contact_sheets/round_00000.png", "run.json"])
    def test_what_a_run_would_write(self, make_trainer, tmp_path, name):
        plant(tmp_path / "run", name)
        with pytest.raises(ValueError, match=name):
            make_trainer(model=str(index_alone(tmp_path)), output_dir=str(tmp_path / "run"))

    def test_a_start_that_is_refused_leaves_no_record(self, make_trainer, make_judge, tmp_path):
        for make, model in ((make_trainer, index_alone(tmp_path)), (make_judge, config_alone(tmp_path))):
            with pytest.raises((OSError, ValueError)):
                make(output_dir=str(tmp_path / "run"), model=str(model))
            assert (tmp_path / "run").is_dir()  # it was opened
        assert not [*tmp_path.rglob("run.json")]

    def test_a_judge_in_python(self, make_judge, tmp_path):
        plant(tmp_path / "run", "wrong_pairs.txt", "eval_wrong_pairs.png")
        with pytest.raises(ValueError, match="eval_wrong_pairs"):
            make_judge(tmp_path / "run", tmp_path / "nowhere")

    def test_a_judge_does_not_replace_its_own_base(self, make_judge, tiny_qwen, tmp_path):
        base = shutil.copytree(tiny_qwen, tmp_path / "merged")
        (base / "paco_trl.json").write_text(json.dumps({"kind": "judge", "pictures": []}))  # as `paco-trl merge` does
        (tmp_path / "link").symlink_to(base)
        make_judge(tmp_path / "run", base, overwrite_output_dir=True)
        for output_dir in (base, tmp_path / "link"):
            with pytest.raises(ValueError, match="is the directory of the model to train"):
                make_judge(output_dir, base, overwrite_output_dir=True)

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_interrupted_run_is_not_started_anew_beside_its_checkpoints(self, tmp_path, capsys, kind):
        checkpoint = tmp_path / "run" / "checkpoint-8"
        plant(checkpoint, "weights")
        (checkpoint / "run.json").write_text(json.dumps({"run": {}, "files": {}}))
        for words in ([], ["--resume_from_checkpoint", "False"]):
            assert self.start(kind, tmp_path / "run", *words) == 1
            error = capsys.readouterr().err
            assert "checkpoint-8" in error and "auto" in error and "overwrite_output_dir" in error
        for words in (["--overwrite_output_dir"], ["--resume_from_checkpoint", "auto"]):
            assert self.start(kind, tmp_path / "run", *words) == 1
            assert "checkpoint-8 of an earlier run" not in capsys.readouterr().err
        assert (checkpoint / "weights").exists()

    def test_in_python(self, trained, make_trainer, make_judge, tmp_path):
        folder = shutil.copytree(trained.args.output_dir, tmp_path / "run")
        before = files_in(folder / "checkpoint-1")
        with pytest.raises(ValueError, match="checkpoint-1"):
            make_trainer(output_dir=str(folder)).train()
        with pytest.raises(ValueError, match="checkpoint-1"):
            make_judge(folder).train()
        assert files_in(folder / "checkpoint-1") == before

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_saved_model_without_checkpoints(self, tmp_path, capsys, kind):
        plant(tmp_path / "run", "adapter_model.safetensors", "adapter_config.json")
        (tmp_path / "run" / "paco_trl.json").write_text(
            json.dumps({"kind": "image", "pictures": []})
        )  # paco_trl wrote them
        for words in ([], ["--resume_from_checkpoint", "auto"], ["--overwrite_output_dir"]):
            assert self.start(kind, tmp_path / "run", *words) == 1
            is_refused = "the model of an earlier run" in capsys.readouterr().err
            assert is_refused == (words != ["--overwrite_output_dir"])

    def test_a_saved_model_in_python(self, trained, make_trainer, tmp_path):
        folder = shutil.copytree(trained.args.output_dir, tmp_path / "run")
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        before = files_in(folder)
        assert "adapter_model.safetensors" in before
        trainer = make_trainer(output_dir=str(folder))
        with pytest.raises(ValueError, match="the model of an earlier run"):
            trainer.train()
        assert {name: files_in(folder)[name] for name in before} == before

    def test_what_a_killed_run_has_left_is_its_own(self, make_trainer, tmp_path):
        folder = tmp_path / "run"
        make_trainer(output_dir=str(folder))
        plant(folder, "contact_sheets/round_00000.png", "curves.png")
        make_trainer(output_dir=str(folder))

    def test_the_adapter_to_train_is_not_deleted(self, trained, make_trainer, tmp_path):
        folder = shutil.copytree(trained.args.output_dir, tmp_path / "run")
        (checkpoint,) = folder.glob("checkpoint-*")
        before = files_in(folder)
        with pytest.raises(ValueError, match=f"'{checkpoint}' is in '{folder}', where `overwrite_output_dir` deletes"):
            make_trainer(output_dir=str(folder), overwrite_output_dir=True, peft_config=str(checkpoint))
        with pytest.raises(ValueError, match="is in .*, where `overwrite_output_dir` deletes"):  # a file of it
            file = str(checkpoint / "pytorch_lora_weights.safetensors")
            make_trainer(output_dir=str(folder), overwrite_output_dir=True, peft_config=file)
        assert files_in(folder) == before
        make_trainer(output_dir=str(tmp_path / "other"), overwrite_output_dir=True, peft_config=str(checkpoint))

    @pytest.mark.parametrize("kind", ["grpo", "judge"])
    def test_only_what_a_run_has_written_is_deleted(self, trained, make_trainer, make_judge, tmp_path, kind, caplog):
        folder = shutil.copytree(trained.args.output_dir, tmp_path / "run")
        mine = [
            "evaluation/notes.txt",
            "evaluation/results.json",
            "contact_sheets/best.png",
            "contact_sheets/card/a.png",
        ]
        mine += ["checkpoint-best/weights", "images/mine.png", "evaluation/eval-calibration-1.png"]
        plant(folder, *mine, "evaluation/eval-calibration-000001.png", "evaluation/eval_baseline.pt")
        settings = {"output_dir": str(folder), "overwrite_output_dir": True, "max_steps": 1, "save_strategy": "no"}
        (make_trainer if kind == "grpo" else make_judge)(**settings).train()
        after = files_in(folder)
        assert {name: after.get(name) for name in mine} == {name: f"my own {name}".encode() for name in mine}
        assert not {"evaluation/eval-calibration-000001.png", "evaluation/eval_baseline.pt"} & after.keys()
        assert f"`overwrite_output_dir` has deleted checkpoint-1 of '{folder}'" in caplog.text
        assert not any(name.startswith(("checkpoint-1/", "contact_sheets/round")) for name in after)


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_permissions_are_those_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new.txt", "1")
        (tmp_path / "plain.txt").write_text("1")
        (tmp_path / "secret.txt").touch(0o600)
        write_atomically(tmp_path / "secret.txt", "2")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["new.txt"] == modes["plain.txt"] == 0o666 & ~umask
    assert modes["secret.txt"] == 0o600 and (tmp_path / "secret.txt").read_text() == "2"


class TestStages:
    @pytest.mark.parametrize("names", [["images/a/0.png"], ["settings.json"], ["settings.json", "notes.txt"]])
    @pytest.mark.parametrize("content", ["mine", '{"mine": 1}', "[1]"])
    def test_a_folder_of_the_users_is_not_begun(self, tmp_path, names, content):
        plant(tmp_path, *names, ".hidden")
        (tmp_path / names[0]).write_text(content)
        before = files_in(tmp_path)
        with pytest.raises(ValueError, match=names[0]):
            StageFolder(tmp_path, {"model": "a"})
        assert files_in(tmp_path) == before
        StageFolder(tmp_path / "new", {"model": "a"})
        StageFolder(tmp_path / "new", {"model": "b"})  # the first attempt has left nothing

    def test_a_dataset_of_the_users_is_not_replaced(self, tmp_path):
        Dataset.from_dict({"prompt": ["mine"]}).save_to_disk(tmp_path / "prompts" / "dataset")
        before, folder = files_in(tmp_path), StageFolder(tmp_path / "prompts")
        for write in (lambda: folder.finish(Dataset.from_dict({"prompt": ["a"]}), {}), folder.clear):
            with pytest.raises(ValueError, match="has dataset"):
                write()
            assert files_in(tmp_path) == before


def test_tables_of_a_judge(tmp_path):
    before = plant(tmp_path, "results.md")
    with pytest.raises(ValueError, match=r"results\.md"):
        save_report({"settings": {}}, tmp_path)
    assert files_in(tmp_path) == before
