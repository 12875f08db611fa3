# SPDX-License-Identifier: Apache-2.0
"""`PaCoGRPOTrainer.evaluate()`: what is drawn and how often, what is said of it, the baseline, the best checkpoint."""

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from diffusers import FluxPipeline
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file

import launching
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTTrainer
from paco_trl.checkpointing.weights import gather_weights, local_weights
from paco_trl.data import make_pair
from paco_trl.evaluation import bootstrap_interval, grid_artifact_score
from paco_trl.rewards import panel_similarity_reward, redness_reward
from paco_trl.rollout.prompt_rows import PromptRows
from paco_trl.rollout.sde import keyed_generator
from paco_trl.trainer.checks import warn_of_trained_pairs, warn_of_trained_rows
from paco_trl.trainer.evaluator import Evaluation, load_baseline, save_baseline
from paco_trl.utils.processes import end_training
from testing_utils import LORA, SMALL_RUN, are_equal, count_images, jsonl, square_prompts, weights_of


NOT_NEW = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False)  # B is not 0


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.int16)


class Watch:
    """The reward `redness_reward`, which keeps what it was called with."""

    __name__ = "watch"

    def __init__(self):
        self.images, self.prompts, self.steps = [], [], []

    def __call__(self, prompts, completions, trainer_state, **kwargs):
        self.images.extend(pixels(image) for image in completions)
        self.prompts.extend(prompts)
        self.steps.extend([trainer_state.global_step] * len(prompts))
        return redness_reward(prompts, completions)

    def take(self) -> list[np.ndarray]:
        """The images since the last time."""
        taken, self.images = self.images, []
        return taken


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def pipeline(tiny_flux) -> FluxPipeline:
    return FluxPipeline.from_pretrained(str(tiny_flux))


@pytest.fixture
def make(make_trainer, pipeline, prompts, watch) -> Callable:
    """As `make_trainer`, with rounds of 2 prompts, and three prompts to evaluate by `watch`, in two denoising steps."""

    def make(kind=PaCoGRPOTrainer, **kwargs) -> PaCoGRPOTrainer:
        settings = {
            "model": copy.deepcopy(pipeline),  # takes less time than to load it
            "eval_dataset": prompts.select(range(3)),
            "eval_reward_funcs": watch,
            "num_prompts_per_generation": 2,
            "num_inference_steps_eval": 2,
            "gradient_checkpointing": False,
            **({"num_noise_levels": 1} if kind is PaCoNFTTrainer else {}),
            **kwargs,
        }
        return make_trainer(kind, **settings)

    return make


def draw_plainly(pipeline, prompt: str, row: int, callback=None) -> np.ndarray:
    """As the pipeline itself draws a prompt, with the noise of an evaluation."""
    call = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 3.5, "max_sequence_length": 32}
    noise = keyed_generator(42, 4, 0, row, 0, 0)
    return pixels(pipeline(prompt, generator=noise, callback_on_step_end=callback, **call).images[0])


