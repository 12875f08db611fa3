# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate judge` on a tiny CLIP."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from PIL import Image as PILImage

from judge_server import JudgeServer
from paco_trl.commands import evaluate_judge as script
from paco_trl.commands.evaluate import main as evaluate_main
from paco_trl.commands.main import main
from paco_trl.data.columns import typed_dataset
from paco_trl.tiny import build_tiny_clip


def noise(rng, size=(32, 32)):
    return PILImage.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a tiny CLIP, six rankings, two comparisons of edits, and a benchmark in the published layout."""
    folder = tmp_path_factory.mktemp("evaluate")
    build_tiny_clip(folder / "clip")
    rng = np.random.default_rng(0)
    rows = [
        (
            noise(rng),
            [noise(rng) for _ in range(4)],
            rng.permutation(4).tolist(),
            f"A fox {index // 2}.",
            f"g{index // 2}",
        )
        for index in range(6)
    ]
    types = {
        "reference": "image",
        "candidates": ["image"],
        "ranking": ["int64"],
        "prompt": "string",
        "group": "string",
    }
    rankings = typed_dataset(rows, **types)
    rankings.save_to_disk(folder / "rankings")
    DatasetDict({"test": rankings.select(range(4))}).save_to_disk(folder / "splits")
    source, near = noise(rng), noise(rng)
    # CLIP-I prefers what did not change
    rows = [
        ([f"{n}-a", f"{n}-b"], "Add a hat.", source, [source, near], "subject-add", "consistency") for n in range(2)
    ]
    types = {"key": ["string"], "instruction": "string", "input_image": "image", "output_images": ["image"]}
    edits = typed_dataset(rows, **types, task_type="string", dimension="string")
    edits.to_parquet(folder / "edits" / "train.parquet")
    published = folder / "published"  # as it is downloaded, the images in an archive
    (folder / "images" / "7").mkdir(parents=True)
    published.mkdir()
    names = [f"{first}_{second}.png" for first in range(2) for second in range(2)]
    for name in names:
        noise(rng).save(folder / "images" / "7" / name)
    shutil.make_archive(published / "images", "zip", folder, "images")
    record = {"folder": "7", "ref_image": names[0], "comp_images": names[1:], "rank_images": names[:0:-1]}
    (published / "consistency_full_rank.jsonl").write_text(json.dumps(record) + "\n")
    prompts = {"idx": "7", "prompt": "A fox.", "criteria": {"style": {"ink": "Both are drawn in ink."}}}
    (published / "prompt_data.jsonl").write_text(json.dumps(prompts) + "\n")
    return folder


def arguments(workspace, output, **options):
    return script.JudgeArguments(
        **{
            "judge_model": "clip-i",
            "clip_model": str(workspace / "clip"),
            "dataset_name": str(workspace / "rankings"),
            "output_dir": str(output),
            "device": "cpu",
            **options,
        }
    )


def test_from_the_command_line(workspace, tmp_path, monkeypatch, capsys):
    output = tmp_path / "results"
    monkeypatch.setenv("COLUMNS", "250")
    command = ["evaluate", "judge", "--judge_model", "clip-i", "--clip_model", workspace / "clip", "--device", "cpu",
               "--dataset_name", workspace / "rankings", "--output_dir", output, "--batch_size", 8]  # fmt: skip
    assert not main(list(map(str, command)))
    printed = capsys.readouterr().out
    (results,) = json.loads((output / "results.json").read_text())
    assert results["num_instances"] == 6 and results["num_groups"] == 3
    assert results["settings"]["dataset"] == str(workspace / "rankings")
    assert results["settings"] | {"dtype": "auto", "batch_size": 8, "template": "theme"} == results["settings"]
    (scores_path,) = output.glob("*.jsonl")
    assert len(scores_path.read_text().splitlines()) == 1 + 6
    for text in (
        "Kendall tau",
        f"{results['metrics']['accuracy']['mean']:.3f} [",
        f"Scores: {scores_path}",
        f"Report: {output}/results.md",
    ):
        assert text in printed
    assert "| CLIP-I (" in (output / "results.md").read_text()

    # Once more: nothing is scored, and nothing changes
    content = scores_path.read_bytes()
    scores_path.write_bytes(content[: content.rfind(b"\n", 0, -1) + 20])  # the last row was being written
    script.evaluate(arguments(workspace, output, batch_size=8))
    assert scores_path.read_bytes() == content
    assert json.loads((output / "results.json").read_text()) == [results]
    # Another template is another row
    script.evaluate(arguments(workspace, output, template="plain"))
    assert [entry["settings"]["template"] for entry in json.loads((output / "results.json").read_text())] == [
        "theme",
        "plain",
    ]
    assert "CLIP-I" in capsys.readouterr().out


def test_datasets_of_other_kinds(workspace, tmp_path):
    def results_of(name, **options):
        script.evaluate(arguments(workspace, tmp_path / name, dataset_name=str(workspace / name), **options))
        return json.loads((tmp_path / name / "results.json").read_text())[0]

    assert results_of("splits", dataset_split="test")["num_instances"] == 4
    published = results_of("published", template="criteria", dtype="bfloat16")
    assert published["num_instances"] == 1 and published["settings"]["dtype"] == "bfloat16"
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert script.load_scorer(arguments(workspace, tmp_path, dtype=dtype)).model.dtype == expected
    edits = results_of("edits", benchmark="edit_reward")
    assert edits["dimensions"]["consistency"]["strict"]["mean"] == 1.0


def test_each_benchmark_has_its_own_dataset(workspace, tmp_path, monkeypatch):
    """Without a name, that of the benchmark: here a directory with the name of the repository."""
    (tmp_path / "EditScore").mkdir()
    (tmp_path / "EditScore" / "EditReward-Bench").symlink_to(workspace / "edits")
    monkeypatch.chdir(tmp_path)
    script.evaluate(arguments(workspace, tmp_path / "out", benchmark="edit_reward", dataset_name=None))
    (results,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["settings"]["dataset"] == "EditScore/EditReward-Bench"


def test_a_judge_on_a_server(workspace, tmp_path):
    def log_odds(first, second, question):
        return second.getpixel((0, 0))[0] / 100

    # Four candidates of which the judge is so sure that No is not among the likeliest tokens
    def fault(number):
        return "only Yes, surely" if 1 <= number <= 4 else None

    with JudgeServer(log_odds, fault=fault, key="secret") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", "secret")
        served = script.JudgeArguments(
            judge_model="judge",
            judge_url=server.url,
            api_key_variable="JUDGE_KEY",
            dataset_name=str(workspace / "rankings"),
            output_dir=str(tmp_path),
            batch_size=4,  # a row at a time
        )
        script.evaluate(served)
        (results,) = json.loads((tmp_path / "results.json").read_text())
        assert len(server.requests) == 1 + 24  # the first one is the check
        assert results["num_ties"] == 1 and results["num_instances"] == 6
        (scores_path,) = tmp_path.glob("*.jsonl")
        records = [json.loads(line) for line in scores_path.read_text().splitlines()[1:]]
        assert records[0]["scores"] == [1.0] * 4 and 1.0 not in records[1]["scores"]
        table = (tmp_path / "results.md").read_text()
        assert "| 6 (1 without tau and rho) | 1 |" in table and "candidates of which a judge is very sure tie" in table

        script.evaluate(dataclasses.replace(served, protocol="published"))
        entries = json.loads((tmp_path / "results.json").read_text())
        assert [entry["settings"]["protocol"] for entry in entries] == ["default", "published"]
        asked = server.requests[-1]["messages"][-1]["content"]
        assert [part.get("text", "")[:7] for part in asked] == ["<img1>: "[:7], "", "<img2>: "[:7], "", "Do the "]


def test_wrong_options(workspace, tmp_path):
    for options, message in (
        ({"benchmark": "edit_reward", "template": "plain"}, "--template"),
        ({"judge_url": "http://127.0.0.1:1/v1"}, "--device"),
        ({"max_concurrency": 2}, "--max_concurrency"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "--api_key_variable"),
        ({"template": "themes"}, "themes"),
    ):
        with pytest.raises(ValueError, match=message):
            script.evaluate(arguments(workspace, tmp_path, **options))
    for option, value in (("--benchmark", "ranking"), ("--dtype", "float"), ("--protocol", "paper")):
        with pytest.raises(ValueError, match=option):
            evaluate_main(["judge", "--output_dir", str(tmp_path), option, value])
    assert not list(tmp_path.iterdir())
