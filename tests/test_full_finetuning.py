# SPDX-License-Identifier: Apache-2.0
"""What is trained other than a new adapter: all weights of the transformer, or an adapter that exists. And losses of recorded means."""

import copy
import functools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import PeftModel
from safetensors.torch import load_file, save_file

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.checkpointing.weights import use_weights
from paco_trl.rewards import redness_reward
from testing_utils import LORA, SMALL_RUN, are_equal, count_images, draw, logs_with, update_of, weights_of


NOWHERE = "/nowhere/at/all"


@pytest.fixture
def make(make_small):
    """`make_small` for all weights, at a learning rate that moves them."""
    return functools.partial(make_small, peft_config=None, learning_rate=1e-3)


class TestAllWeights:
    def test_all_of_the_transformer_and_nothing_else(self, make):
        trainer = make(weight_decay=0.0)
        modules = {name: getattr(trainer.pipeline, name) for name in ("vae", "text_encoder", "text_encoder_2")}
        frozen = {name: copy.deepcopy(module.state_dict()) for name, module in modules.items()}
        before = weights_of(trainer)
        assert not isinstance(trainer.model, PeftModel)
        assert len(before) == len(list(trainer.pipeline.transformer.parameters())) > 50
        trainer.train()
        for name, value in weights_of(trainer).items():
            assert not torch.equal(value, before[name]), name
        for name, module in modules.items():
            assert are_equal(module.state_dict(), frozen[name]), name
            assert not any(parameter.requires_grad for parameter in module.parameters())

    @pytest.mark.parametrize("bf16", [False, True])
    def test_weights_are_float32_and_the_ratio_begins_at_one(self, make, bf16):
        trainer = make(bf16=bf16)
        outputs = set()
        trainer.model.transformer_blocks[0].attn.to_q.register_forward_hook(
            lambda module, args, output: outputs.add(output.dtype)
        )
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        frozen = torch.bfloat16 if bf16 else torch.float32
        assert trainer.pipeline.vae.dtype == trainer.pipeline.text_encoder_2.dtype == frozen
        trainer.train()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        assert outputs == {frozen}  # rollout and replay alike
        (on_policy,) = logs_with(trainer, "ratio_deviation_on_policy/step_1")
        (off_policy,) = logs_with(trainer, "ratio_deviation/step_1")
        assert on_policy <= (trainer.args.epsilon / 10 if bf16 else 0.0)
        assert off_policy > 1e-5

    def test_what_is_saved_is_the_averaged_transformer(self, make, tiny_flux, tmp_path):
        trainer = make(max_steps=4, learning_rate=1e-2)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        assert not (tmp_path / "saved" / "adapter_model.safetensors").exists()
        base = draw(FluxPipeline.from_pretrained(tiny_flux))
        transformer = FluxTransformer2DModel.from_pretrained(tmp_path / "saved", subfolder="transformer")
        assert are_equal(dict(transformer.named_parameters()), trainer.ema.average)
        assert str(tiny_flux) not in (tmp_path / "saved" / "transformer" / "config.json").read_text()
        tuned = draw(FluxPipeline.from_pretrained(tiny_flux, transformer=transformer))
        assert np.abs(tuned - base).mean() > 2
        # With the buffers, which are not trained
        trainer.model.register_buffer("extra", torch.tensor([3.0]))
        trainer.save_model(str(tmp_path / "with-buffer"))
        files = (tmp_path / "with-buffer" / "transformer").glob("*.safetensors")
        assert torch.equal(load_file(next(files))["extra"], torch.tensor([3.0]))
        last = draw(trainer.pipeline)
        assert not np.array_equal(last, tuned)
        with use_weights(trainer.model, trainer.ema.average, 0):
            assert np.array_equal(draw(trainer.pipeline), tuned)
        assert np.array_equal(draw(trainer.pipeline), last)

    def test_the_reference_is_a_copy_of_before_training(self, make, tiny_flux):
        trainer = make(beta=0.01, max_steps=4)
        base = FluxTransformer2DModel.from_pretrained(tiny_flux, subfolder="transformer")
        assert are_equal(dict(trainer.ref_model.named_parameters()), dict(base.named_parameters()))
        assert not any(parameter.requires_grad for parameter in trainer.ref_model.parameters())
        trained, reference = count_images(trainer.model), count_images(trainer.ref_model)
        trainer.train()
        assert sum(trained) == 2 * (8 * 4 + 8)
        assert sum(reference) == 2 * 8  # one forward for each trained step
        kl = logs_with(trainer, "kl")
        assert kl[0] == 0.0
        assert min(kl[1:]) > 0.0
        assert are_equal(dict(trainer.ref_model.named_parameters()), dict(base.named_parameters()))
        assert not are_equal(weights_of(trainer), dict(base.named_parameters()))

    def test_a_run_resumed_in_the_middle_of_a_round(self, make, tmp_path):
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "beta": 0.01}
        whole = make(output_dir=str(tmp_path / "a"), **settings)
        whole.train()
        resumed = make(output_dir=str(tmp_path / "b"), **settings)
        begun = weights_of(resumed)
        calls = count_images(resumed.model)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
        assert sum(calls) == 4 + 8 * 4 + 4  # the round's second half was not drawn again
        assert not are_equal(begun, weights_of(whole))
        assert are_equal(weights_of(resumed), weights_of(whole))
        assert are_equal(resumed.ema.average, whole.ema.average)
        assert logs_with(resumed, "kl") == logs_with(whole, "kl")
        # The reference is the base model, not what the run was continued from
        assert are_equal(dict(resumed.ref_model.named_parameters()), begun)
        file = "checkpoint-3/transformer/diffusion_pytorch_model.safetensors"
        assert are_equal(*(load_file(tmp_path / run / file) for run in "ab"))


