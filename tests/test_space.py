# SPDX-License-Identifier: Apache-2.0
"""`paco-trl space`, and the app that it writes: same noise, scores of the judge, in a real browser."""

import functools
import io
import json
import re
import runpy
import shutil
import sys
import tempfile
from base64 import b64decode
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.requirements import InvalidRequirement, Requirement
from peft import LoraConfig, get_peft_model
from PIL import Image

from launching import ROOT
from paco_trl import load_for_inference
from paco_trl.commands.main import main
from paco_trl.commands.space import SpaceArguments, write_space
from paco_trl.data import format_image_set_prompt, split_grid
from paco_trl.hub.card_data import ImageModelCardData, LoRA, RewardRow, load_card_data, save_card_data
from paco_trl.rewards import ConsistencyReward
from paco_trl.rollout import keyed_generator
from paco_trl.tiny import build_tiny_flux_kontext
from test_annotation_app import free_port
from testing_utils import CHROMIUM, CHROMIUM_ARGUMENTS, give_effect


gradio = pytest.importorskip("gradio")
from paco_trl.image_benchmarks import serve_comparison  # noqa: E402
from paco_trl.image_benchmarks.comparison_app import Comparison, make_app  # noqa: E402


FLUX = ROOT / "examples/miniature/weights/flux"
JUDGE = ROOT / "examples/miniature/weights/qwen2.5-vl"
PROMPT = (
    "FOUR-PANEL Images with a 2x2 grid layout of one round figure. Every image shows the same figure. [TOP]-[LEFT]: "
    "Meadow, on the left: red, hat. [TOP]-[RIGHT]: Snow, in the middle: red, hat. [BOTTOM]-[LEFT]: Beach, on the right: "
    "red, hat. [BOTTOM]-[RIGHT]: Night, on the left: red, hat."
)


PASTED = format_image_set_prompt("One hat.", 20, 20, ["A hat."] * 400)


def card(**settings) -> ImageModelCardData:
    rewards = [RewardRow("clip_t", 1.0, "user/clip"), RewardRow("consistency", 1.0, "user/judge", 0.1, 0.2)]
    named = {"title": "my <b>adapter</b>", "repo_id": "toy", "base_model": "user/flux", "lora": LoRA(4, 8.0)}
    return ImageModelCardData(**named, call={"guidance_scale": 4.5}, settings=settings, rewards=rewards)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """An adapter of the toy FLUX that changes its images, with a card."""
    folder = tmp_path_factory.mktemp("adapter") / "toy"
    pipeline = load_for_inference(str(FLUX), dtype=torch.float32, device="cpu")[0]
    model = get_peft_model(
        pipeline.transformer, LoraConfig(r=4, lora_alpha=8, target_modules=["attn.to_q", "attn.to_v"])
    )
    model.peft_config["default"].base_model_name_or_path = str(FLUX)
    give_effect(model, std=0.3)
    model.save_pretrained(folder)
    settings = {"training_size": [64, 64], "inference_size": [128, 128], "num_inference_steps": 3}
    save_card_data(card(**settings, guidance_scale=1.0, precision="float32"), folder)
    return folder


def arguments_of(folder: Path) -> dict:
    """The arguments with which the written app calls `serve_comparison`."""
    with pytest.MonkeyPatch.context() as patch:
        found: dict = {}
        patch.setattr("paco_trl.image_benchmarks.comparison_app.serve_comparison", lambda **given: found.update(given))
        runpy.run_path(str(folder / "app.py"))
    return found


@pytest.fixture
def of_card(adapter, tmp_path):
    """Writes the Space of the adapter with another card; gives the arguments of its app."""

    def write(card: ImageModelCardData) -> dict:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        save_card_data(card, shutil.copytree(adapter, folder / "toy"))
        return arguments_of(write_space(SpaceArguments(str(folder / "toy"), str(folder / "space"))))

    return write


