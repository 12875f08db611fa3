# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate images` and its steps: tiny pipelines and judges draw, score and report."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPConfig, Qwen2_5_VLModel

import launching
from chat_server import ChatServer
from judge_server import pictures_of
from paco_trl.commands import evaluate_arguments
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.data.columns import typed_dataset
from paco_trl.hub.card_data import ImageModelCardData, save_card_data
from paco_trl.utils.chat import EndpointUnavailableError
from test_gedit import PROMPTS_FILE
from tiny_models import build_tiny_clip, build_tiny_flux_kontext


ROOT = Path(__file__).parent.parent
CRITERIA = {
    "Identity": {"face": "The same person is in all images.", "coat": "The coat has the same colour."},
    "Style": {"paint": "All images are painted alike."},
    "Logic": {"order": "The images follow one another."},
}


def make_adapter(folder: Path, pipeline: str, seed: int) -> Path:
    """A LoRA that changes something, with a card."""
    transformer = DiffusionPipeline.from_pretrained(pipeline).transformer
    torch.manual_seed(seed)
    model = get_peft_model(transformer, LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v", "to_out.0"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(pipeline)
    model.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# My adapter\n\nIt was trained.\n")
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, tiny_flux, tiny_qwen):
    """Prompts with criteria, an alignment file, an adapter and a head for aesthetics."""
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [json.loads(line) for line in demo_prompts_path().read_text().splitlines()]
    rows = [row for row in rows if (row["rows"], row["cols"]) in ((2, 2), (1, 3))]
    rows = rows[:2] + rows[-1:]
    for number, row in enumerate(rows):
        row["height"], row["width"] = 16 * row["rows"], 16 * row["cols"]
        row["criteria"] = CRITERIA if number else {"Style": CRITERIA["Style"], "Logic": CRITERIA["Logic"]}
        row["category"], row["subcategory"] = ("Story", "Process")[number % 2], f"kind {number}"
    (folder / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {"Entity": ["a woman"], "Attribute": ["a coat", "a rope"], "Relation": ["a woman on a ladder"]}
    cases = {row["id"]: {str(place): texts for place in range(row["rows"] * row["cols"])} for row in rows}
    (folder / "prompt_alignment.json").write_text(json.dumps(cases))
    make_adapter(folder / "adapter", str(tiny_flux), 0)
    build_tiny_clip(folder / "clip")
    width = CLIPConfig.from_pretrained(folder / "clip").projection_dim
    torch.manual_seed(0)
    head = {"layers.0.weight": torch.randn(8, width), "layers.0.bias": torch.zeros(8)}
    head |= {"layers.2.weight": torch.randn(1, 8), "layers.2.bias": torch.tensor([5.0])}
    save_file(head, folder / "head.safetensors")
    return folder


@pytest.fixture(scope="module")
def options(workspace, tiny_flux, tiny_qwen):
    """Words of the command line that the steps share."""
    benchmark = ["--dataset_name", str(workspace / "bench.jsonl")]
    alignment = ["--alignment_file", str(workspace / "prompt_alignment.json")]
    drawing = [*benchmark, "--model_name_or_path", str(tiny_flux), "--dtype", "float32", "--num_inference_steps", "2"]
    scoring = [*benchmark, *alignment, "--judges", str(tiny_qwen), "--alignment_model", str(tiny_qwen)]
    scoring += ["--aesthetics_head", str(workspace / "head.safetensors"), "--clip_model", str(workspace / "clip")]
    return {"generate": drawing, "score": [*scoring, "--device", "cpu"], "report": [*benchmark, *alignment]}


@pytest.fixture(scope="module")
def evaluated(workspace, options):
    """A base model and a tuned one, drawn, scored and compared."""
    base, tuned = str(workspace / "base"), str(workspace / "tuned")
    evaluate_arguments.main(["generate", *options["generate"], "--output_dir", base])
    evaluate_arguments.main(
        ["generate", *options["generate"], "--output_dir", tuned, "--adapter", str(workspace / "adapter")]
    )
    for folder in (base, tuned):
        evaluate_arguments.main(["score", *options["score"], "--output_dir", folder])
    words = ["--base", base, "--tuned", tuned, "--output_dir", str(workspace / "report")]
    words += ["--train_dataset_name", str(demo_prompts_path()), "--card", str(workspace / "adapter")]
    evaluate_arguments.main(["report", *options["report"], *words])
    return json.loads((workspace / "report" / "results.json").read_text())


def means(results, system=0):
    return {row["metric"]: row["cells"][system]["mean"] for row in results["tables"][0]["rows"]}


class TestT2IS:
    def test_everything_is_in_the_report(self, evaluated, workspace):
        assert [row["metric"] for row in evaluated["tables"][0]["rows"]] == [
            *("aesthetics", "entity", "attribute", "relation", "alignment"),
            *("identity", "style", "logic", "consistency", "average", "duplicates"),
        ]
        assert all(row["difference"]["mean"] is not None for row in evaluated["tables"][0]["rows"])
        assert [one["name"] for one in evaluated["systems"]] == ["tiny-flux", "adapter"]
        assert evaluated["systems"][1]["settings"]["adapter"] == "adapter"
        # The prompts that were trained on are those of the benchmark
        assert len(evaluated["leakage"]["exact"]) == evaluated["num_prompts"] == 3
        page = (workspace / "report" / "report.html").read_text()
        assert page.count("data:image/jpeg;base64,") >= 6
        card = (workspace / "adapter" / "README.md").read_text()
        assert "model-index:" in card and "license: apache-2.0" in card and "It was trained." in card
        for text in (json.dumps(evaluated), page, card, (workspace / "report" / "results.md").read_text()):
            assert str(workspace) not in text

    @pytest.mark.slow
    def test_one_call_is_the_three_steps_and_resumes(self, evaluated, workspace, options, monkeypatch):
        folder = workspace / "whole"
        words = ["images", "t2is", *options["generate"], *options["score"][2:], "--output_dir", str(folder)]
        words += ["--adapter", str(workspace / "adapter"), "--train_dataset_name", str(demo_prompts_path())]
        decode, calls = AutoencoderKL.decode, []

        def stop_at_the_fifth(*args, **kwargs):
            calls.append(len(list(folder.rglob("images/**/*.png"))))
            if len(calls) == 5:
                raise KeyboardInterrupt
            return decode(*args, **kwargs)

        monkeypatch.setattr(AutoencoderKL, "decode", stop_at_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            evaluate_arguments.main(words)
        assert not (folder / "report").exists() and not list(folder.rglob("scores"))
        evaluate_arguments.main(words)
        assert calls == [0, 1, 2, 3, 4, 4, 5]  # three images of the base model, then one of the adapter, and two more
        assert json.loads((folder / "report" / "results.json").read_text())["tables"] == evaluated["tables"]
        monkeypatch.setattr(AutoencoderKL, "decode", None)
        monkeypatch.setattr(
            Qwen2_5_VLModel, "forward", None
        )  # not of the judge, whose code its scores are compared by
        evaluate_arguments.main(words)  # what is there is not made again

    PANELS = {"panel_template": "{panel} {theme}", "panel_generation": "shared_noise"}

    @pytest.fixture
    def trained(self, workspace, options, tmp_path):
        """The adapter, of a run on separate images."""
        shutil.copytree(workspace / "adapter", tmp_path / "adapter")
        run = {"set_layout": "separate", "inference_size": [32, 48], **self.PANELS}
        save_card_data(ImageModelCardData("it", "it", options["generate"][3], settings=run), tmp_path / "adapter")
        return str(tmp_path / "adapter")

    @pytest.mark.slow
    def test_both_systems_are_generated_as_in_the_training_run(self, trained, options, tiny_qwen, tmp_path):
        panels = self.PANELS
        words = ["images", "t2is", *options["generate"], "--judges", str(tiny_qwen), "--device", "cpu"]
        words += ["--adapter", trained]
        other = panels | {"panel_generation": "independent"}
        for name, given, expected in (
            ("run", [], panels),
            ("given", ["--panel_generation", "independent"], other),
            ("grid", ["--set_layout", "grid"], {}),
        ):
            evaluate_arguments.main([*words, "--output_dir", str(tmp_path / name), *given])
            for role in ("base", "tuned"):
                settings = json.loads((tmp_path / name / role / "settings.json").read_text())
                assert {option: settings[option] for option in panels if option in settings} == expected
                assert [settings["height"], settings["width"]] == ([32, 48] if expected else [None, None])
            assert means(json.loads((tmp_path / name / "report" / "results.json").read_text()))["consistency"]

    def test_grids_have_the_size_of_the_training_run(self, workspace, options, tmp_path):
        shutil.copytree(workspace / "adapter", tmp_path / "adapter")
        card = ImageModelCardData("it", "it", options["generate"][3], settings={"inference_size": [64, 96]})
        save_card_data(card, tmp_path / "adapter")
        rows = load_image_set_prompts(options["generate"][1]).remove_columns(["height", "width"])
        rows.to_json(tmp_path / "sizeless.jsonl")
        words = ["generate", "--dataset_name", str(tmp_path / "sizeless.jsonl"), *options["generate"][2:]]
        words += ["--num_inference_steps", "1", "--output_dir", str(tmp_path / "out")]
        with pytest.raises(ValueError, match=r"\(None, None\)"):
            evaluate_arguments.main(words)
        evaluate_arguments.main([*words, "--adapter", str(tmp_path / "adapter")])
        settings = json.loads((tmp_path / "out" / "settings.json").read_text())
        assert [settings["height"], settings["width"]] == [64, 96]

    def test_one_system_is_generated_as_in_the_training_run(self, trained, options, tmp_path):
        words = ["generate", *options["generate"], "--num_inference_steps", "1", "--output_dir", str(tmp_path / "out")]
        evaluate_arguments.main([*words, "--adapter", trained, "--height", "16"])
        settings = json.loads((tmp_path / "out" / "settings.json").read_text())
        expected = self.PANELS | {"height": 16, "width": 48}
        assert {option: settings[option] for option in expected} == expected
        with pytest.raises(ValueError, match="set_layout"):
            evaluate_arguments.main(["score", *options["score"], "--output_dir", str(tmp_path / "out")])

    @pytest.mark.parametrize(
        "changed, message",
        [
            (["--judges", "./nowhere"], "nowhere"),
            (["--aesthetics_head", __file__], "not a safetensors file"),
            (["--alignment_file", "nowhere.json"], "nowhere.json"),
            (["--card", "nowhere"], "nowhere"),
            (["--train_dataset_name", "nowhere.jsonl"], "nowhere.jsonl"),
            (["--num_shown", "0"], "--num_shown"),
            (["--adapter", "nowhere"], "nowhere"),
            (["--model_name_or_path", "other/model"], "was made for"),
            (["--missing", "none"], "'none'"),
            (["--set_layout", "separate", "--panel_template", "{theme}"], "panel_template"),
            (["--panel_generation", "shared_noise"], "`--panel_generation` would do nothing"),
        ],
    )
    def test_what_would_fail_after_hours_is_found_before(self, workspace, options, tmp_path, changed, message):
        words = ["images", "t2is", *options["generate"], *options["score"][2:]]
        words += ["--adapter", str(workspace / "adapter")]
        with pytest.raises((ValueError, OSError), match=message):
            evaluate_arguments.main([*words, "--output_dir", str(tmp_path), *changed])
        assert not list(tmp_path.rglob("*.png"))

    def test_the_directory_of_an_adapter_that_has_changed_is_found_before(
        self, evaluated, workspace, options, tmp_path
    ):
        shutil.copytree(workspace / "tuned", tmp_path / "tuned")
        words = [
            "images",
            "t2is",
            *options["generate"],
            *options["score"][2:],
            "--adapter",
            str(workspace / "adapter"),
        ]
        weights = workspace / "adapter" / "adapter_model.safetensors"
        before = weights.read_bytes()
        try:
            weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            with pytest.raises(ValueError, match="begun with other settings: adapter_weights"):
                evaluate_arguments.main([*words, "--output_dir", str(tmp_path)])
        finally:
            weights.write_bytes(before)
        assert not list((tmp_path / "base").rglob("*.png"))

    def test_the_wrong_way_around(self, evaluated, workspace, options, tmp_path):
        words = ["--base", str(workspace / "tuned"), "--tuned", str(workspace / "base")]
        with pytest.raises(ValueError, match="Swap them"):
            evaluate_arguments.main(["report", *options["report"], *words, "--output_dir", str(tmp_path / "report")])

    def test_other_prompts_than_were_drawn(self, evaluated, workspace, options, tmp_path):
        rows = [json.loads(line) for line in (workspace / "bench.jsonl").read_text().splitlines()]
        rows[0]["prompt"] = rows[0]["prompt"].replace("woman", "man")
        (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--dataset_name", str(tmp_path / "other.jsonl"), "--base", str(workspace / "base")]
        with pytest.raises(ValueError, match="were generated with other prompts"):
            evaluate_arguments.main(["report", *words, "--output_dir", str(tmp_path / "report")])

    @pytest.mark.slow
    def test_pictures_that_somebody_else_made(self, workspace, options, tmp_path, evaluated):
        words = ["generate", *options["generate"], "--output_dir", str(tmp_path / "drawn"), "--panel_files", "True"]
        evaluate_arguments.main(words)
        pictures = tmp_path / "drawn" / "panels"
        assert len(list(pictures.iterdir())) == 2 * 4 + 3
        system = str(tmp_path / "system")
        with pytest.raises(FileNotFoundError, match="Run `generate`"):
            evaluate_arguments.main(["score", *options["score"], "--output_dir", system])
        evaluate_arguments.main(["score", *options["score"], "--output_dir", system, "--images", str(pictures)])
        evaluate_arguments.main(
            ["report", *options["report"], "--base", system, "--output_dir", str(tmp_path / "report")]
        )
        results = json.loads((tmp_path / "report" / "results.json").read_text())
        assert results["systems"][0]["name"] == "panels" and results["leakage"] is None
        # The same pictures, a file for each panel: the same figures
        assert means(results) == pytest.approx(means(evaluated), abs=1e-6)
        (pictures / sorted(path.name for path in pictures.iterdir())[0]).unlink()
        with pytest.raises(ValueError, match="1 of 3 sets lack images"):
            evaluate_arguments.main(["score", *options["score"], "--output_dir", system, "--images", str(pictures)])


class TestGEdit:
    @pytest.fixture(scope="class")
    def edits(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("gedit")
        rng = np.random.default_rng(0)
        rows = []
        for number in range(6):
            image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            kind, language = ("color_alter", "style_change")[number % 2], "en" if number < 3 else "cn"
            text = f"Paint it number {number}."
            rows.append((f"k{number % 3}", kind, text, language, image, image.resize((24, 24))))
        types = dict.fromkeys(("key", "task_type", "instruction", "instruction_language"), "string")
        bench = typed_dataset(rows, **types, input_image_raw="image", input_image="image")
        bench.save_to_disk(folder / "bench")
        build_tiny_flux_kontext(folder / "kontext")
        make_adapter(folder / "adapter", str(folder / "kontext"), 0)
        return folder

    @pytest.mark.slow
    def test_from_drawing_to_the_page(self, edits):
        def say(body):
            images = [part for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
            scores = [8, 6] if len(images) == 2 else [9, 4]
            return json.dumps({"reasoning": "It is so.", "score": scores})

        benchmark = ["--dataset_name", str(edits / "bench")]
        drawing = ["--model_name_or_path", str(edits / "kontext"), "--adapter", str(edits / "adapter")]
        drawing += ["--dtype", "float32", "--num_inference_steps", "2", "--height", "32", "--width", "32"]
        clone = edits / "clone" / "GEdit-Bench" / "viescore"
        clone.mkdir(parents=True)
        (clone / "vie_prompts.py").write_text(PROMPTS_FILE)
        published = ["--protocol", "published", "--gedit_repo", str(edits / "clone")]
        whole = ["images", "gedit", *benchmark, *drawing, "--judges", "judge", "--output_dir", str(edits)]
        with ChatServer(say, models=["judge"]) as server:
            for changed, message in (
                ([], "--judge_url"),
                (["--judge_url", server.url, "--judges", "other"], "no model 'other'"),
                (["--judge_url", server.url, *published[:2]], "gedit_repo"),
            ):
                with pytest.raises((ValueError, EndpointUnavailableError), match=message):
                    evaluate_arguments.main([*whole, *changed])
            assert not list(edits.rglob("*.png")) and not server.requests
            evaluate_arguments.main([*whole, "--judge_url", server.url])
            assert pictures_of(server.requests[-1])[0][0].size == (512, 512)
            benchmark = ["--benchmark", "gedit", *benchmark]
            for name in ("base", "tuned"):
                words = [*benchmark, "--output_dir", str(edits / name)]
                evaluate_arguments.main(["score", *words, "--judges", "judge", "--judge_url", server.url, *published])
                assert pictures_of(server.requests[-1])[0][0].size == (24, 24)
            assert len(server.requests) == 2 * 2 * 6 * 2
        results = json.loads((edits / "report" / "results.json").read_text())
        titles = {table["title"] for table in results["tables"]}
        assert titles >= {"English: all instructions", "Chinese: all instructions"}
        cells = {row["metric"]: row["cells"][0]["mean"] for row in results["tables"][0]["rows"]}
        assert cells == pytest.approx({"semantic_consistency": 6.0, "perceptual_quality": 4.0, "overall": 24**0.5})
        assert (edits / "report" / "report.html").read_text().count("data:image/jpeg;base64,") >= 6
        assert results["protocol"] == "default"
        words = ["--base", str(edits / "base"), "--tuned", str(edits / "tuned")]
        words += ["--output_dir", str(edits / "published")]
        evaluate_arguments.main(["report", *benchmark, *words, *published[:2]])  # without the server
        results = json.loads((edits / "published" / "results.json").read_text())
        assert results["protocol"] == "published" and results["tables"][0]["rows"][0]["cells"][0]["mean"] == 6.0


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate"], "--dataset_name"),
        (["images", "t3is", "--dataset_name", "t2is"], "'t3is'"),
        (["generate", "--dtype", "int8"], "'int8'"),
        (["generate", "--benchmark", "gedit", "--seeds", "0", "1"], "--seeds"),
        (["generate", "--panel_files", "True", "--seeds", "0", "1"], "--seeds"),
        (["generate", "--benchmark", "gedit", "--panel_files", "True"], "--panel_files"),
        (["generate", "--batch_size", "0"], "--batch_size"),
        (["score", "--protocol", "published"], "--protocol"),
        (["score", "--benchmark", "gedit", "--device", "cpu"], "--device"),
        (["score", "--max_concurrency", "2"], "--max_concurrency"),
        (["score", "--judges", "a", "--judge_url", "http://a/v1", "--judge_quantization", "nf4"], "quantization"),
        (["score", "--alignment_model", "model"], "--alignment_file"),
        (
            ["score", "--alignment_url", "http://a/v1", "--alignment_file", "f"],
            "`--alignment_file`, `--alignment_url`",
        ),
        (["score", "--clip_model", "openai/clip-vit-large-patch14"], "--clip_model"),  # the default, typed
        (["score", "--judge_url", "http://a/v1"], "--judge_url"),
        (["score", "--batch_size", "16", "--dtype", "auto"], "`--dtype`, `--batch_size`"),
        (["score", "--judges", "a", "--judge_url", "http://a/v1", "--trust_remote_code"], "--trust_remote_code"),
        (["generate", "--benchmark", "stories", "--dataset_split", "train"], "--dataset_split"),
        (["score", "--judges", "a", "--judge_url", "http://a:1/v1", "--api_key_variable", "NO_SUCH"], "NO_SUCH"),
        (["score", "--judges", "a", "--judge_url", "http://a:1/v1 http://b:1/v1"], "--data-parallel-size"),
        (["generate", "--set_layout", "separate", "--model_name_or_path", "a/nowhere"], "height and width"),
        (["report", "--card", "adapter"], "tuned system"),
    ],
)
def test_wrong_options(words, message, workspace):
    known = ["--dataset_name", str(workspace / "bench.jsonl")] if len(words) > 1 else []
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate_arguments.main([*words, *known])


@pytest.mark.slow
def test_two_processes_are_one(evaluated, workspace, options, tmp_path):
    """Two processes draw and score what one does."""
    words = ["t2is", *options["generate"], *options["score"][2:], "--output_dir", tmp_path]
    command = ["-m", "paco_trl.commands.main", "evaluate", "images", *words, "--adapter", workspace / "adapter"]
    launching.check_run(command, config=launching.CPU_DDP, cwd=tmp_path)
    folder = tmp_path / "base"
    assert len(list((folder / "scores").glob("consistency*.jsonl"))) == 2  # both worked
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    for system in range(2):
        assert means(results, system) == pytest.approx(means(evaluated, system), abs=1e-3)
    for path in sorted((workspace / "base" / "images").rglob("*.png")):
        other = folder / "images" / path.relative_to(workspace / "base" / "images")
        # Another process may round a product differently, which moves a pixel by 1
        assert abs(np.asarray(Image.open(path)).astype(int) - np.asarray(Image.open(other))).max() <= 1
