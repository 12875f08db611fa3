# SPDX-License-Identifier: Apache-2.0
"""Drawing grids: each prompt with each seed, the same files however often a run is stopped and on however many processes."""

import inspect
import logging
import shutil
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from diffusers import DiffusionPipeline, LongCatImagePipeline
from PIL import Image
from safetensors.torch import load_file

from paco_trl import load_for_inference
from paco_trl.data import format_image_set_prompt, split_grid
from paco_trl.data.image_sets import complete_image_sets
from paco_trl.generation.grids import ImageSize, generate_grids, plan_batches
from paco_trl.generation.image_files import is_flat, plain_prompt_arguments
from paco_trl.generation.prompt_encoding import encoding_ahead
from paco_trl.rollout import keyed_generator
from paco_trl.utils.pipelines import truncations_counted
from paco_trl.utils.stage_folder import StageFolder
from tiny_models import build_tiny_flux2_klein


SUBJECTS = ["red fox in the snow", "grey lighthouse by night", "bowl of green apples", "boy with a blue kite"]


def make_prompts(sizes: list[tuple[int, int]], layout: tuple[int, int] = (2, 2), **columns: list) -> Dataset:
    """A prompt for each size, with ids that are no file names; `columns` replace those of the same name, None: none."""
    rows, cols = layout
    subjects = [SUBJECTS[number % len(SUBJECTS)] for number in range(len(sizes))]
    values = {
        "id": [f"{number}/{subject}" for number, subject in enumerate(subjects)], "prompt": subjects,
        "rows": [rows] * len(sizes), "cols": [cols] * len(sizes),
        "panels": [[f"{subject} {panel}" for panel in range(rows * cols)] for subject in subjects],
        "height": [height for height, _ in sizes], "width": [width for _, width in sizes],
    }  # fmt: skip
    values |= columns
    return Dataset.from_dict({name: value for name, value in values.items() if value is not None})


FOUR = make_prompts([(32, 32), (32, 32), (32, 48), (32, 32)])


@pytest.fixture(scope="module")
def flux(tiny_flux) -> DiffusionPipeline:
    return load_for_inference(str(tiny_flux), dtype=torch.float32, device="cpu")[0]


class Calls:
    """Counts the calls of a module while it is entered; `stop_after` of them, the next one fails."""

    def __init__(self, module: torch.nn.Module, stop_after: int | None = None):
        self.module, self.stop_after, self.count = module, stop_after, 0

    def __enter__(self) -> "Calls":
        self.handle = self.module.register_forward_pre_hook(self.called)
        return self

    def called(self, module: torch.nn.Module, args: tuple) -> None:
        if self.count == self.stop_after:
            raise KeyboardInterrupt
        self.count += 1

    def __exit__(self, *exception) -> None:
        self.handle.remove()


def draw(pipeline: DiffusionPipeline, prompts: Dataset, path: Path, **arguments) -> Dataset:
    return generate_grids(pipeline, prompts, StageFolder(path), **{"num_inference_steps": 1, **arguments})


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted((path / "images").rglob("*.png"))}


def pixels(dataset: Dataset) -> list[np.ndarray]:
    return [np.asarray(image).astype(int) for image in dataset["image"]]