class TestWrite:
    def test_the_settings_are_those_of_training(self, adapter, tmp_path):
        folder = write_space(SpaceArguments(str(adapter), str(tmp_path / "space")))
        assert sorted(path.name for path in folder.iterdir()) == ["README.md", "adapter", "app.py", "requirements.txt"]
        found = arguments_of(folder)
        assert found.pop("prompts")[0].startswith("FOUR-PANEL Images with a 2x2 grid layout")
        assert found == {
            "model": str(FLUX), "adapter": folder / "adapter", "judge": "user/judge", "title": "my <b>adapter</b>",
            "num_inference_steps": 3, "guidance_scale": 1.0, "dtype": "float32", "layout": (2, 2), "panel_size": (64, 64),
        }  # fmt: skip
        names = sorted(path.name for path in (folder / "adapter").iterdir())
        assert names == ["adapter_config.json", "adapter_model.safetensors", "paco_trl.json"]  # safetensors alone

    def test_where_paco_trl_is_installed_from(self, adapter, tmp_path, monkeypatch, capsys):
        """It is on no package index: the Hub builds the Space from the repository, or the address has to be added."""

        def written(name):
            assert main(["space", str(adapter), "--output_dir", str(tmp_path / name)]) == 0
            texts = [(tmp_path / name / each).read_text() for each in ("requirements.txt", "README.md")]
            return *texts, capsys.readouterr().err

        requirements, readme, said = written("unknown")
        line, *others = requirements.splitlines()
        assert line.startswith("paco_trl[apps] @ git+<") and others == ["spaces"] and "on no package index" in readme
        with pytest.raises(InvalidRequirement):
            Requirement(line)
        assert "once the address of paco_trl is in requirements.txt" in said
        folder = tmp_path / "paco_trl-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: paco_trl\nHome-page: https://a.b/paco\n")
        monkeypatch.syspath_prepend(tmp_path)
        requirements, readme, said = written("known")
        assert requirements == "paco_trl[apps] @ git+https://a.b/paco\nspaces\n" and "index" not in readme
        assert "how to publish it.\n" in said

    def test_it_is_written_without_gradio(self, adapter, tmp_path, monkeypatch):
        """For the least version that the package requires; else for the installed one."""
        installed = write_space(SpaceArguments(str(adapter), str(tmp_path / "installed")))
        monkeypatch.setattr("paco_trl.commands.space.get_version", lambda package: None)
        without = write_space(SpaceArguments(str(adapter), str(tmp_path / "without")))
        (least,) = {str(Requirement(text).specifier) for text in requires("paco_trl") if text.startswith("gradio>")}
        for folder, version in ((installed, gradio.__version__), (without, least.removeprefix(">="))):
            assert f'sdk_version: "{version}"' in (folder / "README.md").read_text().splitlines()

    def test_the_negative_prompt_and_the_gallery(self, of_card):
        negative = 'blurry | "<low>" \\ &amp; ](x)'
        settings = {"num_inference_steps": 8, "guidance_scale": 4.5, "negative_prompt": negative}
        # A gallery, and the steps of an evaluation
        call = {"num_inference_steps": 20, "guidance_scale": 4.5}
        found = of_card(replace(card(**settings), call=call, gallery={"a.png": PROMPT}))
        assert found["prompts"] == [PROMPT] and found["layout"] == (2, 2)
        assert (found["num_inference_steps"], found["guidance_scale"]) == (20, 4.5)
        assert found["negative_prompt"] == negative and found["panel_size"] == (512, 512)

    def test_separate_images(self, of_card):
        panels = {"panel_template": "{panel} {theme}", "panel_generation": "shared_noise"}
        settings = {"num_inference_steps": 3, "guidance_scale": 1.0, "set_layout": "separate", **panels}
        found = of_card(replace(card(**settings, inference_size=[64, 32]), gallery={"a.png": "A theme. A panel."}))
        assert {name: found[name] for name in panels} == panels and found["panel_size"] == (64, 32)
        theme, *lines = found["prompts"][0].split("\n")
        assert found["layout"] == (1, len(lines)) and "grid" not in theme and len(lines) > 1
        # Larger images: sets of two fit the app, those of three or four do not
        found = of_card(card(**settings, inference_size=[1536, 1536]))
        assert found["layout"] == (1, 2) and {prompt.count("\n") for prompt in found["prompts"]} == {2}
        with pytest.raises(ValueError, match="2048 x 2048"):
            of_card(card(**settings, inference_size=[2048, 2048]))

    def test_what_cannot_be_compared(self, adapter, tmp_path, capsys):
        copy = tmp_path / "toy"
        shutil.copytree(adapter, copy)
        save_card_data(replace(card(), trained_on="edits"), copy)
        target = ["--output_dir", str(tmp_path / "space")]
        assert main(["space", str(copy), *target]) == 1
        assert main(["space", str(FLUX), *target]) == 1
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine").touch()
        assert main(["space", str(adapter), "--output_dir", str(tmp_path / "full")]) == 1
        assert main(["space", str(adapter), *target, "--judge_model", "nope"]) == 1
        assert main(["space", str(adapter), *target, "--judge_model", str(FLUX)]) == 1
        assert main(["space", str(adapter), *target, "--judge_model", str(adapter)]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 6  # one each
        messages = (
            "edits images", "has no adapter_config.json", "is not empty", "There is no directory 'nope'",
            "is an image pipeline, no vision-language model", "is an adapter of the image pipeline",
        )  # fmt: skip
        for line, message in zip(lines, messages, strict=True):
            assert message in line
        assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "toy"]  # nothing half written
        assert main(["space", str(adapter), *target]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'space'}\n"


