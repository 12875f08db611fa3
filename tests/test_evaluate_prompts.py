# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate prompts`: base model against adapters on prompts of the user."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import launching
from paco_trl.commands import evaluate_arguments
from paco_trl.commands.evaluate_arguments import PromptsArguments
from paco_trl.commands.evaluate_prompts import _settings
from paco_trl.data import demo_prompts_path
from paco_trl.data.image_sets import PANEL_OPTIONS
from paco_trl.generation.inference import read_loading_spec
from paco_trl.hub.card_data import ImageModelCardData, save_card_data
from test_evaluate_generation import make_adapter
from tiny_models import build_tiny_flux2_klein, build_tiny_flux_kontext


SETTINGS = ["--height", "32", "--width", "32", "--num_inference_steps", "2", "--bf16", "False"]


def evaluate(*words, model, folder: Path, rewards=("redness",)) -> dict[str, dict]:
    """Run the stage; return the results of each page by its directory."""
    chosen = ["--rewards", *rewards] if rewards else []
    words = ["--model_name_or_path", model, "--output_dir", folder, *chosen, *SETTINGS, *words]
    evaluate_arguments.main(["prompts", *map(str, words)])
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/results.json")}


def row(results: dict, metric: str) -> dict:
    (found,) = [each for each in results["tables"][0]["rows"] if each["metric"] == metric]
    return found