@pytest.mark.parametrize("loss_type", ["grpo", "grpo_guard"])
@pytest.mark.parametrize("is_full", [False, True])
def test_micro_batches_equal_one_batch(make_small, loss_type, is_full):
    # SGD, so that rounding stays rounding; one optimizer step a round, so that both see all images
    settings = {
        "loss_type": loss_type, "optimizer_steps_per_generation": 1, "max_steps": 1, "optim": "sgd",
        "learning_rate": 0.5 if is_full else 10.0, "peft_config": None if is_full else LORA,
    }  # fmt: skip
    one, four = (make_small(per_device_train_batch_size=size, **settings) for size in (8, 2))
    assert (one.args.gradient_accumulation_steps, four.args.gradient_accumulation_steps) == (1, 4)
    update, other = update_of(one), update_of(four)
    assert update.abs().max() > 5e-4
    assert (update - other).abs().max() < 1e-5 and (update - other).norm() < 2e-3 * update.norm()


class Watched(PaCoGRPOTrainer):
    """Keeps each micro-step of its round with its advantages, losses and metrics."""

    def policy_loss(self, step, advantages):
        loss, metrics, ratio = super().policy_loss(step, advantages)
        kept = step._replace(log_prob=step.log_prob.detach(), mean=step.mean.detach())
        self.seen = [*getattr(self, "seen", []), (kept, advantages, loss.detach(), metrics | {"ratio": ratio})]
        return loss, metrics, ratio


class TestLossesOfRecordedMeans:
    SETTINGS = {"num_inference_steps": 5, "sde_steps": [1, 2]}

    def watched(self, make_small, loss_type, **settings):
        """A trained trainer, and the micro-steps before the first update and after it, each with its divergence."""
        trainer = make_small(Watched, loss_type=loss_type, **self.SETTINGS, **settings)
        trainer.train()
        sigmas = trainer.policy.scheduler.times[1:3]
        assert [step.sigma for step, *_ in trainer.seen] == sigmas * 2
        steps = [
            (*seen, ((seen[0].mean - seen[0].old_mean) ** 2 / (2 * seen[0].std ** 2)).flatten(1).mean(dim=1))
            for seen in trainer.seen
        ]
        return trainer, steps[:2], steps[2:]

    def test_the_log_ratio_is_the_mean_of_noise_times_shift(self, make_small):
        trainer, first, second = self.watched(make_small, "grpo_guard", epsilon=1e-4)
        for step, advantages, loss, metrics, divergence in (*first, *second):
            # Which is the noise's mean product with the shift, see test_guard_nft_losses.py
            ratio = torch.exp(step.std * (step.log_prob - step.old_log_prob + divergence))
            torch.testing.assert_close(metrics["ratio"], ratio)
            # The weight of the step makes up for its length
            surrogate = -torch.min(ratio * advantages, ratio.clamp(1 - 1e-4, 1 + 1e-4) * advantages)
            torch.testing.assert_close(loss, surrogate / (step.sigma - step.sigma_next))
        assert all(torch.equal(metrics["ratio"], torch.ones(4)) for *_, metrics, _ in first)
        for index, (*_, metrics, _) in zip((1, 2), second, strict=True):
            deviation = (metrics["ratio"] - 1).abs()
            assert deviation.max() > 1e-5
            logged = logs_with(trainer, f"ratio_deviation/step_{index}")
            assert logged == [pytest.approx(deviation.mean().item(), abs=1e-6)]
            assert logs_with(trainer, f"ratio_deviation_on_policy/step_{index}") == [0.0]


