# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT and AWM: the velocity is trained on noised images that were generated and scored."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ..checkpointing.weights import EMA, use_weights
from ..hub.card_data import ImageModelCardData
from ..rewards.scoring import Scores
from ..rollout import Family, check_call_at, keyed_generator, predict
from ..rollout.policy import RecordingOptions
from ..rollout.rounds import Batch
from ..utils.option_checks import UNUSED_FIELDS, UNUSED_WITH
from ..utils.papers import NFT_PAPER
from ..utils.tensors import to_device
from .callbacks import AverageCallback
from .losses import StepStatistics, add_flow_noise, masked_means, nft_old_policy_decay, velocity_error
from .nft_objectives import OBJECTIVES, NoisedStep, Objective
from .paco_nft_config import PaCoNFTConfig
from .round_schedule import TrainingRound
from .round_trainer import RoundTrainer


OLD_POLICY_WEIGHTS = "old_policy.safetensors"

# Relative deviation of the trained from the old velocity that is accepted before the first update: 0 in float32, but
# in bf16 an accelerator may choose other kernels. Dropout or a wrong precision deviate by far more.
_TOLERANCE = 0.05


class VelocityStatistics(StepStatistics):
    """Collect velocities and the metrics logged with them, and check those before an update against the rollout's."""

    def add_velocity(
        self, velocity: torch.Tensor, old_velocity: torch.Tensor, means: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Add a micro-step: `means`, to be logged, and weights are (B,); images of weight 0 do not count."""
        deviation = velocity_error(velocity.detach().float(), old_velocity)
        size = velocity_error(old_velocity, torch.zeros_like(old_velocity))
        self.add({"size": size, "valid": weights > 0, "velocity_deviation": deviation, **means})

    def finish(self, global_step: int, is_on_policy: bool, is_early: bool = False) -> dict[str, float]:
        """Return the means; refuse on policy a velocity that differs from the rollout's."""
        columns = self.gather()
        if not torch.isfinite(torch.stack([*columns.values()])).all():
            raise RuntimeError(f"The velocity is not finite at optimizer step {global_step}. Lower `learning_rate`.")
        size = columns.pop("size")
        is_valid = columns.pop("valid")
        deviation = columns["velocity_deviation"]
        if is_on_policy and deviation.sum() > _TOLERANCE**2 * size.sum():
            fraction = (deviation.sum() / size.sum()).sqrt().item()
            raise RuntimeError(
                f"Before the first update of a round the trained and the old velocity differ by {fraction:.1%}. Look "
                "for dropout, for layers that behave differently with gradients, or for a compiled forward."
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
                "Pass the directory as `peft_config` (`--adapter`) with another `output_dir` to continue from its "
                "adapter."
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
        model, reward_funcs, train_dataset, eval_dataset, eval_reward_funcs, callbacks, optimizers,
        optimizer_cls_and_kwargs, quantization_config, peft_config, family:
            As in [`PaCoGRPOTrainer`].

    Raises:
        TypeError: If `args` is not a `PaCoNFTConfig`.
        ValueError: As in [`PaCoGRPOTrainer`].
    """

    _tag_names = ["paco-trl", "trl", "paco-nft"]
    _name = "PaCo-NFT"
    _paper = NFT_PAPER
    _config_class = PaCoNFTConfig
    _step_class = NoisedStep
    _statistics_class = VelocityStatistics
    statistics: VelocityStatistics

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "policy_loss"):
            raise TypeError(
                f"{cls.__name__} has a `policy_loss`, which only `PaCoGRPOTrainer` calls. Override `compute_loss`."
            )

    def _check_family(self, family: Family) -> None:
        if type(family).call_at is Family.call_at:
            name = type(family).__name__
            raise ValueError(f"{name} has no `call_at`. Add it, or train with `PaCoGRPOTrainer`.")

    @cached_property
    def objective(self) -> Objective:
        """DiffusionNFT or AWM."""
        return OBJECTIVES[self.args.loss_type](self.args)

    # ---- Generation, and the old policy ----

    @property
    def old_policy(self) -> EMA:
        """The average of the weights that is the old policy, from the start of `train()`."""
        return self.averages[OLD_POLICY_WEIGHTS]

    def _add_callbacks(self) -> None:
        if self.args.keeps_old_policy:
            self.add_callback(OldPolicyCallback(self))
        super()._add_callbacks()

    @contextmanager
    def _generating(self, training_round: TrainingRound) -> Iterator[RecordingOptions]:
        """Place the weights that generate a round, and yield what to record: the images' latents, to be noised."""
        weights = self.old_policy.average if self.objective.old_policy_generates else None
        with use_weights(self.model, weights, self.zero_stage), self.policy.on_device(self._sharded_engine):
            yield RecordingOptions(last_step=True, on_recorded=self._noise)

    def _roll_out(self, training_round: TrainingRound, batches: list[Batch]) -> Scores:
        """Generate and score batches, and predict the velocities of an old policy that the loss compares with."""
        scores = super()._roll_out(training_round, batches)
        if self.objective.old_policy_is_in_loss:
            # Once for all optimizer steps of the round, at whose end it moves
            weights, device = self.old_policy.average, self.accelerator.device
            with use_weights(self.model, weights, self.zero_stage), self.policy.on_device(self._sharded_engine):
                with torch.no_grad():
                    for step in (step for batch in batches for step in batch.steps):
                        step.old_policy_velocity = self.policy.predict(self.model, step.to(device))
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
        step = inputs["step"]
        weights = inputs["weights"]
        velocity, ref_velocity = self._velocities(model, step)  # (B, ...)
        loss, metrics = self.objective.loss(velocity, step, inputs["advantages"])  # (B,)
        if ref_velocity is not None:
            kl = velocity_error(velocity.float(), ref_velocity.float())
            loss = loss + self.beta * kl
            metrics["kl"] = kl
        self.statistics.add_velocity(velocity, step.rollout_velocity.float(), metrics, weights)
        if self.accelerator.sync_gradients:
            global_step = self.state.global_step
            # An old policy that generates equals the trained one only at step 0
            is_on_policy = self.is_on_policy and (global_step == 0 or not self.objective.old_policy_generates)
            self._log_with_step(self.statistics.finish(global_step, is_on_policy))
            if self.args.keeps_old_policy:
                self._log_with_step({"old_policy_decay": self.old_policy.decay})
        return self._mean_loss(loss, weights)

    def _model_card(self, *args, **kwargs) -> ImageModelCardData:
        """Fill in the card of the objective, whose settings have times in place of stochastic steps."""
        card: Any = super()._model_card(*args, **kwargs)
        objective, tags = self.objective, self._tag_names
        unused = (*UNUSED_FIELDS, *UNUSED_WITH[self.args.loss_type], "loss_type")
        settings = {name: value for name, value in card.settings.items() if name not in unused}
        settings |= {name: getattr(self.args, name) for name in ("num_trained_steps", *objective.options)}
        return replace(
            card, method=objective.method, paper=objective.paper, tags=[*tags, objective.tag, *card.tags[len(tags) :]],
            settings=settings,
        )  # fmt: skip
