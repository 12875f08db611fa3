# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate judge` on a tiny CLIP."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from transformers import CLIPModel

from judge_server import JudgeServer
from paco_trl.commands import evaluate_judge as script
from paco_trl.commands.evaluate_arguments import main as evaluate_main
from paco_trl.commands.main import main
from paco_trl.data.columns import typed_dataset
from paco_trl.utils.errors import OptionError
from testing_utils import jsonl, noise


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with six rankings and two comparisons of edits."""
    folder = tmp_path_factory.mktemp("evaluate")
    rng = np.random.default_rng(0)
    rows = [
        (noise(5 * n), [noise(5 * n + k) for k in range(1, 5)], rng.permutation(4), f"A fox {n // 2}.", f"g{n // 2}")
        for n in range(6)
    ]
    types = {"reference": "image", "candidates": ["image"], "ranking": ["int64"]}
    rankings = typed_dataset(rows, **types, prompt="string", group="string")
    rankings.save_to_disk(folder / "rankings")
    DatasetDict({"test": rankings.select(range(4))}).save_to_disk(folder / "splits")
    source, near = noise(30), noise(31)
    # CLIP-I prefers what did not change
    rows = [
        ([f"{n}-a", f"{n}-b"], "Add a hat.", source, [source, near], "subject-add", "consistency") for n in range(2)
    ]
    types = {"key": ["string"], "instruction": "string", "input_image": "image", "output_images": ["image"]}
    edits = typed_dataset(rows, **types, task_type="string", dimension="string")
    edits.to_parquet(folder / "edits" / "train.parquet")
    return folder


@pytest.fixture
def arguments(workspace, tiny_clip):
    def make(output, dataset="rankings", **options):
        options = {"judge_model": "clip-i", "clip_model": str(tiny_clip), "device": "cpu", **options}
        return script.JudgeArguments(output_dir=str(output), **{"dataset_name": str(workspace / dataset), **options})

    return make


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", ["results.json", "results.md"])
def test_a_report_of_the_users_is_refused_before_anything_is_scored(arguments, tmp_path, name):
    output = tmp_path / "results"
    output.mkdir()
    (output / name).write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=f"{name}' .*Move it away"):
        script.evaluate(arguments(output))
    assert [path.name for path in output.iterdir()] == [name]


def test_from_the_command_line(workspace, arguments, tiny_clip, tmp_path, monkeypatch, capsys):
    output = tmp_path / "results"
    monkeypatch.setenv("COLUMNS", "250")
    command = ["evaluate", "judge", "--judge_model", "clip-i", "--clip_model", tiny_clip, "--device", "cpu",
               "--dataset_name", workspace / "rankings", "--output_dir", output, "--batch_size", 8]  # fmt: skip
    assert not main(list(map(str, command)))
    printed = capsys.readouterr().out
    (results,) = results_in(output)
    assert results["num_instances"] == 6 and results["num_groups"] == 3
    settings = {"dataset": str(workspace / "rankings"), "dtype": "auto", "batch_size": 8, "template": "theme"}
    assert results["settings"] | settings == results["settings"]
    (scores_path,) = output.glob("*.jsonl")
    content = scores_path.read_bytes()
    assert content.count(b"\n") == 1 + 6
    accuracy = f"{results['metrics']['accuracy']['mean']:.3f} ["
    for text in ("Kendall tau", accuracy, f"Scores: {scores_path}", f"Report: {output}/results.md"):
        assert text in printed
    assert "| CLIP-I (" in (output / "results.md").read_text()

    # Once more: nothing changes
    scores_path.write_bytes(content[: content.rfind(b"\n", 0, -1) + 20])  # the last row was being written
    script.evaluate(arguments(output, batch_size=8))
    assert scores_path.read_bytes() == content and results_in(output) == [results]
    # Another template is another row
    script.evaluate(arguments(output, template="plain"))
    assert [entry["settings"]["template"] for entry in results_in(output)] == ["theme", "plain"]


def test_one_process_evaluates_a_judge(arguments, tmp_path, monkeypatch):
    """Each of several would score all pairs, and write them into one file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="`--num_processes` is 2, but a judge is evaluated by one process"):
        script.evaluate(arguments(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_other_weights_and_another_dtype_of_one_name(workspace, arguments, tiny_clip, tmp_path):
    judge = shutil.copytree(tiny_clip, tmp_path / "judge")
    options = {"clip_model": str(judge)}
    script.evaluate(arguments(tmp_path / "results", **options))
    model = CLIPModel.from_pretrained(judge)
    with torch.no_grad():
        model.visual_projection.weight.copy_(torch.randn_like(model.visual_projection.weight))
    model.save_pretrained(judge)
    for again in (options, options, options | {"dtype": "bfloat16"}):  # trained again, once more, in another dtype
        script.evaluate(arguments(tmp_path / "results", **again))
    entries = results_in(tmp_path / "results")
    assert len(entries) == len(list((tmp_path / "results").glob("*.jsonl"))) == 3
    script.evaluate(arguments(tmp_path / "alone", **options))
    (alone,) = results_in(tmp_path / "alone")
    assert entries[1]["metrics"] == alone["metrics"] != entries[0]["metrics"]


def test_datasets_of_other_kinds(workspace, arguments, tmp_path, monkeypatch):
    def results_of(name, **options):
        script.evaluate(arguments(tmp_path / name, name, **options))
        return results_in(tmp_path / name)[0]

    assert results_of("splits", dataset_split="test")["num_instances"] == 4
    assert results_of("rankings", dtype="bfloat16")["settings"]["dtype"] == "bfloat16"
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert script.load_scorer(arguments(tmp_path, dtype=dtype)).model.dtype == expected
    # Without a name, that of the benchmark: here a directory with the name of the repository
    (tmp_path / "EditScore").mkdir()
    (tmp_path / "EditScore" / "EditReward-Bench").symlink_to(workspace / "edits")
    monkeypatch.chdir(tmp_path)
    edits = results_of("edits", benchmark="edit_reward", dataset_name=None)
    assert edits["settings"]["dataset"] == "EditScore/EditReward-Bench"
    assert edits["dimensions"]["consistency"]["strict"]["mean"] == 1.0
    # The same in the layout of rankings, with the other edit preferred
    names = {"instruction": "prompt", "input_image": "reference", "output_images": "candidates"}
    dataset = Dataset.from_parquet(str(workspace / "edits" / "train.parquet")).rename_columns(names)
    dataset.add_column("ranking", [[1, 0]] * 2).to_parquet(tmp_path / "own" / "train.parquet")
    path = str(tmp_path / "own")
    own = results_of("edits-of-ones-own", benchmark="edits", dataset_name=path)
    assert own["settings"]["benchmark"] == "edits" and own["dimensions"]["consistency"]["strict"]["mean"] == 0.0
    with pytest.raises(ValueError, match="benchmark 'edits'"):
        results_of("edits-as-rankings", dataset_name=path)


def test_a_judge_on_a_server(workspace, tmp_path):
    def log_odds(first, second, question):
        return second.getpixel((0, 0))[0] / 100

    # Four candidates of which the judge is so sure that No is not among the likeliest tokens
    def fault(number):
        return "only Yes, surely" if 1 <= number <= 4 else None

    with JudgeServer(log_odds, fault=fault, key="secret") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", "secret")
        options = {"dataset_name": str(workspace / "rankings"), "batch_size": 4}  # a row at a time
        options |= {"judge_model": "judge", "judge_url": server.url, "api_key_variable": "JUDGE_KEY"}
        served = script.JudgeArguments(output_dir=str(tmp_path), **options)
        script.evaluate(served)
        (results,) = results_in(tmp_path)
        assert len(server.requests) == 1 + 24  # the first one is the check
        assert results["num_ties"] == 1 and results["num_instances"] == 6
        (scores_path,) = tmp_path.glob("*.jsonl")
        records = jsonl(scores_path)[1:]
        assert records[0]["scores"] == [1.0] * 4 and 1.0 not in records[1]["scores"]
        table = (tmp_path / "results.md").read_text()
        assert "| 6 (1 without tau and rho) | 1 |" in table and "candidates of which a judge is very sure tie" in table

        script.evaluate(dataclasses.replace(served, protocol="published"))
        assert [entry["settings"]["protocol"] for entry in results_in(tmp_path)] == ["default", "published"]
        asked = server.requests[-1]["messages"][-1]["content"]
        assert [part.get("text", "")[:7] for part in asked] == ["<img1>: "[:7], "", "<img2>: "[:7], "", "Do the "]


def test_pairs_that_were_held_out(tmp_path, capsys):
    """Three pairs as they are labeled, and one that the judge takes for equal."""
    for name, color in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{name}.png")
    pairs = [(["a.png", "a.png"], "Yes. Both are red."), (["b.png", "b.png"], "Yes"), (["a.png", "b.png"], "No")]
    rows = [{"images": images, "prompt": "Is it one color?", "completion": label} for images, label in pairs]
    (data := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0] | {"completion": "No"}])))
    asked: list[str] = []  # the first one is the check

    def log_odds(first, second, question):
        asked.append(question)
        return 2.0 if first.getpixel((0, 0)) == second.getpixel((0, 0)) else -2.0

    with JudgeServer(log_odds) as server:
        words = ["evaluate", "judge", "--judge_url", server.url, "--judge_model", "judge", "--dataset_name", str(data)]
        words += ["--output_dir", str(tmp_path / "out")]
        (texts := tmp_path / "texts.txt").write_text("A fox.")
        assert main([*words, "--dataset_name", str(texts)]) == 1
        assert "columns text: neither rankings" in capsys.readouterr().err and not asked
        assert main([*words, "--template", "plain"]) == 1 and "--template" in capsys.readouterr().err and not asked
        assert not main(words)
    (results,) = results_in(tmp_path / "out")
    metrics = {name: value["mean"] for name, value in results["metrics"].items()}
    likely = 1 / (1 + math.exp(-2))
    error = (3 * abs(likely - 2 / 3) + 1 - likely) / 4  # three scores in one bin, two of them right
    assert metrics == pytest.approx({"accuracy": 0.75, "auroc": 0.75, "ece": error}, abs=1e-4)
    assert {*asked[1:]} == {"Is it one color?"} and results["settings"]["benchmark"] == "pairs"
    assert f"| 4 | {metrics['accuracy']:.3f} [" in capsys.readouterr().out


