# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT: the velocity is trained on noised images that were drawn and scored, without stochastic steps."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from ..cards import ImageModelCard
from ..checkpointing.ema import EMA
from ..checkpointing.weights import swapped, zero_stage_of
from ..rollout import EncodedImage, Family, RecordedStep, calls_at, keyed_generator, predict
from ..utils.paper import PAPER
from .losses import add_flow_noise, nft_loss, nft_old_policy_decay, nft_reward_probability, velocity_error
from .paco_grpo_trainer import PaCoGRPOTrainer
from .paco_nft_config import PaCoNFTConfig


OLD_POLICY_WEIGHTS = "old_policy.safetensors"

# Share of the velocity by which the first forward with gradient may miss the one that was drawn with. In float32 it is
# 0; in bf16 an accelerator may choose other kernels, and dropout or a wrong precision miss by far more.
_TOLERANCE = 0.05


@dataclass
class NoisedStep(RecordedStep):
    """
    Images at one time of the forward process: the recorded last step, whose calls are those for the noised images.

    Attributes:
        times (`torch.Tensor` of shape `(B,)`):
            Time of each image.
        target (`torch.Tensor` of shape `(B, ...)`):
            Velocity of the forward process there, float32.
        old_velocity (`torch.Tensor` of shape `(B, ...)`):
            Velocity under the policy that drew the images.
    """

    times: torch.Tensor | None = None
    target: torch.Tensor | None = None
    old_velocity: torch.Tensor | None = None


class _OldPolicyCallback(TrainerCallback):
    """Tells the trainer that an optimizer step is complete: before a checkpoint of it is written."""

    def __init__(self, trainer: "PaCoNFTTrainer"):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._follow_policy()


