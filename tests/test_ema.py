# SPDX-License-Identifier: Apache-2.0
"""The moving average of the weights: its arithmetic, where it takes the weights' place, and what is done under ZeRO-3."""

import functools
import json
import os
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import launching
from launching import CPU_ZERO3
from paco_trl.checkpointing.weights import EMA, use_weights
from testing_utils import are_equal, weights_of


ROOT = Path(__file__).parent.parent


def copies(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights.items()}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((value - second[name]).abs().max().item() for name, value in first.items())


def moving_average(decay: float, weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The closed form: the first weights by decay^n, those of step t by (1 - decay) * decay^(n - t)."""
    steps = len(weights) - 1
    factors = [decay**steps, *((1 - decay) * decay ** (steps - t) for t in range(1, steps + 1))]
    return {
        name: sum(factor * w[name].double() for factor, w in zip(factors, weights, strict=True)).float()
        for name in weights[0]
    }


class Record(TrainerCallback):
    """Weights and average as they are when training begins and after each optimizer step."""

    def __init__(self):
        self.weights, self.averages = [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.weights.append(weights_of(self.trainer))

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(weights_of(self.trainer))
        if self.trainer.ema is not None:
            self.averages.append(copies(self.trainer.ema.average))


@pytest.fixture
def make_trainer(make_trainer):
    """As everywhere, with 2 prompts x 4 images a round."""
    return functools.partial(make_trainer, num_prompts_per_generation=2, gradient_checkpointing=False)


def recorded(make_trainer, **settings):
    record = Record()
    record.trainer = make_trainer(callbacks=[record], **settings)
    return record.trainer, record


class TestArithmetic:
    @pytest.mark.parametrize("batch_size", [4, 2])
    def test_closed_form_over_optimizer_steps(self, make_trainer, monkeypatch, batch_size):
        steps = []
        step = EMA.step
        monkeypatch.setattr(EMA, "step", lambda self: (steps.append(1), step(self)))
        trainer, record = recorded(make_trainer, max_steps=4, ema_decay=0.7, per_device_train_batch_size=batch_size)
        assert trainer.args.gradient_accumulation_steps == 4 // batch_size
        trainer.train()
        assert len(steps) == len(record.averages) == 4  # once for each optimizer step, not for each micro-step
        for done in range(1, 5):
            average = record.averages[done - 1]
            assert all(value.dtype == torch.float32 for value in average.values())
            assert largest_difference(record.weights[done], record.weights[done - 1]) > 1e-3
            assert largest_difference(average, moving_average(0.7, record.weights[: done + 1])) < 3e-7
            # Another decay, the weights of one step earlier, the weights themselves: none of these is it
            assert largest_difference(average, moving_average(0.9, record.weights[: done + 1])) > 1e-3
            assert largest_difference(average, record.weights[done]) > 1e-3
        assert largest_difference(record.averages[0], record.weights[0]) > 1e-3

    def test_the_step_is_decay_times_the_old_average(self):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
            ema = EMA(model, 0.75, zero_stage=0, offload=False)
            model.weight.fill_(5.0)
        assert torch.equal(ema.average["weight"], torch.ones(2, 3))  # a copy: it does not follow by itself
        ema.step()
        assert torch.equal(ema.average["weight"], torch.full((2, 3), 2.0))  # 0.75 * 1 + 0.25 * 5
        ema.step()
        assert torch.equal(ema.average["weight"], torch.full((2, 3), 2.75))
        assert torch.equal(model.weight, torch.full((2, 3), 5.0))

    def test_low_precision_weights_are_averaged_in_float32(self):
        model = nn.Linear(3, 2).to(torch.bfloat16)
        model.bias.requires_grad_(False)
        with torch.no_grad():
            model.weight.fill_(1.0)
            ema = EMA(model, 0.9, zero_stage=0, offload=False)
            model.weight.fill_(1.0 + 2**-7)  # the next bf16 number: a tenth of the way there is none
        ema.step()
        assert ema.average.keys() == {"weight"}
        assert ema.average["weight"].dtype == torch.float32
        assert ema.average["weight"].unique().item() == pytest.approx(1.0 + 0.1 * 2**-7, abs=1e-7)

    def test_whole_and_load_are_copies(self):
        model = nn.Linear(3, 2)
        ema = EMA(model, 0.9, zero_stage=0, offload=False)
        whole = ema.state_dict()
        assert are_equal(whole, weights_of_module(model))
        assert ema.state_dict(keep=False) == {}
        whole["weight"].add_(1.0)
        assert not are_equal(whole, ema.average)
        ema.load_state_dict(whole)
        assert are_equal(whole, ema.average)
        whole["weight"].add_(1.0)
        assert not are_equal(whole, ema.average)
        assert not are_equal(ema.average, weights_of_module(model))  # the weights are left alone

    def test_offloaded_average_is_the_same(self, make_trainer):
        averages = []
        for offload in (False, True):
            trainer = make_trainer(ema_offload=offload)
            trainer.train()
            assert trainer.ema.offload is offload
            averages.append(trainer.ema.average)
        assert largest_difference(averages[0], weights_of(trainer)) > 1e-3
        assert are_equal(*averages)

    def test_no_average_without_a_decay(self, make_trainer, tmp_path):
        trainer = make_trainer(ema_decay=None, save_strategy="steps", save_steps=2)
        trainer.train()
        assert trainer.ema is None
        checkpoint = tmp_path / "out" / "checkpoint-2"
        assert not (checkpoint / "ema.safetensors").exists()
        assert are_equal(load_file(checkpoint / "policy.safetensors"), weights_of(trainer))
        assert are_equal(peft_file(checkpoint), weights_of(trainer))
        assert "moving average" not in (checkpoint / "README.md").read_text()


def weights_of_module(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def peft_file(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter of PEFT's file, by the names that the model has for it."""
    saved = load_file(folder / "adapter_model.safetensors")
    return {re.sub(r"\.(lora_[AB])\.", r".\1.default.", name): value for name, value in saved.items()}


def diffusers_file(folder: Path) -> dict[str, torch.Tensor]:
    """The same of diffusers' file, whose up matrices are multiplied by alpha / rank = 2."""
    saved = load_file(folder / "pytorch_lora_weights.safetensors")
    return {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.replace("transformer.", "base_model.model.", 1)): (
            value / 2 if ".lora_B." in name else value
        )
        for name, value in saved.items()
    }


