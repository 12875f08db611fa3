# SPDX-License-Identifier: Apache-2.0
"""`paco-trl reward` alone, with DDP, and with DeepSpeed ZeRO-3."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from PIL import Image as PILImage
from safetensors.torch import load_file

import launching
from launching import CPU_DDP, CPU_FSDP2, CPU_ZERO3
from paco_trl import PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.commands import reward
from paco_trl.data import make_pair, rankings_to_pairs
from paco_trl.data.columns import column_types
from paco_trl.hub import ImageModelCardData, save_card_data
from testing_utils import check_frozen_weights_are_not_saved, check_same_adapter, pair_dataset


REASONS = (
    "Alike.",
    "The two images show the same thing, in the same style and with the same colours.",
    "Both are ink.",
)

# One step is 12 pairs: 6 micro-batches of 2, or 3 on each of two processes
# 21 pairs are evaluated: over two processes three are drawn twice, and must not count twice
SETTINGS = {
    "dataset_split": "train", "eval_split": "test", "first_token_weight": 0.3, "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none",
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "use_cpu": True, "bf16": False,
    "lora_r": 4, "disable_tqdm": True,
}  # fmt: skip


def pairs(count: int, seed: int) -> Dataset:
    """Plain pictures of several sizes, with reasons of several lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        sizes = rng.integers(30, 120, (2, 2))
        images = [PILImage.new("RGB", tuple(size), tuple(rng.integers(0, 256, 3).tolist())) for size in sizes.tolist()]
        rows.append(make_pair(*images, f"Same colour? ({index})", bool(rng.integers(2)), REASONS[index % 3]))
    return pair_dataset(rows)


@pytest.fixture(scope="module")
def workspace(tiny_qwen, tmp_path_factory):
    """A folder with a tiny model, pairs in Parquet, and the settings in a YAML file."""
    folder = tmp_path_factory.mktemp("train_reward")
    (folder / "data").mkdir()
    pairs(48, 0).to_parquet(folder / "data" / "train.parquet")
    pairs(21, 1).to_parquet(folder / "data" / "test.parquet")
    settings = {"model_name_or_path": str(tiny_qwen), "dataset_name": str(folder / "data"), **SETTINGS}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


def run_here(workspace: Path, output: Path, *options: str) -> None:
    reward.main(["--config", str(workspace / "settings.yaml"), "--output_dir", str(output), *options])


@pytest.fixture(scope="module")
def alone(workspace) -> Path:
    run_here(workspace, workspace / "alone", "--gradient_accumulation_steps", "6")
    return workspace / "alone"


def launch(workspace: Path, name: str, config: Path, *options: str) -> Path:
    output = workspace / name
    command = ["-m", "paco_trl.commands.main", "reward"]
    command += ["--config", workspace / "settings.yaml", "--output_dir", output]
    command += ["--gradient_accumulation_steps", "3", "--ddp_backend", "gloo", *options]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    printed = launching.check_run(command, config=config, cwd=workspace, env=environment)
    assert printed.count(f"Adapter: {output}") == 1
    return output