def test_the_same_noise_and_the_score_of_training(adapter):
    """The adapter changes the images; the first are those of the pipeline without it; scores are `ConsistencyReward`'s."""
    from paco_trl import PaCoReward

    judge = PaCoReward.from_pretrained(JUDGE, device="cpu")
    pipeline = load_for_inference(str(adapter), str(FLUX), dtype=torch.float32, device="cpu")[0]
    comparison = Comparison(pipeline, judge, (64, 64), 1.0)
    sets = list(comparison.generate(PROMPT, 2, 2, 7, 3))
    assert not np.array_equal(*(np.hstack(panels) for panels in sets))

    untouched = load_for_inference(str(FLUX), dtype=torch.float32, device="cpu")[0]
    for system, panels in ((untouched, sets[0]), (pipeline, sets[1])):
        image = system(
            prompt=PROMPT, height=128, width=128, guidance_scale=1.0, num_inference_steps=3,
            max_sequence_length=system.tokenizer_2.model_max_length, generator=torch.Generator().manual_seed(7),
        ).images[0]  # fmt: skip
        np.testing.assert_array_equal(np.hstack(split_grid(image, 2, 2)), np.hstack(panels))
    scores, theme = comparison.score(PROMPT, sets), PROMPT.split(" [TOP]")[0]
    assert [len(row) for row in scores] == [6, 6] and scores[0] != scores[1]
    expected = ConsistencyReward(judge)([PROMPT] * 2, sets, panel_images=sets, theme=[theme] * 2)
    assert [sum(row) / 6 for row in scores] == pytest.approx(expected, abs=1e-6)
    # Nothing to compare, or nothing to compare with
    assert comparison.score("one", [panels[:1] for panels in sets]) is None
    assert Comparison(pipeline, None, (64, 64), 1.0).score(PROMPT, sets) is None
    with pytest.raises(ValueError, match="height of the grid is 100: it must be a multiple of"):
        next(Comparison(pipeline, None, (50, 64), 1.0).generate(PROMPT, 2, 2, 0, 3))


def test_each_separate_image_has_its_own_call(adapter):
    pipeline = load_for_inference(str(adapter), str(FLUX), dtype=torch.float32, device="cpu")[0]
    lines, sets = "one round figure\n\nmeadow red hat\nmeadow red hat\n", {}
    for way in ("independent", "shared_noise"):
        comparison = Comparison(pipeline, None, (64, 64), 1.0, None, "{panel} {theme}", way)
        assert comparison.parse(lines)[1:] == (1, 2, ["meadow red hat"] * 2)
        sets[way] = list(comparison.generate(lines, 1, 2, 7, 3))
    (base, tuned), (shared, _) = sets.values()
    assert not np.array_equal(*base) and np.array_equal(*shared) and np.array_equal(base[0], shared[0])
    assert not np.array_equal(base[0], tuned[0])
    untouched = load_for_inference(str(FLUX), dtype=torch.float32, device="cpu")[0]
    image = untouched(
        prompt="meadow red hat one round figure", height=64, width=64, guidance_scale=1.0, num_inference_steps=3,
        max_sequence_length=untouched.tokenizer_2.model_max_length, generator=torch.Generator().manual_seed(7),
    ).images[0]  # fmt: skip
    np.testing.assert_array_equal(image, base[0])
    compare, page = compare_of(comparison, (1, 2), (lines,))
    assert "first line" in page and "first line" not in compare_of(Comparison(pipeline, None, (64, 64), 1.0))[1]
    # A first example without a panel: the field for columns, which is not shown, has a number that Gradio accepts
    page = json.loads(compare_of(comparison, (1, 2), ("one round figure", lines))[1])
    (columns,) = [each["props"] for each in page["components"] if each["props"].get("label") == "Columns"]
    assert columns["value"] == columns["minimum"] == 1
    with pytest.raises(gradio.Error, match="one line per image"):
        next(compare("one round figure", 1, 2, 7, 3))
    with pytest.raises(ValueError, match="panel_generation"):
        Comparison(pipeline, None, (64, 64), 1.0, None, "{panel}", "else")