class PaCoNFTTrainer(PaCoGRPOTrainer):
    """
    Trainer for DiffusionNFT, proposed in [DiffusionNFT: Online Diffusion Reinforcement with Forward
    Process](https://huggingface.co/papers/2509.16117), with the rounds, rewards, resolution and log-taming of
    [`PaCoGRPOTrainer`].

    Images are drawn by the pipeline's own ODE from an old policy, which follows the trained weights slowly. Each is
    noised again, and the trained velocity moves towards images with a high reward and away from those with a low one.

    Example:

    ```python
    from peft import LoraConfig
    from paco_trl import PaCoNFTConfig, PaCoNFTTrainer
    from paco_trl.data import demo_prompts_path, load_image_set_prompts
    from paco_trl.rewards import ClipTReward

    trainer = PaCoNFTTrainer(
        model="black-forest-labs/FLUX.1-dev",
        reward_funcs=ClipTReward(),
        args=PaCoNFTConfig(output_dir="paco-nft-flux", num_prompts_per_generation=24),
        train_dataset=load_image_set_prompts(demo_prompts_path()),
        peft_config=LoraConfig(r=64, lora_alpha=128, init_lora_weights="gaussian"),
    )
    trainer.train()
    ```

    Args:
        args ([`PaCoNFTConfig`], *optional*):
            Settings. If `None`, the defaults, with an output folder named after the model.
        model, reward_funcs, train_dataset, eval_dataset, eval_reward_funcs, callbacks, optimizers, peft_config:
            As in [`PaCoGRPOTrainer`].

    Raises:
        TypeError: `args` are those of another trainer.
        ValueError: as in [`PaCoGRPOTrainer`].
    """

    _tag_names = ["paco-trl", "trl", "paco-nft", "diffusion-nft"]
    _name = "PaCo-NFT"
    _paper = {
        "title": "DiffusionNFT: Online Diffusion Reinforcement with Forward Process",
        "id": "2509.16117",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{diffusionnft2025,
                title        = {{DiffusionNFT: Online Diffusion Reinforcement with Forward Process}},
                year         = 2025,
                eprint       = {arXiv:2509.16117},
            }
            """)
        + PAPER["citation"],  # of rounds, resolution and log-taming
    }
    _record_class = NoisedStep

    def __init__(
        self,
        model: str | DiffusionPipeline,
        reward_funcs: Callable | list[Callable],
        args: PaCoNFTConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        eval_reward_funcs: Callable | list[Callable] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: LoraConfig | str | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.name_or_path or type(model).__name__
            args = PaCoNFTConfig(f"{Path(name).name}-{self._name}")
        if not isinstance(args, PaCoNFTConfig):
            raise TypeError(f"`args` must be a `PaCoNFTConfig`, got {type(args).__name__}.")
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, eval_reward_funcs, callbacks, optimizers, peft_config
        )  # fmt: skip
        if type(self.family).call_at is Family.call_at:
            raise ValueError(
                f"The page of the family ({type(self.family).__name__}) does not say how {type(self.pipeline).__name__} calls its transformer at "
                "another time, which the noised images of DiffusionNFT need. Add `call_at` to the family's page, or "
                "train with `PaCoGRPOTrainer`."
            )
        self.old_policy: EMA | None = None  # from the beginning of `train()`
        self._rows: list[torch.Tensor] = []  # of the micro-steps of an optimizer step
        self.add_callback(_OldPolicyCallback(self))

    def _course(self, args: PaCoNFTConfig) -> dict:
        own = {f.name: getattr(args, f.name) for f in fields(PaCoNFTConfig) if f.name in PaCoNFTConfig.__annotations__}
        return super()._course(args) | own

    # ---- The old policy ----

    def _begin_run(self) -> None:
        # Under its own decay it would be an average like the one that is saved; the decay is set with each update
        self.old_policy = EMA(self.model, 0.0, zero_stage_of(self), self.args.ema_offload)
        if self._resumed_from is not None:
            path = self._resumed_from / OLD_POLICY_WEIGHTS
            if not path.exists():
                raise ValueError(
                    f"'{self._resumed_from}' has no {OLD_POLICY_WEIGHTS}: it is not a checkpoint of {type(self).__name__}, "
                    "and the weights that draw are not in it. To go on with its adapter, pass the folder as "
                    "`peft_config` and set another `output_dir`."
                )
            self.old_policy.load(load_file(path))
        super()._begin_run()

    def _follow_policy(self) -> None:
        """old <- decay * old + (1 - decay) * weights, at the end of each round."""
        if self.state.global_step % self._steps_per_round == 0:
            args = self.args
            self.old_policy.decay = nft_old_policy_decay(
                self.state.global_step, args.old_policy_decay_rate, args.old_policy_max_decay
            )
            self.old_policy.step()

    def _save_further_weights(self, folder: Path) -> None:
        whole = self.old_policy.whole(keep=self.args.should_save)
        if self.args.should_save:
            save_file(whole, folder / OLD_POLICY_WEIGHTS)

    # ---- Rollout ----

    def _sde_settings(self, round_index: int) -> None:
        """There are no stochastic steps."""

    def _draw_round(self, *args, **kwargs) -> tuple[list[Image.Image], list[list[NoisedStep]]]:
        with swapped(self.model, self.old_policy.average, zero_stage_of(self)):
            return super()._draw_round(*args, **kwargs)

    def _draw_micro_batch(
        self,
        arguments: dict[str, torch.Tensor],
        size: tuple[int, int],
        noise_keys: list[tuple[int, ...]],
        sde: None,
        sources: list[EncodedImage],
    ) -> tuple[list[Image.Image], list[NoisedStep]]:
        """Draws a micro-batch and noises it: an entry for each time, with the old velocity there."""
        args = self.args
        images, (last,) = self.policy.draw(
            arguments,
            *size,
            args.num_inference_steps,
            args.guidance_scale,
            noise_keys=noise_keys,
            record_last_step=True,
            sources=sources,
        )
        latents = last.prev_sample  # (B, ...)
        # A schedule depends on the size. Its last step is left out: in the published code too
        schedule = torch.tensor([self.policy.scheduler.sigmas_of(i)[0] for i in range(args.num_inference_steps - 1)])
        # 0 is the word of the initial latents in the key of an image
        generators = [keyed_generator(*key, 1) for key in noise_keys]
        levels = args.num_trained_steps
        times = torch.stack(
            [schedule[torch.randperm(len(schedule), generator=generator)[:levels]] for generator in generators], dim=1
        ).to(latents.device)  # (levels, B)
        steps = []
        for sigma in times:
            noise = torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
            noised = add_flow_noise(latents, noise.to(latents.device), sigma)  # (B, ...)
            calls = calls_at(last, self.family, noised.sample, sigma)
            with torch.no_grad():
                old_velocity = predict(self.model, calls, self.family, args.guidance_scale, noised.sample)
            record = {f.name: getattr(last, f.name) for f in fields(last)} | {"calls": calls}
            steps.append(NoisedStep(**record, times=sigma, target=noised.target, old_velocity=old_velocity))
        return images, steps

    # ---- Loss ----

    def get_train_dataloader(self) -> DataLoader:
        """As in [`PaCoGRPOTrainer`]; what an earlier `train()` left behind is not this one's."""
        self._rows = []
        return super().get_train_dataloader()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        The objective of DiffusionNFT of one micro-batch at one time for each image: one forward with gradient.

        The loss is the micro-batch's share of the mean over all valid images of the optimizer step, on all processes,
        and their times; gradients are averaged over the processes, hence the factor.
        """
        if return_outputs:
            raise ValueError(f"{type(self).__name__} does not support returning outputs.")
        args, record, weights = self.args, inputs["record"], inputs["weights"]
        reference_velocity = None
        if self.beta > 0:
            with torch.no_grad(), self._reference(model) as reference:
                reference_velocity = predict(
                    reference, record.calls, self.family, args.guidance_scale, record.sample
                ).float()

        velocity = predict(
            model, record.calls, self.family, args.guidance_scale, record.sample, args.detach_unconditional
        )  # (B, ...)
        probability = nft_reward_probability(inputs["advantages"], args.advantage_clip)  # (B,)
        loss = nft_loss(velocity, record.old_velocity, record.target, probability, args.nft_beta, record.times)  # (B,)
        kl = torch.zeros_like(loss)
        if reference_velocity is not None:
            kl = velocity_error(velocity.float(), reference_velocity)
            loss = loss + self.beta * kl
        old_velocity = record.old_velocity.float()
        deviation = velocity_error(velocity.detach().float(), old_velocity)
        size = velocity_error(old_velocity, torch.zeros_like(old_velocity))
        self._rows.append(torch.stack([deviation, size, kl.detach(), (weights > 0).float()], dim=1))  # (B, 4)
        if self.accelerator.sync_gradients:
            self._finish_step()
        return (loss * weights).sum() * self.accelerator.num_processes

    def _finish_step(self) -> None:
        """Gathers what the micro-steps of an optimizer step say, and logs it. Every process calls it."""
        rows, self._rows = self.accelerator.gather(torch.cat(self._rows)).cpu(), []  # (images and times, 4)
        step = self.state.global_step
        if not torch.isfinite(rows).all():
            raise RuntimeError(
                f"The velocity is not finite at optimizer step {step}. The weights or the latents have overflowed; "
                "lower `learning_rate`, or train in float32."
            )
        deviation, size, kl, valid = rows.T
        if step == 0 and deviation.sum() > _TOLERANCE**2 * size.sum():
            share = (deviation.sum() / size.sum()).sqrt().item()
            raise RuntimeError(
                f"Before the first update the trained velocity must be the old one, but they differ by {share:.1%} of "
                "it. The model draws with other numbers than it is trained with: look for dropout, for layers that "
                "behave differently with gradients, for a compiled forward."
            )
        count = valid.sum().clamp(min=1)
        metrics = {
            **self._round_metrics,
            "velocity_deviation": ((deviation * valid).sum() / count).item(),
            "old_policy_decay": self.old_policy.decay,
        }
        if self.beta > 0:
            metrics["kl"] = ((kl * valid).sum() / count).item()
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _model_card(self, *args, **kwargs) -> ImageModelCard:
        """Fill in the card, with times in place of stochastic steps and without a clipped ratio."""
        card = super()._model_card(*args, **kwargs)
        own = {"nft_beta": self.args.nft_beta, "num_trained_steps": self.args.num_trained_steps}
        settings = replace(card.settings, **own, loss_type=None, epsilon=None)
        return replace(card, method="DiffusionNFT", settings=settings)
