# SPDX-License-Identifier: Apache-2.0
"""The moving average of the weights: its arithmetic, where it takes the weights' place, and what is done under ZeRO-3."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import launching
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.checkpointing.weights import EMA, gather_weights, local_weights, trained_parameters, use_weights
from paco_trl.rewards import redness_reward
from testing_utils import SMALL_RUN, are_equal, recorded, square_prompts, weights_of


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


class TestArithmetic:
    @pytest.mark.parametrize("batch_size", [4, 2])
    def test_closed_form_over_optimizer_steps(self, make_small, monkeypatch, batch_size):
        steps = []
        step = EMA.step
        monkeypatch.setattr(EMA, "step", lambda self: (steps.append(1), step(self)))
        trainer, record = recorded(make_small, max_steps=4, ema_decay=0.7, per_device_train_batch_size=batch_size)
        assert trainer.args.gradient_accumulation_steps == 4 // batch_size
        assert len(steps) == 4  # once for each optimizer step, not for each micro-step
        for done in range(1, 5):
            average = record.averages["ema"][done]
            assert all(value.dtype == torch.float32 for value in average.values())
            assert largest_difference(record.weights[done], record.weights[done - 1]) > 1e-3
            assert largest_difference(average, moving_average(0.7, record.weights[: done + 1])) < 3e-7
            # Another decay, the weights of one step earlier, the weights themselves: none of these is it
            assert largest_difference(average, moving_average(0.9, record.weights[: done + 1])) > 1e-3
            assert largest_difference(average, record.weights[done]) > 1e-3

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

    def test_offloaded_average_is_the_same(self, make_small):
        averages = []
        for offload in (False, True):
            trainer = make_small(ema_offload=offload)
            trainer.train()
            assert trainer.ema.offload is offload
            averages.append(trainer.ema.average)
        assert largest_difference(averages[0], weights_of(trainer)) > 1e-3
        assert are_equal(*averages)

    def test_no_average_without_a_decay(self, make_small, tmp_path):
        trainer = make_small(ema_decay=None, save_strategy="steps", save_steps=2)
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

    def test_evaluation_draws_with_the_average(self, make_small, prompts):
        trainer, used = make_small(eval_dataset=prompts.select(range(1)), num_inference_steps_eval=2), []
        trainer.evaluate()  # draws the baseline
        trainer.train()
        raw = weights_of(trainer)
        assert largest_difference(raw, trainer.ema.average) > 1e-3
        trainer.model.register_forward_pre_hook(lambda *_: used.append(weights_of(trainer)))
        averaged = trainer.evaluate()["eval_reward"]
        assert len(used) == 2
        assert all(are_equal(weights, trainer.ema.average) for weights in used)
        assert are_equal(weights_of(trainer), raw)

        trainer._average_callbacks.clear()
        assert trainer.evaluate()["eval_reward"] != averaged
        assert len(used) == 4
        assert all(are_equal(weights, raw) for weights in used[2:])


class TestFiles:
    def test_what_is_saved_is_the_average(self, make_small, tmp_path):
        trainer = make_small()
        trainer.train()
        raw, average = weights_of(trainer), trainer.ema.average
        assert largest_difference(raw, average) > 1e-3
        trainer.save_model(str(tmp_path / "saved"))
        assert are_equal(peft_file(tmp_path / "saved"), average)
        assert are_equal(diffusers_file(tmp_path / "saved"), average)
        assert are_equal(weights_of(trainer), raw)
        assert "moving average, decay 0.9" in (tmp_path / "saved" / "README.md").read_text()

        trainer._average_callbacks.clear()
        trainer.save_model(str(tmp_path / "raw"))
        assert are_equal(peft_file(tmp_path / "raw"), raw)
        assert are_equal(diffusers_file(tmp_path / "raw"), raw)

    def test_a_resumed_run_goes_on_with_the_average(self, make_small, tmp_path):
        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ema_decay": 0.7}
        _, record = recorded(make_small, output_dir=str(tmp_path / "a"), **settings)
        checkpoint, averages = tmp_path / "a" / "checkpoint-2", record.averages["ema"]
        assert are_equal(load_file(checkpoint / "ema.safetensors"), averages[2])
        assert are_equal(load_file(checkpoint / "policy.safetensors"), record.weights[2])
        assert are_equal(peft_file(checkpoint), averages[2])
        assert not are_equal(averages[2], record.weights[2])

        _, again = recorded(make_small, str(checkpoint), output_dir=str(tmp_path / "b"), **settings)
        assert are_equal(again.weights[0], record.weights[2])  # what is trained goes on as it was
        for one, other in zip(again.averages["ema"], averages[2:], strict=True):
            assert are_equal(one, other)
        # An average that began anew at the checkpoint would be another one
        assert largest_difference(moving_average(0.7, record.weights[2:]), averages[4]) > 1e-3


# ---- Several processes ----


class Look(TrainerCallback):
    """Whole weights and averages after each step, and whether forwards of this process read the average and only then."""

    def __init__(self):
        self.masters, self.averages, self.steps = [], [], []

    def whole(self, local):
        return gather_weights(self.trainer.model, local, self.trainer.zero_stage)

    def read(self) -> dict[str, torch.Tensor]:
        """What forwards read, whole."""
        parameters = trained_parameters(self.trainer.model)
        if self.trainer.zero_stage != 3:
            return {name: p.detach().clone() for name, p in parameters.items()}
        return self.whole({name: p.ds_tensor.data.detach().clone() for name, p in parameters.items()})

    def gathered(self) -> dict[str, torch.Tensor]:
        """Small weights that stay gathered between forwards, as they are in each process's memory."""
        parameters = trained_parameters(self.trainer.model)
        return {name: p.detach().clone() for name, p in parameters.items() if p.numel() > 0}

    def on_train_begin(self, args, state, control, **kwargs):
        self.masters.append(self.whole(local_weights(self.trainer.model, self.trainer.zero_stage)))

    def on_step_end(self, args, state, control, **kwargs):
        trainer, stage = self.trainer, self.trainer.zero_stage
        self.on_train_begin(args, state, control)
        self.averages.append(trainer.ema.state_dict())
        own, own_gathered = self.read(), self.gathered()
        average = {name: value.to(own[name].dtype) for name, value in self.averages[-1].items()}
        with use_weights(trainer.model, trainer.ema.average, stage):
            now = self.gathered()
            step = {
                "stage": stage,
                "dtype": str(next(iter(own.values())).dtype),
                "average is read": are_equal(self.read(), average),
                "average is gathered": are_equal(now, {name: average[name] for name in own_gathered}),
                "gathered ones changed": bool(own_gathered) and not are_equal(now, own_gathered),
                # Without DeepSpeed the masters are what forwards read
                "masters are whole": not stage
                or are_equal(self.whole(local_weights(trainer.model, stage)), self.masters[-1]),
            }
        step["back"] = are_equal(self.read(), own) and are_equal(self.gathered(), own_gathered)
        self.steps.append(step | {"average is another": not are_equal(own, average)})