def distance(first: list[np.ndarray], second: list[np.ndarray]) -> list[int]:
    return [abs(a - b).max() for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def generated(flux, tmp_path_factory) -> tuple[Dataset, Path]:
    """Four prompts of two sizes with two seeds, an image a call."""
    path = tmp_path_factory.mktemp("grids") / "grids"
    return draw(flux, FOUR, path, seeds=[5, 3]), path


def test_truncations_are_one_line_for_each_kind(flux, tmp_path, caplog):
    """CLIP reads 77 tokens, and prompts of image sets are longer: the pipeline repeats the rest of each in the log."""
    prompts = make_prompts([(32, 32)] * 3, prompt=["A red fox. " * 40, "A lighthouse. " * 40, "A bowl."])
    with caplog.at_level(logging.WARNING):
        draw(flux, prompts, tmp_path / "grids", seeds=[0, 1], batch_size=1, max_sequence_length=32)
    lines = [line for line in caplog.messages if "truncated" in line]
    assert len(lines) == len({line.partition(": ")[2] for line in lines}) == 2  # CLIP and T5
    assert all(line.startswith("For 4 of 6 calls of FluxPipeline: ") and "red fox" not in line for line in lines)
    assert not [line for line in caplog.messages if "longer than the specified maximum" in line]


def test_prompts_that_a_silent_pipeline_truncates_are_named(tmp_path, caplog):
    """Before they are generated, each once: FLUX.2 reads 512 tokens, and says nothing."""
    pipeline = DiffusionPipeline.from_pretrained(build_tiny_flux2_klein(tmp_path / "klein"))
    long = format_image_set_prompt("Hats.", 1, 2, ["A hat.", "A cap." + " Red." * 600])
    for texts, expected in ((["A hat.", long], ["/0' (panel 2)"]), (["A hat.", "A cap."], [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            draw(
                pipeline,
                make_prompts([(64, 64)] * 2, (1, 2), prompt=texts),
                tmp_path / f"grids-{len(expected)}",
                seeds=[0, 1],
            )
        named = [line for line in caplog.messages if "are longer than Flux2KleinPipeline reads" in line]
        assert len(named) == len(expected) and all(name in named[0] for name in expected)
        assert all("1 of 2 prompts of the images" in line for line in named)


class TestGrids:
    def test_columns_and_order(self, generated):
        grids, path = generated
        ids = FOUR["id"]
        assert grids["id"] == [f"{name}/{seed}" for name in ids for seed in (5, 3)]
        assert grids["prompt_id"] == [name for name in ids for _ in range(2)]
        assert grids["seed"] == [5, 3] * 4
        assert grids["rows"] == grids["cols"] == [2] * 8
        assert [image.size for image in grids["image"]] == [(32, 32)] * 4 + [(48, 32)] * 2 + [(32, 32)] * 2
        stored = grids.cast_column("image", ImageFeature(decode=False))["image"]
        assert all(image["bytes"] is None and Path(image["path"]).is_file() for image in stored)
        assert len(files(path)) == len({image["path"] for image in stored}) == 8
        assert all(Path(image["path"]).is_relative_to(path / "images") for image in stored)

    def test_images_are_those_of_the_pipeline(self, generated, flux):
        grids, path = generated
        for row in (0, 1, 5):
            call = {"prompt": FOUR["prompt"][row // 2], "height": 32, "width": [32, 48][row == 5]}
            noise = torch.Generator().manual_seed([5, 3][row % 2])
            image = flux(**call, num_inference_steps=1, generator=noise).images[0]
            assert image.tobytes() == grids["image"][row].tobytes()

        folder = StageFolder(path)
        assert folder.is_done
        loaded = folder.load()
        stored = loaded.cast_column("image", ImageFeature(decode=False))["image"]
        assert all(image["bytes"] is None and Path(image["path"]).is_absolute() for image in stored)
        assert loaded["id"] == grids["id"] and pixels(loaded)[3].tobytes() == pixels(grids)[3].tobytes()
        assert folder.report == {"prompts": 4, "seeds": [5, 3], "grids": 8, "flat grids": []}
        with Image.open(path / "sample.png") as sheet:
            assert min(sheet.size) > 300

    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_separate_images(self, flux, tmp_path, batch_size):
        row = {"layout": "separate", "theme": "A fox.", "panels": ["It runs.", "It runs."], "height": 32, "width": 48}
        longer = row | {"theme": "A hare.", "panels": ["It runs.", "It sits.", "It eats."]}
        prompts = complete_image_sets(Dataset.from_list([row | {"id": "a"}, longer | {"id": "b"}]))
        how = {"seeds": [5, 3], "batch_size": batch_size, "panel_template": "{panel} {theme}"}
        sets = {
            each: draw(flux, prompts, tmp_path / each, panel_generation=each, **how)
            for each in ("independent", "shared_noise")
        }
        assert [image.size for image in sets["independent"]["image"]] == [(96, 32)] * 2 + [(144, 32)] * 2
        assert sets["independent"]["cols"] == [2, 2, 3, 3]
        own, shared = (split_grid(each["image"][1], 1, 2) for each in sets.values())
        generator = torch.Generator().manual_seed(3)
        call = {"prompt": "It runs. A fox.", "height": 32, "width": 48, "num_inference_steps": 1}
        expected = np.asarray(flux(**call, generator=generator).images[0]).astype(int)
        # One prompt and one noise are one image; a batch may round differently
        assert all(abs(np.asarray(image).astype(int) - expected).max() <= 2 for image in (own[0], *shared))
        assert abs(np.asarray(own[1]).astype(int) - expected).max() > 20

    @pytest.mark.parametrize("model", ["qwen_image", "stable_diffusion_3", "z_image"])
    def test_prompts_are_encoded_ahead_where_models_take_turns(self, folder_of, model, tmp_path):
        """As on a device: their images are the same, and text encoders compute before the transformer does."""
        pipeline = load_for_inference(folder_of(model), dtype=torch.float32, device="cpu")[0]
        order: list[str] = []
        for name in ("text_encoder", "transformer"):
            getattr(pipeline, name).register_forward_pre_hook(lambda *_, name=name: order.append(name))
        prompts, how = make_prompts([(32, 32)] * 3), {"seeds": [0], "negative_prompt": "blurry"}
        draw(pipeline, prompts, tmp_path / "each", **how)
        assert len([*groupby(order)]) == 6
        order.clear()
        pipeline.paco_trl_offloader = SimpleNamespace(device=torch.device("cpu"))
        draw(pipeline, prompts, tmp_path / "ahead", **how)
        assert files(tmp_path / "ahead") == files(tmp_path / "each")
        # The negative prompt of a call of its own comes with the first image, and is kept
        assert len([*groupby(order)]) == 2

    def test_what_is_encoded_ahead_and_how_often(self):
        """Of a pipeline that passes the prompt by its position, also with a negative prompt for each row."""

        class Pipeline:
            paco_trl_offloader = SimpleNamespace(device=torch.device("cpu"))

            def encode_prompt(self, prompt, device, negative_prompt=None):
                texts.append((prompt, negative_prompt))
                if prompt == "b":
                    logging.getLogger(__name__).warning("It was truncated: b")
                return torch.tensor([float(len(texts))])

        for negatives, expected in ((["-"] * 4, 3), (list("wxyz"), 3 + 3)):
            pipeline, texts = Pipeline(), list[tuple]()
            upcoming = ["a", "b", "b", "c"]
            with truncations_counted(pipeline) as truncations, encoding_ahead(pipeline, upcoming, truncations):
                found = [pipeline.encode_prompt(p, None, n) for p, n in zip("abbc", negatives, strict=True)]
            assert len(texts) == expected and truncations == {"It was truncated": 2}
            assert (found[1] == found[2]) == (negatives[0] == "-")

    @pytest.mark.parametrize("model", ["flux_kontext", "flux2_klein"])
    def test_the_first_image_of_a_set_is_the_source_of_the_others(self, folder_of, model, flux, tmp_path):
        pipeline = load_for_inference(folder_of(model), dtype=torch.float32, device="cpu")[0]
        row = {"id": "a", "layout": "separate", "theme": "A fox.", "panels": ["Runs.", "Sits.", "Eats."]}
        prompts = complete_image_sets(Dataset.from_list([row | {"height": 64, "width": 64}]))
        sets, own = {}, {"max_sequence_length": 32}
        for way in ("independent", "anchored"):
            # Each set has its own first image: a call is of one, whatever the batch size
            size = 2 if way == "anchored" else 1
            grids = draw(pipeline, prompts, tmp_path / way, seeds=[0, 5], panel_generation=way, batch_size=size, **own)
            sets[way] = [split_grid(image, 1, 3) for image in grids["image"]]
        if model == "flux_kontext":
            own |= {"_auto_resize": False, "max_area": 64**2}
        for seed, independent, anchored in zip((0, 5), *sets.values(), strict=True):
            is_same = [np.array_equal(*panels) for panels in zip(independent, anchored, strict=True)]
            assert is_same == [True, False, False]
            image = pipeline(
                prompt="A fox. Eats.", image=anchored[0], height=64, width=64, num_inference_steps=1,
                generator=keyed_generator(seed, 2), **own,
            ).images[0]  # fmt: skip
            assert np.array_equal(image, anchored[2])
        with pytest.raises(ValueError, match="takes no source"):
            draw(flux, prompts, tmp_path / "refused", panel_generation="anchored")

    def test_references_are_sources(self, folder_of, flux, tmp_path):
        pipeline = load_for_inference(folder_of("flux2_klein"), dtype=torch.float32, device="cpu")[0]
        images = [Image.new("RGB", (64, 96), color) for color in ("red", "blue")]
        row = {"layout": "separate", "theme": "A fox.", "panels": ["Runs.", "Sits."], "height": 64, "width": 64}

        def prompts(count):
            rows = [row | {"id": str(number), "references": [image] * count} for number, image in enumerate(images)]
            return complete_image_sets(Dataset.from_list(rows))

        call = {"prompt": "A fox. Sits.", "height": 64, "width": 64, "num_inference_steps": 1}
        call["max_sequence_length"] = 32
        for way in ("independent", "anchored"):
            how = {"panel_generation": way, "seeds": [0], "batch_size": 4}
            grids = draw(pipeline, prompts(1), tmp_path / way, **how, max_sequence_length=32)
            for grid, image in zip(grids["image"], images, strict=True):
                first, second = split_grid(grid, 1, 2)
                sources = [image] if way == "independent" else [image, first]
                expected = pipeline(image=sources, generator=keyed_generator(0, 1), **call).images[0]
                assert np.array_equal(second, expected)
        assert not np.array_equal(*grids["image"])
        with pytest.raises(ValueError, match="4 source images besides its first panel"):
            draw(pipeline, prompts(4), tmp_path / "refused", panel_generation="anchored")
        draw(flux, prompts(1), tmp_path / "flux", seeds=[0])  # for rewards alone

    def test_arguments_replace_columns_and_reach_the_pipeline(self, flux, tmp_path):
        with Calls(flux.transformer) as calls:
            grids = draw(flux, FOUR.select([0]), tmp_path, seeds=[0], width=64, num_inference_steps=3)
        assert calls.count == 3
        assert [image.size for image in grids["image"]] == [(64, 32)]


class TestBatches:
    @pytest.mark.parametrize(("batch_size", "num_seeds"), [(1, 4), (3, 4), (8, 4), (3, 1)])
    def test_plan_has_everything_once(self, batch_size, num_seeds):
        sizes = [ImageSize(*size) for size in ((8, 8), (8, 16), (8, 8), (8, 8), (16, 8), (8, 16))]
        batches = plan_batches(sizes, list(range(num_seeds)), batch_size)
        planned = sorted((row, seed) for batch in batches for row in batch.rows for seed in batch.seeds)
        assert planned == [(row, seed) for row in range(6) for seed in range(num_seeds)]
        for batch in batches:
            assert {sizes[row] for row in batch.rows} == {batch.size}
            assert len(batch.rows) * len(batch.seeds) <= batch_size
            assert len(batch.rows) == 1 or len(batch.seeds) == num_seeds
        if batch_size == 8 and num_seeds == 4:
            assert [batch.rows for batch in batches] == [[0, 2], [3], [1, 5], [4]]

    @pytest.mark.parametrize("batch_size, calls", [(2, 4), (4, 3)])
    def test_a_prompt_is_encoded_once_for_its_seeds(self, flux, generated, tmp_path, batch_size, calls):
        with Calls(flux.transformer) as drawing, Calls(flux.text_encoder) as encoding:
            grids = draw(flux, FOUR, tmp_path, seeds=[5, 3], batch_size=batch_size)
        assert drawing.count == encoding.count == calls
        # To the last bit or nearly so: in each place the image of this prompt and this seed
        assert max(distance(pixels(grids), pixels(generated[0]))) <= 2

    def test_negative_prompt_and_padding_in_a_batch(self, folder_of, tmp_path):
        """Qwen-Image repeats no negative prompt, and its true CFG predicts twice."""
        pipeline = load_for_inference(folder_of("qwen_image"), dtype=torch.float32, device="cpu")[0]
        guided = {"seeds": [0, 1], "num_inference_steps": 2, "negative_prompt": "a lighthouse", "true_cfg_scale": 3.0}
        alone = pixels(draw(pipeline, FOUR, tmp_path / "alone", **guided))
        together = pixels(draw(pipeline, FOUR, tmp_path / "together", batch_size=4, **guided))
        plain = pixels(draw(pipeline, FOUR, tmp_path / "plain", seeds=[0, 1], num_inference_steps=2))
        assert min(distance(alone, plain)) > 2
        changed = [np.abs(a - b).mean() for a, b in zip(alone, together, strict=True)]
        assert max(changed) < 0.5 * min(np.abs(a - b).mean() for a, b in zip(alone, plain, strict=True))

    def test_pipeline_without_family_class(self, flux, generated, tmp_path):
        class Unlisted(type(flux)):
            pass

        pipeline = Unlisted(**flux.components)
        grids = draw(pipeline, FOUR.select([0]), tmp_path / "grids", seeds=[5, 3])
        assert distance(pixels(grids), pixels(generated[0])[:2]) == [0, 0]
        with pytest.raises(ValueError, match="must be a multiple of 4 .required by the pipeline. and of 3"):
            draw(pipeline, make_prompts([(34, 32)], (3, 1)), tmp_path / "odd")


@pytest.fixture(scope="module")
def whole(flux, tmp_path_factory) -> Path:
    """Drawn without a stop, two images a call."""
    path = tmp_path_factory.mktemp("whole") / "grids"
    draw(flux, FOUR, path, seeds=[0, 1, 2], batch_size=2)
    return path


class TestResume:
    def again(self, flux, path: Path) -> int:
        """Draw what is missing; the number of calls."""
        with Calls(flux.transformer) as calls:
            draw(flux, FOUR, path, seeds=[0, 1, 2], batch_size=2)
        return calls.count

    def test_missing_and_broken_files_are_generated_again(self, flux, whole, tmp_path, caplog):
        shutil.copytree(whole, tmp_path / "grids")
        images = sorted((tmp_path / "grids" / "images").rglob("*.png"))
        before = {file: file.stat().st_mtime_ns for file in images}
        images[0].unlink()  # with its neighbour a call
        images[4].write_bytes(images[4].read_bytes()[:-200])  # truncated
        images[8].write_bytes(b"")
        Image.new("RGB", (4, 4)).save(images[11])  # whole, but another picture
        for place in (0, 4, 8, 11):
            before.pop(images[place])
        with caplog.at_level(logging.WARNING):
            assert self.again(flux, tmp_path / "grids") == 4
        assert files(tmp_path / "grids") == files(whole)
        assert {file: file.stat().st_mtime_ns for file in before} == before
        assert [file for file in images if str(file) in caplog.text] == [images[place] for place in (4, 8, 11)]

    def test_stopped_run_resumes_and_is_equal(self, flux, whole, tmp_path):
        with Calls(flux.transformer, stop_after=5), pytest.raises(KeyboardInterrupt):
            draw(flux, FOUR, tmp_path / "grids", seeds=[0, 1, 2], batch_size=2)
        assert 0 < len(files(tmp_path / "grids")) < 12
        assert not StageFolder(tmp_path / "grids").is_done
        assert self.again(flux, tmp_path / "grids") == 8 - 5
        times = {file: file.stat().st_mtime_ns for file in (tmp_path / "grids" / "images").rglob("*.png")}
        assert self.again(flux, tmp_path / "grids") == 0  # nothing is generated twice
        assert len(times) == 12 and {file: file.stat().st_mtime_ns for file in times} == times
        assert files(tmp_path / "grids") == files(whole)
        folders = StageFolder(tmp_path / "grids"), StageFolder(whole)
        assert folders[0].report == folders[1].report
        assert folders[0].load()["id"] == folders[1].load()["id"]


class TestBadInput:
    @pytest.mark.parametrize(
        "prompts, arguments, message",
        [
            (make_prompts([(32, 32)], id=None), {}, "unique `id`"),
            (make_prompts([(32, 32)] * 2, id=["a", "a"]), {}, "both 'a'"),
            (make_prompts([(32, 32)] * 2, id=["a", ""]), {}, "row 1 .* is ''"),
            (FOUR, {"seeds": [1, 2, 1]}, "`seeds`"),
            (FOUR, {"batch_size": 0}, "`batch_size`"),
            (make_prompts([(32, 32), (30, 32)]), {}, "height of .*1/grey.* is 30.* multiple of 4"),
            (make_prompts([(32, 32), (32, 32)], (2, 3)), {}, "width of .*0/red.* is 32.* 24 or 36"),
            (make_prompts([(32, 32), (32, None)]), {}, "1/grey.*None"),
        ],
    )
    def test_is_named_before_anything_is_generated(self, flux, tmp_path, prompts, arguments, message):
        with Calls(flux.text_encoder) as calls, pytest.raises(ValueError, match=message):
            draw(flux, prompts, tmp_path / "grids", **arguments)
        assert calls.count == 0
        assert files(tmp_path / "grids") == {}

    def test_image_of_another_size(self, flux, tmp_path):
        class Enlarging(type(flux)):
            def __call__(self, prompt, height, **kwargs):
                return super().__call__(prompt, height=2 * height, **kwargs)

            __call__.__signature__ = inspect.signature(type(flux).__call__)

        with pytest.raises(ValueError, match="has 64x32 pixels .* instead of 32x32"):
            draw(Enlarging(**flux.components), FOUR, tmp_path, seeds=[7])
        assert files(tmp_path) == {}


def test_longcat_image_does_not_rewrite_the_prompts(flux):
    assert plain_prompt_arguments(object.__new__(LongCatImagePipeline)) == {"enable_prompt_rewrite": False}
    assert plain_prompt_arguments(flux) == {}


class TestFlatImages:
    SETS = [
        {"layout": "separate", "theme": "A fox.", "panels": ["It runs.", "It sits."], "height": 32, "width": 32, "id": name}
        for name in "ab"
    ]  # fmt: skip

    @pytest.mark.parametrize(
        ("prompts", "seeds", "spoiled", "flat"),
        [
            (
                FOUR.select([0, 1]),
                [4, 8],
                {(0, 1), (1, 1)},
                ["0/red fox in the snow/8", "1/grey lighthouse by night/8"],
            ),
            (complete_image_sets(Dataset.from_list(SETS)), [4], {(1, 0)}, ["a/4"]),  # one image of a set is enough
        ],
    )
    def test_are_named(self, flux, tmp_path, caplog, prompts, seeds, spoiled, flat):
        calls = []

        def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            for place in range(len(output)):
                if (len(calls), place) in spoiled:
                    output[place] = torch.nan  # black, when it becomes a picture
            calls.append(output)
            return output

        handle = flux.vae.decoder.register_forward_hook(spoil)
        try:
            with caplog.at_level(logging.WARNING), pytest.warns(RuntimeWarning, match="invalid value"):
                draw(flux, prompts, tmp_path, seeds=seeds, batch_size=len(seeds))
        finally:
            handle.remove()
        assert f"{len(flat)} of {2 * len(seeds)} grids" in caplog.text and ", ".join(flat) in caplog.text
        draw(flux, prompts, tmp_path, seeds=seeds, batch_size=len(seeds))  # nothing is generated
        assert StageFolder(tmp_path).report["flat grids"] == flat

    def test_one_grey_value_more_is_not_flat(self):
        image = Image.new("RGB", (8, 8), (7, 7, 7))
        assert is_flat(image) and is_flat(image.convert("L"))
        image.putpixel((3, 3), (7, 7, 8))
        assert not is_flat(image)


def test_pickled_weights_are_refused(tiny_flux, tmp_path):
    folder = shutil.copytree(tiny_flux, tmp_path / "pickled")
    (weights,) = (folder / "vae").glob("*.safetensors")
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        load_for_inference(str(folder), dtype=torch.float32)[0]