@pytest.fixture(scope="module")
def adapter(tiny_flux, prompts, tmp_path_factory):
    """Folder of a trained adapter whose alpha is not its rank."""
    folder = tmp_path_factory.mktemp("continued")
    settings = SMALL_RUN | {"num_prompts_per_generation": 2, "learning_rate": 0.1, "gradient_checkpointing": False}
    args = PaCoGRPOConfig(str(folder / "first-run"), **settings)
    config = replace(LORA, lora_alpha=32)
    trainer = PaCoGRPOTrainer(str(tiny_flux), redness_reward, args, prompts, peft_config=config)
    trainer.train()
    trainer.save_model()
    return folder / "first-run"


class TestContinuedAdapter:
    def with_adapter(self, tiny_flux, folder, peft: bool = True):
        pipeline = FluxPipeline.from_pretrained(tiny_flux)
        if peft:
            pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, folder)
        else:
            pipeline.load_lora_weights(folder)
        return pipeline

    def test_it_goes_on_and_is_saved_in_both_formats(self, make_small, tiny_flux, adapter, tmp_path):
        trainer = make_small(peft_config=str(adapter), max_steps=4, beta=0.01)
        before = weights_of(trainer)
        assert len(before) == 30
        frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        trainer.train()
        for name, value in weights_of(trainer).items():
            assert not torch.equal(value, before[name]), name
        assert are_equal({n: p for n, p in trainer.model.named_parameters() if not p.requires_grad}, frozen)
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0, 0.0]
        assert logs_with(trainer, "kl")[0] == 0 < min(logs_with(trainer, "kl")[1:])  # from the adapter as it was

        trainer.save_model(str(tmp_path / "saved"))
        images = [draw(self.with_adapter(tiny_flux, tmp_path / "saved", peft)) for peft in (True, False)]
        assert np.array_equal(*images)
        assert not np.array_equal(images[0], draw(self.with_adapter(tiny_flux, adapter)))
        with use_weights(trainer.model, trainer.ema.average, 0):
            assert np.array_equal(draw(trainer.pipeline), images[0])
        text = (tmp_path / "saved" / "README.md").read_text()
        assert "| LoRA | rank 4, alpha 32, continued from first-run |" in text
        assert str(adapter) not in text
        # Without the reference
        saved = [load_file(folder / "adapter_model.safetensors").keys() for folder in (adapter, tmp_path / "saved")]
        assert saved[0] == saved[1] and not (tmp_path / "saved" / "ref").exists()

    @pytest.mark.parametrize("reference", ["initial", "base"])
    def test_the_reference(self, make_small, tiny_flux, adapter, reference):
        settings = {"num_prompts_per_generation": 2, "beta": 0.01}
        trainer = make_small(peft_config=str(adapter), reference=reference, **settings)
        trainer.train()
        kl = logs_with(trainer, "kl")
        assert (kl[0] == 0.0) == (reference == "initial") and kl[1] > 0
        # It stays what it was, and neither is the trained adapter
        with trainer._reference(trainer.model) as model:
            drawn = draw(trainer.pipeline)
        start = FluxPipeline.from_pretrained(tiny_flux)
        assert np.array_equal(drawn, draw(self.with_adapter(tiny_flux, adapter) if reference == "initial" else start))
        assert not np.array_equal(drawn, draw(trainer.pipeline))
        assert {name.split(".")[-2] for name in weights_of(trainer)} == {"default"}
        assert model.active_adapter == "default"

    def test_the_reference_of_a_resumed_run(self, make_small, adapter, tmp_path, caplog):
        settings = {"num_prompts_per_generation": 2, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
        settings |= {"beta": 100.0, "learning_rate": 0.1}
        whole = make_small(output_dir=str(tmp_path / "a"), peft_config=str(adapter), **settings)
        whole.train()
        shutil.copytree(tmp_path / "a" / "checkpoint-1", tmp_path / "b" / "checkpoint-1")
        checkpoint = str(tmp_path / "b" / "checkpoint-1")
        settings |= {"output_dir": str(tmp_path / "b"), "resume_from_checkpoint": checkpoint}
        resumed = make_small(peft_config=str(adapter), **settings)
        resumed.train(resume_from_checkpoint=checkpoint)
        assert are_equal(weights_of(whole), weights_of(resumed))
        assert "is resumed with other settings" not in caplog.text
        for changed, said in (
            ({"peft_config": checkpoint}, "reference: its contents have changed"),
            ({"peft_config": str(adapter), "reference": "base"}, "reference: 'initial', now 'base'"),
        ):
            caplog.clear()
            make_small(**{**settings, **changed})
            assert said in caplog.text

    @pytest.mark.parametrize("is_deeper", [False, True])
    def test_an_adapter_of_a_model_with_another_number_of_blocks(self, adapter, tmp_path, make_small, is_deeper):
        # PEFT drops what has no place, and begins anew where nothing is saved
        file = shutil.copytree(adapter, tmp_path / "copy") / "adapter_model.safetensors"
        weights = load_file(file)
        of_block = {name: value for name, value in weights.items() if ".transformer_blocks.0." in name}
        assert 0 < len(of_block) < len(weights)
        deeper = {name.replace("blocks.0.", "blocks.7."): value.clone() for name, value in of_block.items()}
        save_file(weights | deeper if is_deeper else of_block, file)
        with pytest.raises(ValueError, match="does not fit FluxTransformer2DModel"):
            make_small(peft_config=str(file.parent))

    def test_a_folder_without_an_adapter(self, adapter, tmp_path, make_small):
        with pytest.raises(ValueError, match="no adapter_model.safetensors"):
            make_small(model=NOWHERE, peft_config=str(tmp_path))
        copied = shutil.copytree(adapter, tmp_path / "copy")
        (copied / "adapter_config.json").unlink()
        with pytest.raises(ValueError, match="adapter_config.json"):
            make_small(model=NOWHERE, peft_config=str(copied))

    def test_an_adapter_that_cannot_be_trained(self, adapter, tmp_path, make_small):
        file = shutil.copytree(adapter, tmp_path / "copy") / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
        with pytest.raises(ValueError, match="`use_dora` of the adapter.*only plain LoRA"):
            make_small(model=NOWHERE, peft_config=str(file.parent))

    def test_a_pipeline_that_has_an_adapter_is_refused_with_the_way_out(
        self, adapter, tiny_flux, tmp_path, make_small
    ):
        pipeline = self.with_adapter(tiny_flux, adapter, peft=False)
        tuned = draw(pipeline)
        with pytest.raises(ValueError, match="already has an adapter.*as `peft_config`.*unload_lora_weights") as error:
            make_small(model=pipeline)
        assert "pipeline.fuse_lora()" in str(error.value)
        # Both ways that it names
        assert np.array_equal(draw(make_small(peft_config=str(adapter)).pipeline), tuned)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        # Merged alone, it would be an adapter of the model that it is named after
        with pytest.raises(ValueError, match="`transformer` of the pipeline has other weights than .*save_pretrained"):
            make_small(model=pipeline)
        make_small(model=pipeline, peft_config=None)  # all weights are published
        pipeline.save_pretrained(tmp_path / "merged")
        trainer = make_small(model=str(tmp_path / "merged"))
        assert np.abs(draw(trainer.pipeline) - tuned).max() <= 2  # rounding: a merged product is another sum
        trainer.train()