def log_of(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def assert_same_training(output: Path, reference: Path) -> None:
    """The same losses and metrics at every step and in the evaluation, and the same adapter within rounding."""
    log, expected = log_of(output / "checkpoint-4"), log_of(reference / "checkpoint-4")
    assert [sorted(entry) for entry in log] == [sorted(entry) for entry in expected]
    assert sum("loss" in entry for entry in expected) == 4
    assert sum("eval_auroc" in entry for entry in expected) == 1
    assert len({entry["loss"] for entry in expected if "loss" in entry}) == 4
    for entry, expected_entry in zip(log, expected, strict=True):
        for name, value in expected_entry.items():
            if not re.search("runtime|per_second|preparation_time|train_seconds", name):
                assert entry[name] == pytest.approx(value, abs=2e-3, rel=2e-3), (name, entry)
    assert_same_adapter(output, reference)
    for folder in (output, reference):
        assert "| `effective_batch` | 12 |" in (folder / "README.md").read_text()


def assert_same_adapter(output: Path, reference: Path) -> None:
    # Four steps of Adam at 1e-2 move a weight by up to 3e-2
    moved = check_same_adapter(output, reference, tolerance=1e-3)
    assert len(moved) == 2 * 7 and min(moved) > 5e-3  # B begins at 0


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_alone(alone, workspace):
    assert files_of(alone / "checkpoint-4") > files_of(alone) - {".lock"} > {"README.md", "adapter_model.safetensors"}
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    test = pairs(21, 1)
    judge = PaCoReward.from_pretrained(alone, device="cpu")
    scores = judge.score([tuple(row["images"]) for row in test], [row["prompt"][0]["content"] for row in test])
    is_yes = np.array([row["completion"][0]["content"].startswith("Yes") for row in test])
    (evaluated,) = [entry for entry in log_of(alone / "checkpoint-4") if "eval_auroc" in entry]
    assert 0 < is_yes.sum() < 21
    assert evaluated["eval_p_yes/consistent"] == pytest.approx(np.array(scores)[is_yes].mean(), abs=1e-5)
    assert evaluated["eval_p_yes/inconsistent"] == pytest.approx(np.array(scores)[~is_yes].mean(), abs=1e-5)


def test_a_pipeline_is_no_judge(workspace, tiny_flux, tmp_path):
    words = ["--model_name_or_path", str(tiny_flux), "--dataset_name", "user/is-not-read"]
    with pytest.raises(ValueError, match="is an image pipeline, no vision-language model"):
        run_here(workspace, tmp_path / "out", *words)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="judge' is an adapter. To go on from it, merge it .* `paco-trl merge"):
        run_here(workspace, tmp_path / "out", "--model_name_or_path", str(tmp_path / "judge"), *words[2:])
    assert not (tmp_path / "out").exists()
    args = PaCoRewardConfig(str(tmp_path / "out"), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="is an image pipeline, no vision-language model, as a judge must be.$"):
        PaCoRewardTrainer(str(tiny_flux), args, pairs(2, 0))
    adapter = str(tmp_path / "adapter")
    LoraConfig(r=4, base_model_name_or_path="makers/flux").save_pretrained(adapter)
    save_card_data(ImageModelCardData("adapter", "adapter", "makers/flux"), adapter)
    with pytest.raises(
        ValueError, match="adapter' is an adapter of the image pipeline 'makers/flux', no vision-.*be.$"
    ):
        PaCoReward.from_pretrained(adapter)