def train_and_look(model: str, output: Path, options: dict) -> None:
    """Train, evaluate with the average, the weights and the average, save, and write down what was seen."""
    dataset = square_prompts()
    names, series = {prompt: index for index, prompt in enumerate(dataset["prompt"])}, []

    def keep_images(prompts, completions, **kwargs):
        for prompt, image in zip(prompts, completions, strict=True):
            if series:
                image.save(output / f"{series[-1]}_{names[prompt]}.png")
        return redness_reward(prompts, completions)

    settings = SMALL_RUN | {"num_prompts_per_generation": 2, "per_device_train_batch_size": 2, "max_steps": 3}
    settings |= {"learning_rate": 3e-2, "gradient_checkpointing": False, **options}
    # 3 does not divide by 2, nor do some of the weights' sizes
    adapter = LoraConfig(r=3, lora_alpha=6, init_lora_weights="gaussian")
    args = PaCoGRPOConfig(str(output), num_inference_steps_eval=2, ema_decay=0.7, **settings)
    evaluation = {"eval_dataset": dataset.select(range(3)), "eval_reward_funcs": keep_images}
    trainer = PaCoGRPOTrainer(model, redness_reward, args, dataset, peft_config=adapter, **evaluation)
    look, found = Look(), {}

    class Evaluate(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            # Here the weights still are where training had them
            own, averages = look.read(), trainer._average_callbacks
            for name, used in (("average", averages), ("raw", {}), ("again", averages)):
                series.append(name)
                trainer._average_callbacks = used
                found[name] = trainer.evaluate()["eval_reward"]
            trainer.save_model(str(output / "saved"))
            found["back"] = are_equal(look.read(), own)

    look.trainer = trainer
    trainer.add_callback(look)
    trainer.add_callback(Evaluate())
    trainer.train()
    rank = trainer.accelerator.process_index
    (output / f"found_{rank}.json").write_text(json.dumps(found | {"steps": look.steps}))
    if rank == 0:
        torch.save({"masters": look.masters, "averages": look.averages}, output / "weights.pt")
    trainer.accelerator.wait_for_everyone()
    if dist.is_initialized():
        dist.destroy_process_group()


class Run:
    """What a run has written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found = [json.loads(path.read_text()) for path in sorted(folder.glob("found_*.json"))]
        weights = torch.load(folder / "weights.pt", weights_only=True)
        self.masters, self.averages = weights["masters"], weights["averages"]

    def images(self, series: str) -> np.ndarray:
        return np.stack([np.asarray(Image.open(self.folder / f"{series}_{n}.png"), dtype=np.int16) for n in range(3)])


@pytest.fixture(scope="module")
def alone(tiny_flux, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train_and_look(str(tiny_flux), folder, {})
    return Run(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"ds3_gather_for_generation": False}, {"bf16": True, "ratio_tolerance": 1e-3}],
    ids=["gathered", "sharded", "bf16"],
)
def test_zero3(alone, options, tiny_flux, tmp_path):
    is_bf16 = options.get("bf16", False)
    config = yaml.safe_load(launching.CPU_ZERO3.read_text()) | ({"mixed_precision": "bf16"} if is_bf16 else {})
    if not options:  # https://github.com/huggingface/diffusers/issues/10969
        config["deepspeed_config"] |= {"gradient_accumulation_steps": 8, "zero3_init_flag": True}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "script.py").write_text(
        "import json, sys\nfrom pathlib import Path\nimport test_ema\n"
        "test_ema.train_and_look(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))\n"
    )
    (tmp_path / "out").mkdir()
    words = [tmp_path / "script.py", tiny_flux, tmp_path / "out", json.dumps({"ddp_backend": "gloo", **options})]
    launching.check_run(words, config=tmp_path / "config.yaml", env={**os.environ, "DS_ACCELERATOR": "cpu"})
    zero3 = Run(tmp_path / "out")
    assert (len(zero3.found), len(zero3.masters), len(alone.masters)) == (2, 4, 4)
    for done in (1, 2, 3):
        masters = zero3.masters[: done + 1]
        assert all(value.dtype == torch.float32 for value in masters[-1].values())
        assert largest_difference(zero3.averages[done - 1], moving_average(0.7, masters)) < 3e-7
    assert largest_difference(zero3.averages[-1], zero3.masters[-1]) > 5e-3
    assert largest_difference(peft_file(zero3.folder / "saved"), zero3.averages[-1]) == 0
    for found in zero3.found:
        assert found["back"] and len(found["steps"]) == 3
        for step in found["steps"]:
            is_gathered = step.pop("gathered ones changed")
            # Weights below the threshold stay gathered from one forward to the next
            assert is_gathered or "ds3_gather_for_generation" not in options
            assert (step.pop("stage"), step.pop("dtype")) == (3, "torch.bfloat16" if is_bf16 else "torch.float32")
            assert all(step.values()), step
    average, raw = zero3.images("average"), zero3.images("raw")
    assert average.shape == (3, 64, 64, 3) and np.abs(average - raw).max() > 3
    assert np.array_equal(average, zero3.images("again"))
    if is_bf16:  # what forwards read is rounded: its average is another one
        rounded = [{name: value.bfloat16().float() for name, value in w.items()} for w in zero3.masters]
        assert largest_difference(zero3.averages[-1], moving_average(0.7, rounded)) > 1e-4
        return
    assert largest_difference(zero3.averages[-1], alone.averages[-1]) < 1e-3
    for series in ("average", "raw"):  # rounding moves a pixel here and there
        difference = np.abs(zero3.images(series) - alone.images(series))
        assert difference.max() <= 2 and difference.mean() < 0.05
    for found in zero3.found:
        assert found["average"] == pytest.approx(alone.found[0]["average"], abs=1e-4)