def test_the_first_panel_is_the_source_of_the_others(tmp_path):
    pipeline = load_for_inference(str(build_tiny_flux_kontext(tmp_path)), dtype=torch.float32, device="cpu")[0]
    config = LoraConfig(target_modules=["to_q"], init_lora_weights=False)
    pipeline.transformer = get_peft_model(pipeline.transformer, config)
    sets = {}
    for way in ("independent", "anchored"):
        comparison = Comparison(pipeline, None, (32, 32), 2.5, None, "{panel} {theme}", way)
        sets[way] = list(comparison.generate("a hat\nred\nblue", 1, 2, 7, 2))
    for alone, anchored in zip(*sets.values(), strict=True):
        assert np.array_equal(alone[0], anchored[0]) and not np.array_equal(alone[1], anchored[1])
    second = pipeline(
        image=sets["anchored"][1][0], prompt="blue a hat", height=32, width=32, guidance_scale=2.5, _auto_resize=False,
        num_inference_steps=2, max_area=32 * 32, max_sequence_length=pipeline.tokenizer_2.model_max_length,
        generator=keyed_generator(7, 1),
    ).images[0]  # fmt: skip
    np.testing.assert_array_equal(second, sets["anchored"][1][1])


@pytest.fixture(scope="module")
def comparison(adapter):
    return Comparison(
        load_for_inference(str(adapter), str(FLUX), dtype=torch.float32, device="cpu")[0], None, (64, 64), 1.0
    )


def compare_of(comparison: Comparison, layout: tuple[int, int] = (2, 2), prompts: tuple[str, ...] = ("a hat",)):
    """What the button of the page calls, and the page as Gradio sends it."""
    app = make_app(comparison, ("base", "adapter"), prompts, "title", layout)
    (compare,) = {function.fn for function in app.fns.values() if function.fn.__name__ == "compare"}
    return compare, json.dumps(app.get_config_file(), default=str)


class TestLimits:
    @pytest.mark.parametrize(
        "asked",
        [
            {"prompt": PASTED},
            {"rows": 30}, {"rows": 5, "cols": 5}, {"rows": 0}, {"cols": 1.5}, {"steps": 101}, {"seed": 2**31},
            {"prompt": "a" * 10_001},
        ],
        ids=str,
    )  # fmt: skip
    def test_more_than_the_page_offers(self, comparison, monkeypatch, asked):
        """The fields stop none of them: a prompt names its layout, and a request can have any values."""
        given = {"prompt": "a hat", "rows": 2, "cols": 2, "seed": 0, "steps": 1, **asked}
        compare, _ = compare_of(comparison)
        monkeypatch.setattr(type(comparison.pipeline), "__call__", lambda *_, **__: pytest.fail("it is generated"))
        with pytest.raises(gradio.Error, match="Choose"):
            next(compare(**given))
        if asked != {"prompt": PASTED}:  # its layout is read by the page
            with pytest.raises(ValueError, match="Choose"):
                next(comparison.generate(**given))

    @pytest.mark.parametrize("error", [RuntimeError("/home/me"), ValueError("/home/me"), torch.OutOfMemoryError()])
    def test_any_error_is_a_sentence(self, comparison, monkeypatch, error):
        def fail(*arguments, **keywords):
            raise error

        compare, _ = compare_of(comparison)
        monkeypatch.setattr(type(comparison.pipeline), "__call__", fail)
        shown = compare("a hat", 2, 2, 0, 1)
        next(shown)
        with pytest.raises(gradio.Error) as raised:
            next(shown)
        assert raised.value.message.endswith(".") and "/home/me" not in raised.value.message

    def test_on_zero_gpu(self, comparison, monkeypatch):
        """The package `spaces` is on the Hub's machines: only a decorated function has a GPU there."""
        is_on_gpu: list[bool] = []

        def gpu(duration):
            def decorate(function):
                def in_worker(*arguments):
                    is_on_gpu.append(True)
                    yield from function(*arguments)
                    is_on_gpu.pop()

                in_worker.__name__ = function.__name__
                return in_worker

            return decorate

        generate = type(comparison.pipeline).__call__
        seen = []

        @functools.wraps(generate)
        def watched(*arguments, **keywords):
            seen.append(list(is_on_gpu))
            return generate(*arguments, **keywords)

        monkeypatch.setattr(type(comparison.pipeline), "__call__", watched)
        for modules, expected in (({"spaces": SimpleNamespace(GPU=gpu)}, [True]), ({"spaces": None}, [])):
            with monkeypatch.context() as patch:
                for name, module in modules.items():
                    patch.setitem(sys.modules, name, module)
                compare, _ = compare_of(comparison)
            assert len(list(compare("a hat", 1, 2, 0, 1))) == 4
            assert seen == [expected] * 2
            seen.clear()


