# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT and AWM: the velocity is trained on noised images that were generated and scored."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checkpointing.weights import EMA, use_weights
from ..hub.settings import ImageModelCard
from ..rewards.scoring import Scores
from ..rollout import Family, TransformerStep, check_call_at, keyed_generator, predict
from ..rollout.policy import Recording
from ..rollout.rounds import Batch
from ..utils.option_checks import UNUSED_FIELDS, UNUSED_WITH
from ..utils.paper import AWM_PAPER, NFT_PAPER
from ..utils.tensors import to_device
from .callbacks import AverageCallback
from .losses import (
    StepStatistics,
    add_flow_noise,
    clipped_surrogate,
    masked_means,
    matching_log_prob,
    nft_loss,
    nft_old_policy_decay,
    nft_reward_probability,
    velocity_error,
)
from .paco_nft_config import PaCoNFTConfig
from .round_schedule import TrainingRound
from .round_trainer import RoundTrainer


OLD_POLICY_WEIGHTS = "old_policy.safetensors"

# Relative deviation of the trained from the old velocity that is accepted before the first update: 0 in float32, but in
# bf16 an accelerator may choose other kernels. Dropout or a wrong precision deviate by far more.
_TOLERANCE = 0.05


@dataclass(kw_only=True)
class NoisedStep(TransformerStep):
    """Images, noised to one time each: `sample` are their latents."""

    times: torch.Tensor  # (B,)
    target: torch.Tensor  # (B, ...), velocity of the forward process, float32
    rollout_velocity: torch.Tensor  # (B, ...), by the weights that generated the images
    old_policy_velocity: torch.Tensor | None = None  # (B, ...), in AWM, whose old policy does not generate