def scores(results: dict, system: int, metric: str = "redness_reward") -> list[float]:
    return [each["scores"][system][metric] for each in results["sets"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Prompts of sets and of single images."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = [json.loads(line) for line in demo_prompts_path().read_text().splitlines()]
    rows = [{name: row[name] for name in ("prompt", "rows", "cols", "panels", "id")} for row in rows]
    rows = [row for row in rows if (row["rows"], row["cols"]) == (2, 2)][:3]
    (folder / "sets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "single.txt").write_text("A red fox in snow.\nA glass of water.\nA red fox in snow.\n")
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, tiny_flux) -> dict[str, Path]:
    """An adapter that changes images, and one that changes nothing."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: make_adapter(folder / name, str(tiny_flux), 0) for name in ("moved", "identity")}
    path = made["identity"] / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({name: each * ("lora_B" not in name) for name, each in weights.items()}, path)
    return made


@pytest.fixture(scope="module")
def singles(files, adapters, tiny_flux, tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """Three single prompts, twice each, with both adapters."""
    folder = tmp_path_factory.mktemp("singles") / "out"
    words = ["--dataset_name", files / "single.txt", "--num_generations", 2]
    return folder, evaluate(*words, "--adapter", *adapters.values(), model=tiny_flux, folder=folder)


def directory_of(results: dict, name: str) -> dict:
    (found,) = [each for directory, each in results.items() if directory.endswith(name)]
    return found


class TestSingles:
    @pytest.mark.slow
    def test_an_adapter_that_changes_images_has_a_gain_and_the_identity_has_none(self, singles):
        moved, identity = (directory_of(singles[1], name) for name in ("moved", "identity"))
        assert scores(moved, 0) == scores(identity, 0) == scores(identity, 1)
        assert row(identity, "redness_reward")["difference"]["mean"] == 0
        assert row(identity, "redness_reward")["difference"]["interval"] == [0, 0]
        gain = row(moved, "redness_reward")["difference"]
        expected = np.mean(scores(moved, 1)) - np.mean(scores(moved, 0))
        assert gain["mean"] == pytest.approx(expected) and abs(expected) > 1e-4
        assert gain["interval"][0] < gain["mean"] < gain["interval"][1]
        assert gain["count"] == 6

    def test_the_page_shows_both_systems(self, singles):
        (page,) = [path.read_text() for path in singles[0].glob("*moved/report.html")]
        assert page.count("<img") == 12
        (markdown,) = [path.read_text() for path in singles[0].glob("*moved/results.md")]
        assert "redness_reward" in markdown


def test_it_says_first_what_it_generates(files, tiny_flux, tmp_path, capsys):
    words = ["--dataset_name", files / "single.txt", "--num_generations", 2]
    evaluate(*words, model=tiny_flux, folder=tmp_path / "out")
    said = capsys.readouterr().err
    assert said.index("6 image(s) of 32 x 32, 2 steps\n") < said.index("Generating images of")
    (tmp_path / "out" / "base" / "images" / "1" / "0.png").unlink()
    evaluate(*words, model=tiny_flux, folder=tmp_path / "out")
    assert "1 image(s) of 32 x 32, 2 steps\n" in capsys.readouterr().err


@pytest.mark.slow
def test_failures_of_rewards_are_left_out_and_counted(files, adapters, tiny_flux, tmp_path, monkeypatch):
    """An own, asynchronous reward gives nothing for one prompt; another run asks only about those again."""
    first = json.loads((files / "sets.jsonl").read_text().splitlines()[0])["prompt"]
    (tmp_path / "flaky_reward.py").write_text(
        "calls = []\nasync def brightness(prompts, completions, panel_images, **kwargs):\n"
        "    assert all(len(panels) == 4 for panels in panel_images)\n"
        "    calls.append(len(prompts))\n"
        "    means = [sum(image.convert('L').resize((1, 1)).getpixel((0, 0)) for _ in '1') for image in completions]\n"
        f"    return [None if prompt == {first!r} else mean / 255 for prompt, mean in zip(prompts, means)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--dataset_name", files / "sets.jsonl", "--adapter", adapters["moved"]]
    rewards = ["flaky_reward.brightness", "redness"]
    results = evaluate(*words, model=tiny_flux, folder=tmp_path / "out", rewards=rewards)
    results = directory_of(results, "moved")
    assert [each["count"] for each in row(results, "brightness")["cells"]] == [2, 2]
    assert row(results, "brightness")["difference"]["count"] == row(results, "sum")["difference"]["count"] == 2
    assert row(results, "redness_reward")["difference"]["count"] == 3
    assert results["sets"][0]["scores"][0]["brightness"] is None
    assert results["systems"][1]["counts"]["images without brightness"] == 1
    assert len(results["alerts"]) == 2
    import flaky_reward

    assert flaky_reward.calls == [3, 3]
    evaluate(*words, model=tiny_flux, folder=tmp_path / "out", rewards=rewards)
    assert flaky_reward.calls == [3, 3, 1, 1]


@pytest.mark.slow
def test_two_processes_are_one(singles, files, adapters, tiny_flux, tmp_path):
    words = ["--dataset_name", files / "single.txt", "--num_generations", 2]
    words += ["--adapter", adapters["moved"], "--model_name_or_path", tiny_flux, "--rewards", "redness"]
    command = ["-m", "paco_trl.commands.main", "evaluate", "prompts", *words, *SETTINGS]
    launching.check_run([*command, "--output_dir", tmp_path / "out"], config=launching.CPU_DDP, cwd=tmp_path)
    assert len(list((tmp_path / "out" / "moved" / "scores").glob("*.jsonl"))) == 2  # both worked
    results = json.loads((tmp_path / "out" / "moved" / "results.json").read_text())
    for system in range(2):
        assert scores(results, system) == pytest.approx(scores(singles[1]["moved"], system), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("column", ["image", "references"])
def test_edits_are_shown_with_their_sources(tmp_path, column):
    is_edit = column == "image"
    model = (build_tiny_flux_kontext if is_edit else build_tiny_flux2_klein)(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", str(model), 0)
    for number in range(2):
        Image.new("RGB", (64, 64), (80 * number, 120, 60)).save(tmp_path / f"{number}.png")
    shown = [f"{number}.png" if is_edit else [f"{number}.png"] for number in range(2)]
    rows = [{"prompt": f"Make it red {number}.", column: file} for number, file in enumerate(shown)]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset_name", tmp_path / "edits.jsonl", "--edits", is_edit, "--adapter", adapter]
    (mine := tmp_path / "out" / "sources" / "0.png").parent.mkdir(parents=True)
    mine.write_text("mine")
    for _ in range(2):  # then with the images of before
        results = directory_of(evaluate(*words, model=model, folder=tmp_path / "out"), "adapter")
    assert abs(row(results, "redness_reward")["difference"]["mean"]) > 1e-4
    (page,) = [path.read_text() for path in (tmp_path / "out").glob("*adapter/report.html")]
    assert page.count("<img") == 6
    assert page.count("<figcaption>source") == 2 and mine.read_text() == "mine"


@pytest.mark.parametrize(
    "words, error",
    [
        (["--rewards", "consistency", "--judge_model", "/none"], "row 0"),
        (["--adapter", "user/a", "user/a"], "the last part of a name"),
        (["--rewards", "consistency", "--judge_model", "MODEL", "--dataset_name", "SETS"], "no vision-language model"),
        (["--rewards", "redness=0.5"], "`rewards` has weights"),
        (["--rewards", "redness", "--judge_url", "http://a/v1"], "--judge_url"),
        (["--max_source_images", 1], "--max_source_images"),
        *(([name, 0], name) for name in ("--num_shown", "--num_generations", "--num_inference_steps")),
    ],
)
def test_what_is_refused(words, error, files, tiny_flux, tmp_path):
    words = [{"MODEL": tiny_flux, "SETS": files / "sets.jsonl"}.get(word, word) for word in words]
    with pytest.raises(ValueError, match=error):
        evaluate("--dataset_name", files / "single.txt", *words, model=tiny_flux, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_of_the_users_is_refused_before_an_image_is_generated(files, tiny_flux, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "results.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="no results.json of an evaluation. Move this away"):
        evaluate("--dataset_name", files / "single.txt", "--rewards", "redness", model=tiny_flux, folder=tmp_path)
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["results.json"]


@pytest.mark.parametrize("rewards", [(), ("consistency", "clip_t")])
def test_an_error_about_the_default_rewards_says_that_they_are(rewards, files, tiny_flux, tmp_path):
    words = ("--dataset_name", files / "single.txt")
    with pytest.raises(ValueError, match="row 0.*another reward") as error:
        evaluate(*words, model=tiny_flux, folder=tmp_path / "out", rewards=rewards)
    assert ("The rewards are the default: consistency, which asks a judge" in str(error.value)) == (not rewards)


@pytest.mark.parametrize(("trained_on", "is_known"), [("edits", True), ("sets", False)])
def test_prompts_are_edits_as_in_the_training_run(trained_on, is_known, adapters, tiny_flux, tmp_path):
    shutil.copytree(adapters["moved"], tmp_path / "moved")
    save_card_data(ImageModelCardData("moved", "moved", str(tiny_flux), trained_on=trained_on), tmp_path / "moved")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    edit = {"prompt": "Make it red.", "image": "a.png", "height": 32, "width": 32}
    (tmp_path / "edits.jsonl").write_text(json.dumps(edit))
    words = ["--dataset_name", tmp_path / "edits.jsonl", "--adapter", tmp_path / "moved", "--judge_model", tiny_flux]
    with pytest.raises(ValueError, match="no vision-language model" if is_known else "add `--edits`"):
        evaluate(*words, model=tiny_flux, folder=tmp_path / "out", rewards=["edit"])
    with pytest.raises(ValueError, match="add `--edits`"):
        evaluate(*words, "--edits", False, model=tiny_flux, folder=tmp_path / "out", rewards=["edit"])


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_model_that_trains_on_edits_gets_them(has_adapter, adapters, tmp_path):
    """By the training default of its family, where no card says otherwise."""
    model = build_tiny_flux_kontext(tmp_path / "model")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "edits.jsonl").write_text(json.dumps({"prompt": "Make it red.", "image": "a.png"}))
    words = ["--dataset_name", tmp_path / "edits.jsonl", "--judge_model", model]
    if has_adapter:
        shutil.copytree(adapters["moved"], tmp_path / "sets")
        config = json.loads((tmp_path / "sets" / "adapter_config.json").read_text())
        config |= {"base_model_name_or_path": str(model)}
        (tmp_path / "sets" / "adapter_config.json").write_text(json.dumps(config))
        save_card_data(ImageModelCardData("sets", "sets", str(model), trained_on="sets"), tmp_path / "sets")
        words += ["--adapter", tmp_path / "sets"]
    with pytest.raises(ValueError, match="add `--edits`" if has_adapter else "no vision-language model"):
        evaluate(*words, model=model, folder=tmp_path / "out", rewards=["edit"])


def test_adapters_of_two_models_are_evaluated_one_by_one(files, adapters, tiny_flux, tmp_path):
    other = shutil.copytree(adapters["moved"], tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text()) | {"base_model_name_or_path": "makers/other"}
    (other / "adapter_config.json").write_text(json.dumps(config))
    words = ["--dataset_name", files / "single.txt", "--adapter", adapters["moved"], other]
    with pytest.raises(ValueError, match="separately"):
        evaluate(*words, model=tiny_flux, folder=tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"r": 3}, "does not fit"),
        ({"lora_dropout": 0.05, "task_type": "CAUSAL_LM"}, "no file named"),
        ({"r": []}, "fit"),
    ],
    ids=str,
)
def test_an_adapter_is_checked_before_a_model_is_loaded(changes, error, files, adapters, tiny_flux, tmp_path):
    model = shutil.copytree(tiny_flux, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    config = shutil.copytree(adapters["moved"], tmp_path / "moved") / "adapter_config.json"
    values = json.loads(config.read_text()) | {"base_model_name_or_path": None}
    config.write_text(json.dumps(values | changes))
    words = ["--dataset_name", files / "single.txt", "--adapter", tmp_path / "moved"]
    with pytest.raises((OSError, ValueError), match=error):
        evaluate(*words, model=model, folder=tmp_path / "out")


def test_the_settings_of_the_training_run_are_the_defaults(make_trainer, files, tiny_flux, tmp_path, monkeypatch):
    make_trainer(guidance_scale=2.5, max_steps=1, save_strategy="steps", save_steps=1).train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    shutil.copy(checkpoint / "pytorch_lora_weights.safetensors", checkpoint / "style.safetensors")  # a stranger's
    names = (".", "adapter_model.safetensors", "pytorch_lora_weights.safetensors", "style.safetensors")
    for name, scale in zip(names, (2.5, 2.5, 2.5, 3.5), strict=True):
        words = ["--dataset_name", files / "single.txt", "--adapter", checkpoint / name]
        (results,) = evaluate(*words, model=tiny_flux, folder=tmp_path / "eval" / name).values()
        assert [each["settings"]["guidance_scale"] for each in results["systems"]] == [scale, scale]


def test_prompts_of_the_training_are_named(adapters, files, tiny_flux, tmp_path, caplog):
    """Of each adapter its own: by the first prompt, which is in `paco_trl.json`."""
    for name, prompt in (("first", "A glass of water."), ("second", "A hat.")):
        shutil.copytree(adapters["moved"], tmp_path / name)
        save_card_data(ImageModelCardData(name, name, str(tiny_flux), prompt=prompt), tmp_path / name)
    words = ["--dataset_name", files / "single.txt", "--adapter", tmp_path / "first", tmp_path / "second"]
    results = evaluate(*words, model=tiny_flux, folder=tmp_path / "out")
    assert [each["alerts"] for each in results.values()] == [
        ["first was trained on the prompt of row 1, and maybe on others: it may be better on these alone."]
        * (name == "first")
        for name in results
    ]
    (said,) = [message for message in caplog.messages if "was trained on" in message]
    assert said.startswith("first ") and "--dataset_split`" in said


@pytest.mark.parametrize("run", [{"height": 1}, {"guidance_scale": 2.0}, {"precision": "float32"}])
def test_a_run_of_another_version_lacks_settings(adapters, tiny_flux, tmp_path, run):
    shutil.copytree(adapters["moved"], tmp_path / "moved")
    save_card_data(ImageModelCardData("moved", "moved", str(tiny_flux), settings=run), tmp_path / "moved")
    args = PromptsArguments(dataset_name="a.jsonl", adapter=[str(tmp_path / "moved")])
    settings = _settings(args, read_loading_spec(args.adapter[0]))
    found = (settings["guidance_scale"], settings["num_inference_steps"], settings["bf16"])
    assert found == (run.get("guidance_scale", 3.5), 20, "precision" not in run)


def test_sets_are_generated_as_in_the_training_run(adapters, files, tiny_flux, tmp_path):
    run = dict(
        num_inference_steps=2, guidance_scale=3.5, precision="float32", set_layout="separate",
        panel_template="{panel} {theme}", panel_generation="shared_noise",
    )  # fmt: skip
    shutil.copytree(adapters["moved"], tmp_path / "moved")
    call = {"num_inference_steps": 2}
    save_card_data(ImageModelCardData("moved", "moved", str(tiny_flux), call=call, settings=run), tmp_path / "moved")
    (tmp_path / "one.jsonl").write_text((files / "sets.jsonl").read_text().splitlines()[0])
    words = ["--dataset_name", tmp_path / "one.jsonl", "--adapter", tmp_path / "moved"]

    def of(name, *given):
        (results,) = evaluate(*words, *given, model=tiny_flux, folder=tmp_path / name).values()
        settings = {name: results["systems"][0]["settings"].get(name) for name in PANEL_OPTIONS}
        page = (tmp_path / name / "moved" / "report.html").read_text()
        assert ('width="134"' in page) == (name != "grid")  # four images of 32 pixels with gaps between them
        return results["sets"][0]["panels"], settings, (tmp_path / name / "base/images/0/0.png").read_bytes()

    layout, settings, shared = of("run")
    assert layout == [1, 4] and settings == {name: run[name] for name in PANEL_OPTIONS}
    layout, settings, independent = of("given", "--panel_generation", "independent")
    assert layout == [1, 4] and settings["panel_template"] == run["panel_template"] and independent != shared
    layout, settings, _ = of("grid", "--set_layout", "grid")
    assert layout == [2, 2] and set(settings.values()) == {None}
    with pytest.raises(ValueError, match="panel_generation"):
        of("refused", "--set_layout", "grid", "--panel_generation", "independent")
    with pytest.raises(ValueError, match="panel_template"):
        of("refused", "--panel_template", "{theme}")
    with pytest.raises(ValueError, match="lines of a grid"):
        evaluate(*words, model=tiny_flux, folder=tmp_path / "refused", rewards=["layout"])
    assert not (tmp_path / "refused").exists()