@pytest.fixture(scope="module")
def base_images(pipeline, prompts) -> list[np.ndarray]:
    """The first three prompts as the pipeline itself draws them, with the noise of an evaluation."""
    pipeline = copy.deepcopy(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return [draw_plainly(pipeline, prompts[row]["prompt"], row) for row in range(3)]


def same_images(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    assert len(first) == len(second) > 0
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


class TestDrawing:
    def test_the_baseline_is_what_the_pipeline_draws_without_an_adapter(self, make, watch, base_images):
        assert base_images[0].shape == (64, 64, 3)  # full resolution: rounds are drawn at 32 x 32
        assert not same_images(base_images, base_images[1:] + base_images[:1])
        trainer = make()
        metrics = trainer.evaluate()
        assert same_images(watch.take(), base_images)
        # The untrained model is its own baseline: drawn once, gained nothing
        assert metrics["eval_reward"] == metrics["eval_reward_baseline"] and metrics["eval_reward_gain"] == 0

    def test_the_noise_is_the_same_at_every_evaluation(self, make, watch, base_images):
        trainer = make(learning_rate=0.1)
        first, series = trainer.evaluate(), [watch.take()]
        trainer.train()
        for _ in range(2):
            after = trainer.evaluate()
            series.append(watch.take())
        assert [len(images) for images in series] == [3, 3, 3]  # the baseline once in all
        assert same_images(series[0], base_images)
        assert not same_images(series[1], series[0])
        assert same_images(series[1], series[2])
        assert after["eval_reward_baseline"] == first["eval_reward"]
        assert after["eval_reward_gain"] == pytest.approx(after["eval_reward"] - first["eval_reward"], abs=1e-6)
        assert after["eval_reward_gain"] != 0
        assert trainer.model.training

    def test_the_training_rewards_with_their_weights_are_the_default(self, make, prompts):
        rewards = [redness_reward, panel_similarity_reward]
        metrics = make(eval_reward_funcs=None, reward_funcs=rewards, reward_weights=[0.25, -2.0]).evaluate()
        parts = [metrics[f"eval_rewards/{reward.__name__}/mean"] for reward in rewards]
        assert metrics["eval_reward"] == pytest.approx(0.25 * parts[0] - 2.0 * parts[1], abs=1e-5)
        own = make(reward_weights=[0.25], eval_reward_funcs=rewards)
        assert own.evaluate()["eval_reward"] == pytest.approx(sum(parts), abs=1e-5)  # a plain sum

    def test_batches(self, make, watch, prompts, monkeypatch):
        def size(row, i):
            return {"height": 48 if i in (1, 3, 4) else 64, "width": 64}

        drawn, batches = [], []
        for batch_size in (1, 2):
            dataset = prompts.select(range(6)).map(size, with_indices=True)
            trainer = make(eval_dataset=dataset, per_device_eval_batch_size=batch_size, peft_config=NOT_NEW)

            def generate(*args, generate=trainer.policy.recording_pipeline.generate, **kwargs):
                batches.append(len(args[5]))
                return generate(*args, **kwargs)

            monkeypatch.setattr(trainer.policy.recording_pipeline, "generate", generate)
            trainer.evaluate()
            by_prompt = dict(zip(watch.prompts[-6:], watch.take()[-6:], strict=True))
            drawn.append([by_prompt[prompt] for prompt in dataset["prompt"]])
        assert batches == [1] * 12 + [2, 2, 1, 1] * 2  # rows 0 and 2, 1 and 3, 4, 5
        for first, second in zip(*drawn, strict=True):
            assert first.shape == second.shape and np.abs(first - second).max() <= 1
        assert np.abs(drawn[0][0] - drawn[0][2]).max() > 1


class TestMetrics:
    def test_means_and_intervals_are_those_of_the_images(self, make, tmp_path):
        """Of a trained model with two rewards, two images of each of three prompts."""
        rewards = [redness_reward, panel_similarity_reward]
        trainer = make(eval_reward_funcs=rewards, num_generations_eval=2, log_completions=True, learning_rate=0.1)
        trainer.train()
        metrics = trainer.evaluate()
        entries = jsonl(tmp_path / "out" / "contact_sheets" / "eval_step_000002.jsonl")
        assert len(entries) == 6
        groups = [entry["prompt"] for entry in entries]
        assert len(set(groups)) == 3
        assert [entry["generation"] for entry in entries] == [0, 1] * 3
        totals = {side: np.zeros(6) for side in ("", "_before")}
        for name in ("redness_reward", "panel_similarity_reward"):
            after, before = (np.array([entry[name + side] for entry in entries]) for side in totals)
            totals[""] += after
            totals["_before"] += before
            self.check(metrics, f"eval_rewards/{name}/mean", f"eval_rewards/{name}/", after, before, groups)
            assert metrics[f"eval_rewards/{name}/failure_rate"] == 0
            assert metrics[f"eval_rewards/{name}/std"] == pytest.approx(after.std(ddof=1), abs=1e-5)
        self.check(metrics, "eval_reward", "eval_reward_", totals[""], totals["_before"], groups)
        assert metrics["eval_reward_std"] == pytest.approx(totals[""].std(ddof=1), abs=1e-5)

    def check(self, metrics, name, prefix, after, before, groups):
        close = functools.partial(pytest.approx, abs=5e-6)  # the file has six digits
        assert metrics[name] == close(after.mean())
        assert [metrics[f"{prefix}ci_{end}"] for end in ("low", "high")] == close(bootstrap_interval(after, groups))
        assert metrics[f"{prefix}baseline"] == close(before.mean())
        assert metrics[f"{prefix}gain"] == close((after - before).mean())
        assert abs(metrics[f"{prefix}gain"]) > 2e-5  # how much depends on the tokenizers, which are trained in place
        interval = [metrics[f"{prefix}gain_ci_{end}"] for end in ("low", "high")]
        assert interval == close(bootstrap_interval(after - before, groups))
        # Not drawn image by image, and the differences of the same images, not of any two
        # Closer than the figures are compared: the two may lie near one another
        assert interval != pytest.approx(bootstrap_interval(after - before), abs=5e-7)
        assert interval != close(bootstrap_interval(after - np.roll(before, 2), groups))

    def test_a_reward_that_compares_gets_groups_to_compare(self, make):
        def above_others(prompts, completions, num_generations, **kwargs):
            values = redness_reward(prompts, completions)
            return [sum(value > other for other in values) / (num_generations - 1) for value in values]

        with pytest.raises(ValueError, match="'above_others' compares .* `num_generations_eval` is 1"):
            make(model="nowhere", eval_reward_funcs=[redness_reward, above_others], eval_on_start=True)
        with pytest.raises(ValueError, match="`num_generations_eval` is 1"):
            make(eval_reward_funcs=above_others).evaluate()
        metrics = make(eval_reward_funcs=above_others, num_generations_eval=2).evaluate()
        assert metrics["eval_rewards/above_others/mean"] == 0.5

    def test_an_optional_reward_may_be_missing_for_all(self, make):
        def none(prompts, completions, **kwargs):
            return [None] * len(completions)

        rewards = {"reward_funcs": [redness_reward, none], "eval_reward_funcs": None}
        metrics = make(**rewards, reward_required=[True, False]).evaluate()
        assert metrics["eval_rewards/none/failure_rate"] == 1.0
        assert "eval_rewards/redness_reward/mean" in metrics and "eval_reward" not in metrics
        with pytest.raises(RuntimeError, match="3 of 3 evaluation images could not be scored"):
            make(**rewards).evaluate()

    def test_an_image_without_a_reward_is_counted_and_not_zero(self, make, tmp_path):
        def sometimes_none(prompts, completions, **kwargs):
            return [2.0, None, 5.0]

        trainer = make(eval_reward_funcs=[sometimes_none, redness_reward], log_completions=True)
        metrics = trainer.evaluate()
        assert metrics["eval_rewards/sometimes_none/failure_rate"] == pytest.approx(1 / 3)
        assert metrics["eval_rewards/redness_reward/failure_rate"] == 0
        assert metrics["eval_rewards/sometimes_none/mean"] == 3.5
        entries = jsonl(tmp_path / "out" / "contact_sheets" / "eval_step_000000.jsonl")
        assert [entry["sometimes_none"] for entry in entries] == [2.0, None, 5.0]
        red = [entry["redness_reward"] for entry in entries]
        assert metrics["eval_rewards/redness_reward/mean"] == pytest.approx(sum(red) / 3, abs=1e-5)
        # The sum exists where both do
        assert metrics["eval_reward"] == pytest.approx((2.0 + red[0] + 5.0 + red[2]) / 2, abs=1e-5)

    @pytest.mark.parametrize("fails", [True, False])
    def test_a_gain_that_is_not_the_difference_of_the_means_is_explained(self, make, caplog, fails):
        """The first call of a reward, for the baseline, has a score less than the second."""
        calls = []

        def scores(prompts, completions, **kwargs):
            calls.append(prompts)
            return [2.0, None, 5.0] if fails and len(calls) == 1 else [3.0, 9.0, 7.0]

        metrics = make(eval_reward_funcs=scores, peft_config=NOT_NEW).evaluate()
        difference = metrics["eval_reward"] - metrics["eval_reward_baseline"]
        assert (metrics["eval_reward_gain"] == pytest.approx(difference)) is not fails
        assert ("2 of 3" in caplog.text) is fails

    def test_grid_artifacts(self, make, watch):
        trainer = make(peft_config=NOT_NEW)
        assert trainer.family.size_multiple(trainer.pipeline) == 4
        plain = trainer.evaluate()
        images = watch.take()[3:]
        expected = np.mean([grid_artifact_score(Image.fromarray(i.astype(np.uint8)), 4, 2, 2) for i in images])
        assert plain["eval_grid_artifact"] == pytest.approx(expected)
        assert plain["eval_grid_artifact_ci_low"] <= expected <= plain["eval_grid_artifact_ci_high"]


@pytest.mark.parametrize("rows, said", [(range(6, 9), "2 of 3 rows of the dataset 'evaluation'"), (range(8, 9), None)])
def test_rows_that_are_trained_on_are_counted(make_trainer, prompts, caplog, rows, said):
    make_trainer(train_dataset=prompts.select(range(8)), eval_dataset=prompts.select(rows))
    assert caplog.text.count("are also trained on") == (said is not None) and (said or "") in caplog.text


@pytest.mark.parametrize("color, is_trained_on", [("red", True), ("blue", False)])
def test_an_edit_of_another_source_is_not_trained_on(caplog, color, is_trained_on):
    def rows(where: str, color: str) -> PromptRows:
        dataset = Dataset.from_list([{"prompt": "Make it snow.", "image": Image.new("RGB", (32, 32), color)}])
        return PromptRows(dataset, PaCoGRPOConfig("out", use_cpu=True, bf16=False), where)

    warn_of_trained_rows(rows("the dataset", "red"), [rows("the other", color)])
    assert ("1 of 1 rows of the other" in caplog.text) == is_trained_on


def test_pairs_that_are_trained_on_are_counted(caplog):
    def pairs(*colors: str, question: str = "Alike?", decision: str = "Yes") -> Dataset:
        images = [Image.new("RGB", (8, 8), color) for color in ("white", *colors)]
        return Dataset.from_list([make_pair(images[0], image, question, decision) for image in images[1:]])

    warn_of_trained_pairs(pairs("red", "blue"), {})
    warn_of_trained_pairs(pairs("red"), {"mine": pairs("green", "blue"), "yours": pairs("red", question="Same?")})
    assert not caplog.text
    warn_of_trained_pairs(pairs("red", "blue"), {"mine": pairs("green", "red", decision="No")})
    assert "1 of 2 rows of `mine` are also trained on" in caplog.text


class TestBaseline:
    def test_it_is_drawn_anew_when_what_it_depends_on_changes(self, make, watch, prompts):
        trainer = make(eval_dataset=prompts.select(range(1)))
        trainer.evaluate()
        assert len(watch.take()) == 1
        for name, value in {"seed": 7, "num_inference_steps_eval": 3, "num_generations_eval": 2, "height": 48}.items():
            before = getattr(trainer.args, name)
            setattr(trainer.args, name, value)
            trainer.evaluate()
            assert len(watch.take()) == (2 if name == "num_generations_eval" else 1), name
            setattr(trainer.args, name, before)
            trainer.evaluate()
            assert not watch.take()  # it was kept
        trainer.evaluate(prompts.select(range(1, 2)))
        assert len(watch.take()) == 1

    def test_another_run_in_the_same_folder_does_not_take_it(self, make, watch):
        # Its rewards may have been others of the same names
        metrics = make(eval_reward_funcs=redness_reward).evaluate()

        def redness_reward_of_another_kind(prompts, completions, **kwargs):
            return [reward + 1 for reward in watch(prompts, completions, **kwargs)]

        redness_reward_of_another_kind.__name__ = "redness_reward"
        again = make(eval_reward_funcs=redness_reward_of_another_kind).evaluate()
        assert len(watch.take()) == 3
        assert again["eval_reward_baseline"] == pytest.approx(metrics["eval_reward_baseline"] + 1)
        for _ in range(2):  # what a reward reads elsewhere may have changed
            trainer = make(eval_reward_funcs=redness_reward)
            drawn = count_images(trainer.pipeline.transformer)
            trainer.evaluate()
            assert sum(drawn) == 2 * 3

    def test_what_is_saved_is_loaded_for_the_same_key_only(self, tmp_path):
        nan = float("nan")
        rewards, total = torch.tensor([[0.25, nan], [0.5, -1.0]]), torch.tensor([nan, -0.5])
        artifacts, extra = torch.tensor([nan, 0.125], dtype=torch.float64), {"reason": ["a", None]}
        saved = Evaluation(rewards, total, artifacts, extra, pictures={1: Image.new("RGB", (4, 4), "red")})
        assert load_baseline(tmp_path / "baseline.pt", "key") is None
        save_baseline(tmp_path / "baseline.pt", "key", saved)
        loaded = load_baseline(tmp_path / "baseline.pt", "key")
        for name in ("rewards", "total", "grid_artifacts"):
            assert getattr(loaded, name).dtype == getattr(saved, name).dtype
            assert torch.equal(getattr(loaded, name).nan_to_num(9.0), getattr(saved, name).nan_to_num(9.0)), name
        assert loaded.extra == saved.extra
        assert list(loaded.pictures) == [1] and loaded.pictures[1].getpixel((0, 0)) == (255, 0, 0)
        assert load_baseline(tmp_path / "baseline.pt", "another key") is None

    def test_all_weights_the_baseline_is_drawn_before_training(self, make, watch, base_images):
        trainer = make(peft_config=None, eval_strategy="steps", eval_steps=2)
        trainer.train()
        images = watch.take()
        assert watch.steps == [0] * 3 + [2] * 3
        assert same_images(images[:3], base_images)
        assert not same_images(images[3:], base_images)
        (entry,) = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
        assert entry["eval_reward_gain"] != 0

    def test_can_be_switched_off(self, make, watch):
        metrics = make(peft_config=NOT_NEW, eval_baseline=False).evaluate()
        assert len(watch.take()) == 3 and "eval_reward" in metrics
        assert not any("baseline" in name or "gain" in name for name in metrics)


class TestInTraining:
    def test_several_datasets(self, make, watch, prompts, tmp_path):
        datasets = {"a": prompts.select(range(1)), "b": prompts.select(range(1, 3))}
        trainer = make(eval_dataset=datasets, eval_strategy="steps", eval_steps=2, log_completions=True)
        trainer.train()
        assert len(watch.take()) == 2 * 3
        out = tmp_path / "out"
        for name, count in (("a", 1), ("b", 2)):
            (entry,) = [entry for entry in trainer.state.log_history if f"eval_{name}_reward" in entry]
            scores = [line["watch"] for line in jsonl(out / "contact_sheets" / f"eval_{name}_step_000002.jsonl")]
            assert len(scores) == count
            assert entry[f"eval_{name}_reward"] == pytest.approx(sum(scores) / count, abs=1e-5)
            assert (f"eval_{name}_reward_ci_low" in entry) == (count > 1)  # of one prompt there is no interval
            assert (out / "evaluation" / f"eval_{name}_baseline.pt").exists()

    @pytest.mark.parametrize(("best", "ema_decay"), [(2, 0.8), (3, None)])
    def test_the_best_checkpoint_is_loaded_as_it_was_evaluated(self, make, prompts, tmp_path, best, ema_decay):
        planted = {1: 0.2, 2: 0.5, 3: 0.3} | {best: 0.9}

        def judge(prompts, completions, trainer_state, **kwargs):
            return [planted[trainer_state.global_step]] * len(prompts)

        steps = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        evaluation = {"eval_reward_funcs": judge, "eval_dataset": prompts.select(range(1)), **steps}
        trainer = make(**evaluation, load_best_model_at_end=True, ema_decay=ema_decay)
        assert (trainer.args.metric_for_best_model, trainer.args.greater_is_better) == ("reward", True)
        trainer.train()
        evaluated = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
        assert evaluated == pytest.approx([planted[step] for step in (1, 2, 3)])
        assert trainer.state.best_metric == pytest.approx(0.9)
        out = tmp_path / "out"
        assert Path(trainer.state.best_model_checkpoint) == out / f"checkpoint-{best}"
        name = "policy" if ema_decay is None else "ema"
        weights = {step: load_file(out / f"checkpoint-{step}" / f"{name}.safetensors") for step in (2, 3)}
        assert not are_equal(weights[2], weights[3])
        assert are_equal(weights_of(trainer), weights[best])
        if ema_decay is not None:
            assert are_equal(trainer.ema.average, weights[best])
            assert not are_equal(load_file(out / f"checkpoint-{best}" / "policy.safetensors"), weights[best])
        trainer.save_model(str(tmp_path / "saved"))
        folders = tmp_path / "saved", out / f"checkpoint-{best}"
        assert are_equal(*(load_file(folder / "adapter_model.safetensors") for folder in folders))


# ---- Two processes ----


def train_and_evaluate(model: str, output: str) -> None:
    """Trains with evaluations whose images do not divide over two processes, and writes down what each process sees."""
    dataset, drawn = square_prompts(), []
    planted = {0: 0.0, 2: 0.2, 4: 0.9, 6: 0.4}

    def judge(prompts, completions, trainer_state, **kwargs):
        drawn.append(len(prompts))
        # The third prompt cannot be judged; the best step is planted
        return [
            None if prompt == dataset[2]["prompt"] else reward + planted[trainer_state.global_step]
            for prompt, reward in zip(prompts, redness_reward(prompts, completions), strict=True)
        ]

    settings = SMALL_RUN | {
        "max_steps": 6, "num_prompts_per_generation": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": False,
        "per_device_eval_batch_size": 2, "num_inference_steps_eval": 2,
        "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "log_completions": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
    }  # fmt: skip
    trainer = PaCoGRPOTrainer(
        model, redness_reward, PaCoGRPOConfig(output, **settings), dataset, dataset.select(range(5)),
        eval_reward_funcs=judge, peft_config=LORA,
    )  # fmt: skip
    trainer.train()
    stage = trainer.zero_stage
    found = {
        "weights": gather_weights(trainer.model, local_weights(trainer.model, stage), stage),
        "average": trainer.ema.state_dict(),
        "log": [entry for entry in trainer.state.log_history if "eval_reward" in entry],
        "drawn": drawn,
        "best": trainer.state.best_model_checkpoint,
    }
    torch.save(found, f"{output}/found_{trainer.accelerator.process_index}.pt")
    end_training(trainer.accelerator)


@pytest.fixture(scope="module")
def run(tiny_flux, tmp_path_factory):
    """Runs it alone, with DDP or with ZeRO-3, once each; gives the folder and what each process has found."""
    folder = tmp_path_factory.mktemp("evaluate")
    code = "import sys; from test_evaluate import train_and_evaluate; train_and_evaluate(*sys.argv[1:])"

    @functools.cache
    def start(kind: str) -> tuple[Path, list[dict]]:
        config = {"alone": None, "ddp": launching.CPU_DDP, "zero3": launching.CPU_ZERO3}[kind]
        command = ["-c", code, tiny_flux, folder / kind]
        launching.check_run(command, config=config, env={**os.environ, "DS_ACCELERATOR": "cpu"})
        files = sorted((folder / kind).glob("found_*.pt"))
        return folder / kind, [torch.load(file, weights_only=True) for file in files]

    return start


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "zero3"])
class TestTwoProcesses:
    def test_metrics_are_those_of_one_process(self, run, kind):
        alone, (reference,) = run("alone")
        folder, found = run(kind)
        assert len(found) == 2 and len(reference["log"]) == 4
        assert all(0 < entry["eval_rewards/judge/failure_rate"] < 0.5 for entry in reference["log"])
        for rank, process in enumerate(found):
            for entry, expected in zip(process["log"], reference["log"], strict=True):
                assert entry.keys() == expected.keys()
                # The first evaluation is of the same weights, later ones of weights that rounding has moved
                tolerance = 1e-4 if entry["step"] == 0 else 1e-2
                for name in entry.keys() - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
                    assert entry[name] == pytest.approx(expected[name], abs=tolerance), name
            # 5 images in batches of 2, 2 and 1 over two processes: the first batch is generated twice and scored once. The
            # first evaluation is the baseline at once.
            assert process["drawn"] == [3 - rank] * 4
        assert reference["drawn"] == [5] * 4
        lines = [jsonl(path / "contact_sheets" / "eval_step_000006.jsonl") for path in (alone, folder)]
        assert [entry["prompt"] for entry in lines[0]] == [entry["prompt"] for entry in lines[1]]
        assert [entry["judge"] is None for entry in lines[1]] == [False, False, True, False, False]

    def test_every_process_loads_the_best_checkpoint(self, run, kind):
        folder, found = run(kind)
        best = load_file(folder / "checkpoint-4" / "ema.safetensors")
        assert not are_equal(best, load_file(folder / "checkpoint-6" / "ema.safetensors"))
        for rank, process in enumerate(found):
            assert are_equal(process["average"], best) and are_equal(process["weights"], best), rank
            assert process["best"] == str(folder / "checkpoint-4")