class VelocityStatistics(StepStatistics):
    """Collect velocities and the metrics logged with them, and check those before an update against the rollout's."""

    def add_velocity(
        self, velocity: torch.Tensor, old_velocity: torch.Tensor, means: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Add a micro-step: `means`, to be logged, and weights are (B,); images of weight 0 do not count."""
        deviation = velocity_error(velocity.detach().float(), old_velocity)
        size = velocity_error(old_velocity, torch.zeros_like(old_velocity))
        self.add({"size": size, "valid": weights > 0, "velocity_deviation": deviation, **means})

    def finish(self, step: int, is_on_policy: bool) -> dict[str, float]:
        """Gather the optimizer step's statistics, and start the next step. Collective: call on all ranks."""
        columns = self.gather()
        if not torch.isfinite(torch.stack([*columns.values()])).all():
            raise RuntimeError(f"The velocity is not finite at optimizer step {step}. Lower `learning_rate`.")
        size, is_valid, deviation = columns.pop("size"), columns.pop("valid"), columns["velocity_deviation"]
        if is_on_policy and deviation.sum() > _TOLERANCE**2 * size.sum():
            fraction = (deviation.sum() / size.sum()).sqrt().item()
            raise RuntimeError(
                f"Before the first update of a round trained and old velocity differ by {fraction:.1%}. Look for dropout, for "
                "layers that behave differently with gradients, for a compiled forward."
            )
        return masked_means(columns, is_valid)


class OldPolicyCallback(AverageCallback):
    """Let the old policy follow the trained weights at the end of each round."""

    file = OLD_POLICY_WEIGHTS

    def decay(self, step: int) -> float:
        """Return the decay at the end of the last round before a step."""
        args, steps = self.trainer.args, self.trainer.schedule.optimizer_steps_per_round
        return nft_old_policy_decay(step // steps * steps, args.old_policy_decay_rate, args.old_policy_max_decay)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Start at the trained weights, or at the old policy of the checkpoint."""
        checkpoint = self.trainer.resumed_from
        if checkpoint is not None and not (checkpoint / self.file).exists():
            raise ValueError(
                f"'{checkpoint}' has no {self.file}, the old policy's weights that this run continues with. "
                "Pass the directory as `peft_config` and set another `output_dir` to continue from its adapter."
            )
        super().on_train_begin(args, state, control, **kwargs)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        """Follow the last update of a round that has trained an image."""
        trainer, step = self.trainer, state.global_step + 1  # which is counted after its update
        if step % trainer.schedule.optimizer_steps_per_round == 0 and not trainer.round.is_idle:
            trainer.old_policy.decay = self.decay(step)
            trainer.old_policy.step()


class PaCoNFTTrainer(RoundTrainer):
    """
    Trainer for DiffusionNFT, proposed in [DiffusionNFT: Online Diffusion Reinforcement with Forward
    Process](https://huggingface.co/papers/2509.16117), and for AWM, proposed in [Advantage Weighted Matching: Aligning
    RL with Pretraining in Diffusion Models](https://huggingface.co/papers/2509.25050), with the rounds, rewards,
    resolution and log-taming of [`PaCoGRPOTrainer`].

    Images are generated by the pipeline's ODE: in DiffusionNFT with an old policy, which follows the trained weights
    slowly, in AWM with the trained weights. Each is noised, and the trained velocity moves towards images with a high
    reward and away from those with a low one.

    Use it as [`PaCoGRPOTrainer`], with a [`PaCoNFTConfig`].

    Args:
        args ([`PaCoNFTConfig`], *optional*):
            Settings. If `None`, the defaults, with an output directory named after the model.
        model, reward_funcs, train_dataset, eval_dataset, eval_reward_funcs, callbacks, optimizers, peft_config, family:
            As in [`PaCoGRPOTrainer`].

    Raises:
        TypeError: If `args` is not a `PaCoNFTConfig`.
        ValueError: As in [`PaCoGRPOTrainer`].
    """

    _tag_names = ["paco-trl", "trl", "paco-nft", "diffusion-nft"]
    _name = "PaCo-NFT"
    _paper = NFT_PAPER
    _config_class = PaCoNFTConfig
    _step_class = NoisedStep
    _statistics_class = VelocityStatistics

    def _check_family(self) -> None:
        if hasattr(self, "policy_loss"):
            raise TypeError(
                f"{type(self).__name__} has a `policy_loss`, which only `PaCoGRPOTrainer` calls. Override `compute_loss`."
            )
        if type(self.family).call_at is Family.call_at:
            name = type(self.family).__name__
            raise ValueError(f"{name} has no `call_at`. Add it, or train with `PaCoGRPOTrainer`.")

    # ---- Generation by the old policy ----

    @property
    def old_policy(self) -> EMA:
        """The average that generates in DiffusionNFT and restrains AWM, from the start of `train()`."""
        return self.averages[OLD_POLICY_WEIGHTS]

    def _add_callbacks(self) -> None:
        if self.args.keeps_old_policy:
            self.add_callback(OldPolicyCallback(self))
        super()._add_callbacks()

    @contextmanager
    def _generating(self, round: TrainingRound) -> Iterator[Recording]:
        """Place the weights that generate a round: of the old policy in DiffusionNFT, and those in training in AWM."""
        is_old = self.args.loss_type == "nft"
        old_policy = use_weights(self.model, self.old_policy.average, self.zero_stage) if is_old else nullcontext()
        with old_policy, self.policy.on_device(self._divided_engine):
            # No stochastic step is recorded, but the images' latents, which are noised to each trained time
            yield Recording(last_step=True, finish=self._noise)

    def _roll_out(self, round: TrainingRound, batches: list[Batch]) -> Scores:
        """Generate and score batches, and in AWM predict the old policy's velocities, which its loss is restrained by."""
        scores = super()._roll_out(round, batches)
        if self.args.loss_type == "awm" and self.args.keeps_old_policy:
            # It stays the same until the end of the round
            old_policy = use_weights(self.model, self.old_policy.average, self.zero_stage)
            with old_policy, self.policy.on_device(self._divided_engine), torch.no_grad():
                steps: Iterator[Any] = itertools.chain.from_iterable(batch.steps for batch in batches)
                for step in steps:
                    step.old_policy_velocity = self.policy.predict(self.model, step.to(self.accelerator.device))
        return scores

    def _noise(self, batch: Batch) -> None:
        """Noise images to times of the schedule, and predict the velocity of the weights that generated them."""
        args, (last,) = self.args, batch.steps
        latents = last.prev_sample  # (B, ...)
        # The last step is left out, as in the published code
        schedule = torch.tensor(self.policy.scheduler.times[: args.num_inference_steps - 1])
        generators = [keyed_generator(*sample.noise_key, 1) for sample in batch.samples]  # 0 is the initial latents'
        levels = args.num_trained_steps
        check_call_at(last, self.family)
        times = torch.stack(
            [schedule[torch.randperm(len(schedule), generator=generator)[:levels]] for generator in generators], dim=1
        )  # (levels, B)
        batch.steps = []
        for sigma in to_device(times, latents.device):
            noise = torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
            sample, target = add_flow_noise(latents, to_device(noise, latents.device), sigma)  # (B, ...)
            calls = [self.family.call_at(call, sample, sigma) for call in last.calls]
            with torch.no_grad():
                velocity = predict(self.model, calls, self.family, args.guidance_scale, sample)
            batch.steps.append(
                NoisedStep(sample=sample, calls=calls, times=sigma, target=target, rollout_velocity=velocity)
            )

    # ---- Loss ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the objective of one micro-batch, at one time for each image."""
        args, record, weights = self.args, inputs["record"], inputs["weights"]
        velocity, ref_velocity = self._velocities(model, record)  # (B, ...)
        values: dict[str, torch.Tensor] = {}
        if args.loss_type == "awm":
            loss, values = self._matching_loss(velocity, record, inputs["advantages"])  # (B,)
        else:
            probability = nft_reward_probability(inputs["advantages"], args.advantage_clip)  # (B,)
            loss = nft_loss(velocity, record.rollout_velocity, record.target, probability, args.nft_beta, record.times)
        if ref_velocity is not None:
            kl = velocity_error(velocity.float(), ref_velocity.float())
            loss = loss + self.beta * kl
            values["kl"] = kl
        self.statistics.add_velocity(velocity, record.rollout_velocity.float(), values, weights)
        if self.accelerator.sync_gradients:
            step = self.state.global_step
            # In DiffusionNFT the old policy generates; it equals the trained one only at step 0
            is_on_policy = step == self.round.global_step and (args.loss_type == "awm" or step == 0)
            self._step_metrics = self.statistics.finish(step, is_on_policy)
            if args.keeps_old_policy:
                self._step_metrics["old_policy_decay"] = self.old_policy.decay
        return (loss * weights).sum() * self.accelerator.num_processes

    def _matching_loss(self, velocity: torch.Tensor, record: Any, advantages: torch.Tensor) -> tuple:
        """Compute AWM's objective of each image, and the values to log by name."""
        args = self.args
        log_prob = matching_log_prob(velocity, record.target, record.times, args.awm_weighting)
        old_log_prob = matching_log_prob(record.rollout_velocity, record.target, record.times, args.awm_weighting)
        # As for DiffusionNFT's probability, and in the published code, advantages are scaled to [-1, 1]
        surrogate = clipped_surrogate(
            log_prob, old_log_prob, advantages / args.advantage_clip, self.epsilon_low, self.epsilon_high
        )
        low, high, loss = surrogate.is_low_clipped, surrogate.is_high_clipped, surrogate.loss.float()
        values = {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high,
            "approx_kl": (log_prob - old_log_prob) ** 2 / 2,
        }
        if args.keeps_old_policy:
            values["old_policy_deviation"] = velocity_error(velocity.float(), record.old_policy_velocity.float())
            loss = loss + args.old_policy_beta * values["old_policy_deviation"]
        return loss, values

    def _model_card(self, *args, **kwargs) -> ImageModelCard:
        """Fill in the card, with times in place of stochastic steps and, for DiffusionNFT, without a clipped ratio."""
        card: Any = super()._model_card(*args, **kwargs)
        args, unused = self.args, (*UNUSED_FIELDS, *UNUSED_WITH[self.args.loss_type], "loss_type")
        names = ("nft_beta",) if args.loss_type == "nft" else ("awm_weighting", "old_policy_beta")
        settings = {name: value for name, value in card.settings.items() if name not in unused}
        settings |= {"num_trained_steps": args.num_trained_steps, **{name: getattr(args, name) for name in names}}
        if args.loss_type == "nft":
            return replace(card, method="DiffusionNFT", settings=settings)
        tags = ["awm" if tag == "diffusion-nft" else tag for tag in card.tags]
        return replace(card, method="AWM", paper=AWM_PAPER, tags=tags, settings=settings)