def test_broken_images_before_the_judge_is_loaded(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "whole.png")
    (tmp_path / "broken.png").write_text("version https://git-lfs.github.com/spec/v1")
    pair = {"images": ["whole.png", "broken.png"], "prompt": "Is it one color?", "completion": "Yes"}
    ranking = {
        "reference": "whole.png",
        "candidates": ["whole.png", "broken.png"],
        "ranking": [0, 1],
        "prompt": "A fox.",
    }
    for row, name in ((pair, "images"), (ranking, "candidates")):
        whole = {key: ["whole.png"] * 2 if key == name else value for key, value in row.items()}
        (data := tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps(row)}\n")
        options = {"judge_model": "no/judge", "dataset_name": str(data), "output_dir": str(tmp_path / "out")}
        with pytest.raises(ValueError, match=rf"`{name}\[1\]` of row 1 \({tmp_path}/broken.png\) cannot be read"):
            script.evaluate(script.JudgeArguments(**options))


def test_a_pair_without_a_decision_cannot_be_left_out(tmp_path):
    """`--skip_broken` is an option of training."""
    pair = {"images": ["a.png", "b.png"], "prompt": "Is it one color?", "completion": "Maybe"}
    (data := tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n")
    for name in pair["images"]:
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    options = {"judge_model": "no/judge", "dataset_name": str(data), "output_dir": str(tmp_path / "out")}
    with pytest.raises(ValueError, match="Row 0 of .*Correct it.$"):
        script.evaluate(script.JudgeArguments(**options))


def test_wrong_options(workspace, tiny_clip, tmp_path):
    common = f"--judge_model clip-i --dataset_name {workspace / 'rankings'} --output_dir {tmp_path} "
    for words, message in (
        ("--benchmark edit_reward --template plain", "--template"),
        ("--judge_url http://127.0.0.1:1/v1 --device cpu", "--device"),
        ("--max_concurrency 2", "--max_concurrency"),
        ("--max_concurrency 8", "--max_concurrency"),  # the default, typed
        ("--api_key_variable NO_SUCH_KEY", "--api_key_variable"),
        ("--trust_remote_code", "--trust_remote_code"),
        ("--judge_model a/b --clip_model c/d", "--clip_model"),
        (f"--template themes --clip_model {tiny_clip}", "themes"),
        ("--batch_size 0", "--batch_size"),
        ("--benchmark ranking", "--benchmark"),
        ("--benchmark edits --template plain", "--template"),
        ("--benchmark edits --protocol published", "--protocol"),
        ("--dtype float", "--dtype"),
        ("--protocol paper", "--protocol"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_main(["judge", *(common + words).split()])
    with pytest.raises(ValueError, match="--dataset_name"):
        evaluate_main(["judge", "--benchmark", "edits", "--output_dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())
