# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT: the velocity is trained on noised images that were drawn and scored, without stochastic steps."""

import functools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image
from transformers import TrainerCallback

from ..cards import ImageModelCard
from ..checkpointing.ema import EMA
from ..checkpointing.weights import swapped
from ..rollout import Family, RecordedStep, SDESettings, calls_at, keyed_generator, predict
from ..rollout.sampler import FetchedRows
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


class VelocityStatistics:
    """What the micro-steps of an optimizer step say about the velocity, gathered once."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._rows: list[torch.Tensor] = []

    def clear(self) -> None:
        """Forget what was collected."""
        self._rows = []

    def add(self, velocity: torch.Tensor, old_velocity: torch.Tensor, kl: torch.Tensor, weights: torch.Tensor) -> None:
        """Add a micro-step; an image of weight 0 is not counted."""
        deviation = velocity_error(velocity.detach().float(), old_velocity)
        size = velocity_error(old_velocity, torch.zeros_like(old_velocity))
        self._rows.append(torch.stack([deviation, size, kl.detach(), (weights > 0).float()], dim=1))  # (B, 4)

    def finish(self, step: int, has_reference: bool) -> dict[str, float]:
        """Gather the optimizer step's statistics and begin the next. Every process calls it."""
        rows = self.accelerator.gather(torch.cat(self._rows)).cpu()  # (images and times, 4)
        self.clear()
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
        metrics = {"velocity_deviation": ((deviation * valid).sum() / count).item()}
        if has_reference:
            metrics["kl"] = ((kl * valid).sum() / count).item()
        return metrics


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
    _config_class = PaCoNFTConfig
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
        if args is not None and not isinstance(args, PaCoNFTConfig):
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
        self.statistics = VelocityStatistics(self.accelerator)

    # ---- Sampling, by an old policy ----

    @property
    def old_policy(self) -> EMA | None:
        """The weights that generate; from the beginning of `train()`."""
        return self.averages.get(OLD_POLICY_WEIGHTS)

    def _average_decays(self) -> dict[str, float]:
        # Under its own decay it would be an average like the one that is saved; the decay is set with each update
        return {OLD_POLICY_WEIGHTS: 0.0, **super()._average_decays()}

    def _end_step(self) -> None:
        """old <- decay * old + (1 - decay) * weights, at the end of each round."""
        if self.state.global_step % self.schedule.optimizer_steps_per_round == 0:
            args = self.args
            self.old_policy.decay = nft_old_policy_decay(
                self.state.global_step, args.old_policy_decay_rate, args.old_policy_max_decay
            )
            self.old_policy.step()

    def _generate_round(self, *args, **kwargs) -> tuple[list[Image.Image], list[list[NoisedStep]]]:
        with swapped(self.model, self.old_policy.average, self.zero_stage):
            return super()._generate_round(*args, **kwargs)

    def _generate_micro_batch(
        self, fetched: FetchedRows, rows: list[int], noise_keys: list[tuple[int, ...]], sde: SDESettings
    ) -> tuple[list[Image.Image], list[NoisedStep]]:
        """Generate a micro-batch without stochastic steps and noise it: an entry for each time."""
        return self.sampler.generate(
            fetched,
            rows,
            noise_keys,
            self.train_rows.training_sizes[rows[0]],
            self.args.num_inference_steps,
            finish=functools.partial(self._noise, noise_keys),
            record_last_step=True,
        )

    def _noise(self, noise_keys: list[tuple[int, ...]], records: list[RecordedStep]) -> list[NoisedStep]:
        """Noise images to times of the schedule, with the velocity of the weights that have generated them."""
        args, (last,) = self.args, records
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
        return steps

    # ---- Loss ----

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
        self.statistics.add(velocity, record.old_velocity.float(), kl, weights)
        if self.accelerator.sync_gradients:
            metrics = self.statistics.finish(self.state.global_step, self.beta > 0)
            self._log_step({**metrics, "old_policy_decay": self.old_policy.decay})
        return (loss * weights).sum() * self.accelerator.num_processes

    def _model_card(self, *args, **kwargs) -> ImageModelCard:
        """Fill in the card, with times in place of stochastic steps and without a clipped ratio."""
        card = super()._model_card(*args, **kwargs)
        own = {"nft_beta": self.args.nft_beta, "num_trained_steps": self.args.num_trained_steps}
        settings = replace(card.settings, **own, loss_type=None, epsilon=None)
        return replace(card, method="DiffusionNFT", settings=settings)