def test_single_images(adapter, of_card, tmp_path, capsys):
    trained = replace(load_card_data(adapter), trained_on="single images")
    found = of_card(trained)
    assert found["layout"] == (1, 1) and found["panel_size"] == (128, 128) and found["judge"] is None
    assert not any("grid" in prompt for prompt in found["prompts"])
    (readme,) = tmp_path.glob("*/space/README.md")
    readme = readme.read_text().lower()
    assert "sets" not in readme.split("# my")[1].split("```")[0] and "image sets" not in readme
    assert "judge" not in capsys.readouterr().err
    # Its own prompts, from its gallery
    found = of_card(replace(trained, gallery={"a.png": "a hat"}))
    assert found["prompts"] == ["a hat"] and found["layout"] == (1, 1)


@contextmanager
def served(adapter: Path, monkeypatch, judge: Path):
    """Serve the app; gives its address."""
    monkeypatch.setattr("gradio.http_server.INITIAL_PORT_VALUE", free_port())
    options = {"panel_size": (64, 64), "num_inference_steps": 3, "guidance_scale": 1.0, "dtype": "float32"}
    app = serve_comparison(
        str(FLUX), adapter, str(judge), [PROMPT, "a red hat"], title="<b>toy", prevent_thread_lock=True, **options
    )
    try:
        assert app.server_name == "127.0.0.1"
        yield app.local_url
    finally:
        app.close(verbose=False)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")
def test_in_a_browser(adapter, monkeypatch):
    playwright = pytest.importorskip("playwright.sync_api")
    asked, complaints = [], []
    with served(adapter, monkeypatch, JUDGE) as url, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.wait_for_selector(".panels")
        assert page.locator(".empty").count() == 8 and page.locator("#head b").count() == 0
        page.get_by_role("button", name="Compare", exact=True).click()
        page.wait_for_function("() => document.querySelectorAll('.panels img').length === 8")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        sides = page.locator(".panels img").evaluate_all("images => images.map(image => image.naturalWidth)")
        assert sides == [64] * 8
        sources = page.locator(".panels img").evaluate_all("images => images.map(image => image.src)")
        assert len(set(sources)) == 8
        page.wait_for_selector(".pairs li", state="attached")
        assert page.locator(".pairs li").count() == 6
        shown = [float(text) for text in page.locator(".score b").all_inner_texts()]
        sets = [[Image.open(io.BytesIO(b64decode(each.split(",")[1]))) for each in sources[n : n + 4]] for n in (0, 4)]
        expected = ConsistencyReward(JUDGE, device="cpu")(
            [PROMPT] * 2, sets, panel_images=sets, theme=[PROMPT.split(" [TOP]")[0]] * 2
        )
        assert shown == pytest.approx(expected, abs=0.02)  # JPEG, two decimals
        page.locator("[data-panel='2']").last.click()
        both = page.locator("dialog img").evaluate_all("images => images.map(image => image.src)")
        assert both == [sources[2], sources[6]]
        page.locator("dialog").click()
        # From other noise, other images
        page.get_by_role("button", name="Compare from other noise").click()
        page.wait_for_function(
            "old => document.querySelectorAll('.panels img').length === 8 && "
            "document.querySelector('.panels img').src !== old",
            arg=sources[0],
        )
        # A prompt without a layout takes the one that is set
        page.get_by_label("Prompt").fill("a red hat")
        page.get_by_label("Rows").fill("1")
        page.get_by_role("button", name="Compare", exact=True).click()
        page.wait_for_function("() => document.querySelectorAll('.panels img').length === 4")
        # The scores come after the images, and until then a click is not heard
        page.wait_for_function("() => document.querySelectorAll('.pairs li').length === 1")
        page.get_by_label("Steps").fill("1000")
        page.get_by_role("button", name="Compare", exact=True).click()
        page.get_by_text("greater than maximum value 100").first.wait_for()
        browser.close()
    assert asked and all(re.match(r"http://127\.0\.0\.1:\d+/|data:", address) for address in asked), asked
    assert complaints == []