class TestSwap:
    def test_forwards_see_other_weights_and_then_their_own_to_the_bit(self):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(torch.bfloat16)
        model[1].requires_grad_(False)
        own = weights_of_module(model)
        other = {"0.weight": torch.randn(2, 3), "0.bias": torch.randn(2)}
        images = torch.ones(4, 3, dtype=torch.bfloat16)
        before = model(images)
        parameters = list(model.parameters())
        with use_weights(model, other, 0):
            assert torch.equal(model[0].weight, other["0.weight"].bfloat16())
            assert torch.equal(model[1].weight, own["1.weight"])
            assert not torch.equal(model(images), before)
        assert are_equal(weights_of_module(model), own)
        assert torch.equal(model(images), before)
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        with pytest.raises(KeyError, match="planted"), use_weights(model, other, 0):
            assert not torch.equal(model[0].weight, own["0.weight"])
            raise KeyError("planted")
        assert are_equal(weights_of_module(model), own)

    def test_evaluation_draws_with_the_average(self, make_trainer, prompts):
        trainer, used = make_trainer(eval_dataset=prompts.select(range(1)), num_inference_steps_eval=2), []
        trainer.evaluate()  # draws the baseline
        trainer.train()
        raw = weights_of(trainer)
        assert largest_difference(raw, trainer.ema.average) > 1e-3
        trainer.model.register_forward_pre_hook(lambda *_: used.append(weights_of(trainer)))
        averaged = trainer.evaluate()["eval_reward"]
        assert len(used) == 2
        assert all(are_equal(weights, trainer.ema.average) for weights in used)
        assert are_equal(weights_of(trainer), raw)

        trainer.averages.clear()
        assert trainer.evaluate()["eval_reward"] != averaged
        assert len(used) == 4
        assert all(are_equal(weights, raw) for weights in used[2:])

    def test_training_and_rollout_use_the_weights_themselves(self, make_trainer, prompts):
        trainer, used = make_trainer(max_steps=4, ema_decay=0.5), []

        class Watch(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                used.clear()

            def on_step_end(self, args, state, control, **kwargs):
                # Forwards of the step came before its update: the rollout's and the replay's
                assert used
                assert all(are_equal(weights, self.weights) for weights in used)
                self.weights = weights_of(trainer)

        watch = Watch()
        watch.weights = weights_of(trainer)
        trainer.add_callback(watch)
        trainer.model.register_forward_pre_hook(lambda *_: used.append(weights_of(trainer)))
        trainer.train()
        assert largest_difference(watch.weights, trainer.ema.average) > 1e-3


class TestFiles:
    def test_what_is_saved_is_the_average(self, make_trainer, tmp_path):
        trainer = make_trainer()
        trainer.train()
        raw, average = weights_of(trainer), trainer.ema.average
        assert largest_difference(raw, average) > 1e-3
        trainer.save_model(str(tmp_path / "saved"))
        assert are_equal(peft_file(tmp_path / "saved"), average)
        assert are_equal(diffusers_file(tmp_path / "saved"), average)
        assert are_equal(weights_of(trainer), raw)
        assert "moving average, decay 0.9" in (tmp_path / "saved" / "README.md").read_text()

        trainer.averages.clear()
        trainer.save_model(str(tmp_path / "raw"))
        assert are_equal(peft_file(tmp_path / "raw"), raw)
        assert are_equal(diffusers_file(tmp_path / "raw"), raw)

    def test_a_resumed_run_goes_on_with_the_average(self, make_trainer, tmp_path):
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ema_decay": 0.7}
        whole, record = recorded(make_trainer, output_dir=str(tmp_path / "a"), **settings)
        whole.train()
        checkpoint = tmp_path / "a" / "checkpoint-2"
        assert are_equal(load_file(checkpoint / "ema.safetensors"), record.averages[1])
        assert are_equal(load_file(checkpoint / "policy.safetensors"), record.weights[2])
        assert are_equal(peft_file(checkpoint), record.averages[1])
        assert not are_equal(record.averages[1], record.weights[2])

        resumed, again = recorded(make_trainer, output_dir=str(tmp_path / "b"), **settings)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert are_equal(again.weights[0], record.weights[2])  # what is trained goes on as it was
        for done in (0, 1):
            assert are_equal(again.averages[done], record.averages[2 + done])
        # An average that began anew at the checkpoint would be another one
        assert largest_difference(moving_average(0.7, record.weights[2:]), record.averages[3]) > 1e-3


# ---- Several processes ----

# Trains with an average, evaluates, looks at weights and average after each optimizer step and writes down what it saw
SCRIPT = '''
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import TrainerCallback

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.rewards import redness_reward
from paco_trl.checkpointing.weights import gather_weights, local_weights, use_weights, trained_parameters


def main():
    model, output, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    dataset = load_image_set_prompts(demo_prompts_path())
    square = [i for i, (r, c) in enumerate(zip(dataset["rows"], dataset["cols"], strict=True)) if r == c == 2]
    dataset = dataset.select(square).remove_columns(["height", "width"])
    names = {prompt: index for index, prompt in enumerate(dataset["prompt"])}
    series = []

    def keep_images(prompts, completions, trainer_state, **kwargs):
        if series:
            for prompt, image in zip(prompts, completions, strict=True):
                image.save(output / f"{series[-1]}_{names[prompt]}.png")
        return redness_reward(prompts, completions)

    args = PaCoGRPOConfig(
        output_dir=str(output), use_cpu=True, height=64, width=64, num_generations=4, num_prompts_per_generation=4,
        per_device_train_batch_size=2, num_inference_steps=4, num_inference_steps_eval=2, learning_rate=3e-2,
        report_to="none", save_strategy="no", log_completions=False, plot_curves=False, disable_tqdm=True, ema_decay=0.7,
        **{"bf16": False, "max_steps": 3, **options},
    )
    output.mkdir(parents=True, exist_ok=True)
    trainer = PaCoGRPOTrainer(
        model=model,
        reward_funcs=redness_reward,
        eval_reward_funcs=keep_images,
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(3)),
        # 3 does not divide by 2, nor do some of the weights' sizes
        peft_config=LoraConfig(r=3, lora_alpha=6, init_lora_weights="gaussian"),
    )
    found = {"steps": []}

    def whole(local):
        return gather_weights(trainer.model, local, trainer.zero_stage)

    def read():
        """What forwards read, whole."""
        parameters = trained_parameters(trainer.model)
        if trainer.zero_stage != 3:
            return {name: p.detach().clone() for name, p in parameters.items()}
        return whole({name: p.ds_tensor.data.detach().clone() for name, p in parameters.items()})

    def gathered():
        """Small weights that stay gathered between forwards, as they are in each process's memory."""
        return {n: p.detach().clone() for n, p in trained_parameters(trainer.model).items() if p.numel() > 0}

    def same(a, b):
        return a.keys() == b.keys() and all(torch.equal(v, b[n]) for n, v in a.items())

    masters, averages, after_training_forwards = [], [], []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            masters.append(whole(local_weights(trainer.model, trainer.zero_stage)))

        def on_step_end(self, args, state, control, **kwargs):
            stage = trainer.zero_stage
            masters.append(whole(local_weights(trainer.model, stage)))
            averages.append(trainer.ema.state_dict())
            own, own_gathered = read(), gathered()
            step = {"stage": stage, "gathered": len(own_gathered), "trained": len(own)}
            dtype = next(iter(own.values())).dtype
            step["dtype"] = str(dtype)
            with use_weights(trainer.model, trainer.ema.average, stage):
                step["use_weights in"] = same(read(), {n: v.to(dtype) for n, v in averages[-1].items()})
                now = gathered()
                step["gathered ones too"] = now.keys() == own_gathered.keys() and all(
                    torch.equal(v, averages[-1][n].to(dtype)) for n, v in now.items()
                )
                step["gathered ones changed"] = not same(now, own_gathered)
                step["masters untouched"] = same(whole(local_weights(trainer.model, stage)), masters[-1])
            step["changed"] = not same(own, {n: v.to(dtype) for n, v in averages[-1].items()})
            step["back"] = same(read(), own) and same(gathered(), own_gathered)
            found["steps"].append(step)

    trainer.add_callback(Look())

    class Evaluate(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            # Here the weights still are where training had them
            own = read()
            series.append("average")
            found["average"] = trainer.evaluate()
            averages, trainer.averages = trainer.averages, {}
            series.append("raw")
            found["raw"] = trainer.evaluate()
            trainer.averages = averages
            series.append("again")
            found["again"] = trainer.evaluate()
            found["weights after evaluations"] = same(read(), own)
            trainer.save_model(str(output / "saved"))
            found["weights after saving"] = same(read(), own)

    trainer.add_callback(Evaluate())
    trainer.train()

    (output / f"found_{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
    if trainer.accelerator.is_main_process:
        torch.save({"masters": masters, "averages": averages}, output / "weights.pt")
    trainer.accelerator.wait_for_everyone()
    if dist.is_initialized():
        dist.destroy_process_group()


main()
'''


class Run:
    """What a run of the script has written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found = [json.loads(path.read_text()) for path in sorted(folder.glob("found_*.json"))]
        weights = torch.load(folder / "weights.pt", weights_only=True)
        self.masters, self.averages = weights["masters"], weights["averages"]

    def images(self, series: str) -> np.ndarray:
        from PIL import Image

        return np.stack([np.asarray(Image.open(self.folder / f"{series}_{n}.png"), dtype=np.int16) for n in range(3)])


@pytest.fixture(scope="module")
def run(tiny_flux, tmp_path_factory):
    """Runs the script: `run("zero3", max_steps=2)`, once for each name."""
    folder = tmp_path_factory.mktemp("ema")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = {}

    def start(name: str, kind: str = "alone", **options) -> Run:
        if name in done:
            return done[name]
        config = None
        if kind != "alone":
            config = yaml.safe_load((launching.CPU_DDP if kind == "ddp" else CPU_ZERO3).read_text())
            if options.get("bf16"):
                config["mixed_precision"] = "bf16"
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
            config = folder / f"{name}.yaml"
            options["ddp_backend"] = "gloo"
        command = [folder / "script.py", tiny_flux, folder / name, json.dumps(options)]
        launching.check_run(command, config=config, env={**os.environ, "DS_ACCELERATOR": "cpu"})
        done[name] = Run(folder / name)
        return done[name]

    return start


def assert_swapped_everywhere(run: Run, stage: int, processes: int) -> None:
    assert len(run.found) == processes
    for found in run.found:
        assert len(found["steps"]) >= 2
        for step in found["steps"]:
            assert step["stage"] == stage
            assert step["changed"]
            for name in ("use_weights in", "masters untouched" if stage else "changed", "back"):
                assert step[name], name
            assert step["gathered ones too"]
        assert found["weights after evaluations"]
        assert found["weights after saving"]


def assert_average_is_evaluated(run: Run, alone: Run) -> None:
    average, raw = run.images("average"), run.images("raw")
    assert average.shape == (3, 64, 64, 3)
    assert np.abs(average - raw).max() > 3  # the average is not the weights
    assert np.array_equal(average, run.images("again"))
    # Rounding moves a pixel here and there
    for series in ("average", "raw"):
        assert np.abs(run.images(series) - alone.images(series)).max() <= 2, series
        assert np.abs(run.images(series) - alone.images(series)).mean() < 0.05, series
    for found in run.found:
        assert found["average"]["eval_reward"] == pytest.approx(alone.found[0]["average"]["eval_reward"], abs=1e-4)


@pytest.mark.slow
class TestProcesses:
    def test_zero3_has_the_same_average(self, run):
        alone, zero3 = run("alone"), run("zero3", "zero3")
        assert [len(w.masters) for w in (alone, zero3)] == [4, 4]
        assert largest_difference(zero3.averages[-1], alone.averages[-1]) < 1e-3
        assert largest_difference(zero3.averages[-1], zero3.masters[-1]) > 5e-3
        for done in (1, 2, 3):
            average = moving_average(0.7, zero3.masters[: done + 1])
            assert largest_difference(zero3.averages[done - 1], average) < 3e-7
        assert_swapped_everywhere(zero3, 3, 2)
        assert_average_is_evaluated(zero3, alone)
        assert largest_difference(peft_file(zero3.folder / "saved"), zero3.averages[-1]) == 0

    def test_zero3_in_bf16_follows_the_masters(self, run):
        zero3 = run("bf16", "zero3", bf16=True, ratio_tolerance=1e-3)
        assert zero3.found[0]["steps"][0]["dtype"] == "torch.bfloat16"
        for done in (1, 2, 3):
            masters = zero3.masters[: done + 1]
            assert all(value.dtype == torch.float32 for value in masters[-1].values())
            assert largest_difference(zero3.averages[done - 1], moving_average(0.7, masters)) < 3e-7
        # What forwards read is rounded: its average is another one
        rounded = [{name: value.bfloat16().float() for name, value in w.items()} for w in zero3.masters]
        assert largest_difference(zero3.averages[-1], moving_average(0.7, rounded)) > 1e-4
        assert_swapped_everywhere(zero3, 3, 2)
        average, raw = zero3.images("average"), zero3.images("raw")
        assert np.abs(average - raw).max() > 3
        assert np.array_equal(average, zero3.images("again"))

    def test_zero3_without_gathering_keeps_small_weights_in_place(self, run):
        # Of a size below the threshold they stay gathered from one forward to the next, and must be use_weights as well
        alone, zero3 = run("alone"), run("sharded", "zero3", ds3_gather_for_generation=False)
        for found in zero3.found:
            for step in found["steps"]:
                assert step["gathered"] > 0
                assert step["gathered ones changed"]
        assert_swapped_everywhere(zero3, 3, 2)
        assert_average_is_evaluated(zero3, alone)