class TestData:
    """What of the data the command gives to the trainer; the card says how many pairs there were."""

    def train(self, workspace, folder: Path, *options: str) -> str:
        words = ["--max_steps", "1", "--save_strategy", "no", "--overwrite_output_dir", "True", *options]
        run_here(workspace, folder / "out", *words)
        return (folder / "out" / "README.md").read_text()

    @pytest.mark.slow
    def test_rankings(self, workspace, tmp_path, capsys):
        rng = np.random.default_rng(0)
        images = [PILImage.new("RGB", (56, 56), tuple(map(int, rng.integers(0, 256, 3)))) for _ in range(4)]
        texts = {"prompt": "string", "ranking": ["int64"]}
        features = column_types(reference="image", candidates=["image"], **texts)
        rows = [{"reference": images[0], "candidates": images[1:], "ranking": [2, 0, 1], "prompt": "A fox."}] * 4
        (tmp_path / "data").mkdir()
        rankings = Dataset.from_list(rows, features=features)
        rankings.to_parquet(tmp_path / "data" / "train.parquet")
        rankings.select([0]).to_parquet(tmp_path / "data" / "test.parquet")
        options = ["--dataset_name", str(tmp_path / "data"), "--first_token_weight", "1", "--eval_strategy", "no"]
        pairs_of = {len(rankings_to_pairs(rankings.select(range(count)))): count for count in (1, 4)}
        few, many = sorted(pairs_of)
        card = self.train(workspace, tmp_path, *options)
        assert f"| `pairs` | {many} |" in card  # trained on
        assert f"| pairs | {few} |" in card  # evaluated on, at the end
        stdout = capsys.readouterr().out
        assert f"Adapter: {tmp_path / 'out'}" in stdout and f"Images: {tmp_path / 'out' / 'evaluation'}" in stdout
        card = self.train(workspace, tmp_path, *options, "--swap", "True")
        assert f"| `pairs` | {2 * many} |" in card and f"| pairs | {few} |" in card  # evaluated on as they are

        rows[2] = rows[2] | {"candidates": [images[1], {"bytes": b"no image", "path": None}, images[3]]}
        Dataset.from_list(rows, features=features).to_parquet(tmp_path / "data" / "train.parquet")
        # Of row 2, the pair with the worst candidate is left
        card = self.train(workspace, tmp_path, *options, "--skip_broken", "True")
        assert f"| `pairs` | {many - 1} |" in card

    def test_the_published_layout(self, workspace, tmp_path, capsys):
        folder = tmp_path / "data"
        folder.mkdir()
        for name, count in (("a", 6), ("b", 4), ("held_out", 3)):
            records = []
            for index, row in enumerate(pairs(count, 2)):
                images = [f"{name}-{index}-{place}.png" for place in range(2)]
                for image, path in zip(row["images"], images, strict=True):
                    image.save(folder / path)
                question, answer = row["prompt"][0]["content"], row["completion"][0]["content"]
                turns = [{"from": "human", "value": f"<image><image>{question}"}, {"from": "gpt", "value": answer}]
                records.append({"conversations": turns, "images": images})
            (folder / f"{name}.json").write_text(json.dumps(records))
        settings = yaml.safe_load((workspace / "settings.yaml").read_text())
        del settings["dataset_split"], settings["eval_split"], settings["eval_strategy"]
        settings |= {"dataset_name": str(folder), "dataset_files": ["a", "b"]}
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        card = self.train(tmp_path, tmp_path, "--eval_files", "held_out")
        assert "| `pairs` | 10 |" in card and "| pairs | 3 |" in card

        (folder / "b-1-1.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match="Row 7.*second image"):
            self.train(tmp_path, tmp_path)
        capsys.readouterr()
        card = self.train(tmp_path, tmp_path, "--skip_broken", "True")
        assert "| `pairs` | 9 |" in card and "## Evaluation" not in card
        assert "Pictures" not in capsys.readouterr().out

    def test_own_pairs_without_a_split(self, workspace, tmp_path):
        words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--dataset_name"]
        with pytest.raises(FileNotFoundError, match="--dataset_split"):
            reward.main([*words, str(workspace / "data")])
        pairs(2, seed=0).save_to_disk(tmp_path / "saved")
        with pytest.raises(ValueError, match="--dataset_split"):
            reward.main([*words, str(tmp_path / "saved")])


@pytest.mark.slow
def test_two_processes_equal_one(workspace, alone):
    output = launch(workspace, "ddp", CPU_DDP)
    assert_same_training(output, alone)
    assert files_of(output) == files_of(alone)


@pytest.mark.slow
def test_two_processes_resume_what_one_began_grouped_by_length(workspace):
    # An epoch is four steps: the checkpoint is in the second one, whose order is another
    options = [*("--train_sampling_strategy", "group_by_length", "--max_steps", "8"), *("--save_steps", "5")]
    options += ["--eval_strategy", "no"]
    alone = workspace / "grouped-alone"
    run_here(workspace, alone, "--gradient_accumulation_steps", "6", *options)
    checkpoint = workspace / "grouped-checkpoint-5"
    shutil.copytree(alone / "checkpoint-5", checkpoint)
    options += ["--resume_from_checkpoint", str(checkpoint), "--dataloader_num_workers", "2"]
    output = launch(workspace, "grouped", CPU_DDP, *options)
    log, expected = (
        [entry for entry in log_of(folder / "checkpoint-8") if "loss" in entry] for folder in (output, alone)
    )
    assert len(log) == len(expected) == 8
    for entry, expected_entry in zip(log, expected, strict=True):
        for name in ("loss", "padding", "p_yes/consistent"):
            assert entry[name] == pytest.approx(expected_entry[name], abs=1e-3), (name, entry)
    assert len({entry["padding"] for entry in expected}) > 4
    assert_same_adapter(output, alone)


@pytest.fixture(scope="module")
def zero3(workspace) -> Path:
    return launch(workspace, "zero3", CPU_ZERO3)


@pytest.mark.slow
def test_zero3_equals_one_process(zero3, alone):
    assert_same_training(zero3, alone)
    assert files_of(zero3) == files_of(alone)
    check_frozen_weights_are_not_saved(zero3 / "checkpoint-4")
    # Also where it is divided over processes, the base model is the same
    runs = [json.loads((folder / "checkpoint-4" / "run.json").read_text())["run"] for folder in (zero3, alone)]
    assert runs[0]["is_deepspeed"] and runs[0]["identity"] == runs[1]["identity"]


@pytest.mark.slow
def test_zero3_resumes(workspace, zero3):
    half_way = load_file(zero3 / "checkpoint-2" / "adapter_model.safetensors")
    final = load_file(zero3 / "adapter_model.safetensors")
    assert any((final[name] - value).abs().max() > 5e-3 for name, value in half_way.items())
    checkpoint = workspace / "zero3-checkpoint-2"
    shutil.copytree(zero3 / "checkpoint-2", checkpoint)
    output = launch(workspace, "zero3-resumed", CPU_ZERO3, "--resume_from_checkpoint", str(checkpoint))
    assert not (output / "checkpoint-2").exists()
    assert_same_adapter(output, zero3)
    log, expected = log_of(output / "checkpoint-4"), log_of(zero3 / "checkpoint-4")
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(
        [entry["loss"] for entry in expected if "loss" in entry], abs=1e-4
    )


@pytest.fixture(scope="module")
def fsdp2(workspace) -> Path:
    """A run that ends with the weights of the first checkpoint, whose loss is higher."""
    best = ("--load_best_model_at_end", "True", "--metric_for_best_model", "loss", "--greater_is_better", "True")
    return launch(workspace, "fsdp2", CPU_FSDP2, "--eval_steps", "2", *best)


@pytest.mark.slow
def test_fsdp2_equals_one_process(fsdp2, alone):
    assert_same_adapter(fsdp2 / "checkpoint-4", alone / "checkpoint-4")
    losses, expected = (
        [entry["loss"] for entry in log_of(folder / "checkpoint-4") if "loss" in entry] for folder in (fsdp2, alone)
    )
    assert len(expected) == 4 and losses == pytest.approx(expected, abs=2e-3)
    evaluations, (expected,) = (
        [entry for entry in log_of(folder / "checkpoint-4") if "eval_auroc" in entry] for folder in (fsdp2, alone)
    )
    for name in ("eval_loss", "eval_auroc", "eval_p_yes/consistent"):
        assert evaluations[-1][name] == pytest.approx(expected[name], abs=2e-3), name
    # No weights of the base model, and no more files than one process has
    others = files_of(fsdp2 / "checkpoint-4") ^ files_of(alone / "checkpoint-4")
    assert others == {"rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"}
    first, last, final = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (fsdp2 / "checkpoint-2", fsdp2 / "checkpoint-4", fsdp2)
    )
    assert all(torch.equal(final[name], value) for name, value in first.items())
    assert any((last[name] - value).abs().max() > 5e-3 for name, value in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])  # or begun by another number of processes
def test_fsdp2_resumes(workspace, fsdp2, alone, is_same):
    begun, name = fsdp2 if is_same else alone, f"fsdp2-resumed-{is_same}"
    checkpoint = workspace / f"{name}-checkpoint-2"
    shutil.copytree(begun / "checkpoint-2", checkpoint)
    output = launch(workspace, name, CPU_FSDP2, "--resume_from_checkpoint", str(checkpoint))
    adapter, expected = (load_file(folder / "checkpoint-4/adapter_model.safetensors") for folder in (output, begun))
    difference = max((adapter[name] - value).abs().max().item() for name, value in expected.items())
    assert difference == 0 if is_same else 0 < difference < 1e-3


def test_a_directory_without_pairs_has_another_layout(tmp_path):
    (tmp_path / "a.png").touch()
    arguments = reward.JudgeScriptArguments(dataset_name=str(tmp_path), dataset_files=["pairs"])
    with pytest.raises(
        FileNotFoundError, match=r"no layout of PaCo-Dataset: it has no pairs.json. .*`--dataset_split`"
    ):
        reward.load_datasets(arguments, None)
