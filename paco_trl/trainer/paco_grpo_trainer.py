# SPDX-License-Identifier: Apache-2.0
"""PaCo-GRPO: group-relative policy optimization of a flow-matching pipeline, at reduced resolution."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..rollout import RecordedStep
from ..rollout.policy import RecordingOptions, compute_log_prob
from ..utils.papers import PAPER
from .losses import (
    PolicyLoss,
    PolicyStep,
    clipped_surrogate,
    gaussian_kl,
    guard_gradient_weight,
    guarded_surrogate,
)
from .paco_grpo_config import PaCoGRPOConfig
from .round_schedule import TrainingRound
from .round_trainer import RoundTrainer
from .step_statistics import RatioStatistics


class PaCoGRPOTrainer(RoundTrainer):
    """
    Trainer for PaCo-GRPO, reinforcement learning of flow-matching image pipelines, proposed in [PaCo-RL: Advancing
    Reinforcement Learning for Consistent Image Generation with Pairwise Reward
    Modeling](https://huggingface.co/papers/2512.04784).

    Example:

    ```python
    from peft import LoraConfig
    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
    from paco_trl.data import demo_prompts_path, load_image_set_prompts
    from paco_trl.rewards import ClipTReward

    trainer = PaCoGRPOTrainer(
        model="black-forest-labs/FLUX.1-dev",
        reward_funcs=ClipTReward(),
        args=PaCoGRPOConfig(output_dir="paco-flux", num_prompts_per_generation=24),
        train_dataset=load_image_set_prompts(demo_prompts_path()),
        peft_config=LoraConfig(r=64, lora_alpha=128, init_lora_weights="gaussian"),
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~diffusers.DiffusionPipeline`]):
            Pipeline to train: a Hub id or directory, loaded with [`~diffusers.DiffusionPipeline.from_pretrained`] in
            the compute dtype with `args.model_init_kwargs` (only safetensors files are read), or a loaded pipeline,
            which is frozen and cast to the compute dtype. Its weights must be unchanged from the model that
            it is named after, because the adapter names that model as its base.
        reward_funcs (`Callable`, `str` or a list of them):
            Rewards: names of the package's, such as `"clip_t"`, or callables `(prompts, completions, **columns) ->
            list[float | None]`, sync or async. `completions` are PIL images; a set of separate images is one image
            that shows them side by side. The columns are the dataset's, and `panel_images`: each completion cut into
            its panels.
            An image with `None` is left out of its group's statistics and of the loss. Rewards are computed in
            batches of 16 images while the next ones are generated.
        args ([`PaCoGRPOConfig`], *optional*):
            Settings. If `None`, the paper's, with an output directory named after the model.
        train_dataset ([`~datasets.Dataset`]):
            Prompts of one of two kinds, with any other columns that the rewards use:

            - Image sets: the columns `prompt`, `rows`, `cols` and `panels`, optionally `height` and `width`. With
              `prompt` alone they are read from it, and a text without a layout is a single image. See
              [`~paco_trl.data.load_image_set_prompts`]. Pipelines of several images get `references` as sources. A set
              with `layout: "separate"`, `theme` and `panels` has an image for each panel (`set_layout`).
            - Edits: `prompt`, the instruction, and the source `image` (or `images` for several), optionally `height`
              and `width`. See [`~paco_trl.data.load_edit_prompts`].

            Both may have a `negative_prompt`, for models with true CFG.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Prompts of the same format for `evaluate()`.
        eval_reward_funcs (`Callable`, `str` or a list of them, *optional*):
            Rewards of `evaluate()`, such as a second judge; `eval_reward` is their plain sum. If `None`, the training
            rewards with their weights.
        callbacks (`list[~transformers.TrainerCallback]`, *optional*):
            Callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler, as in [`~transformers.Trainer`].
        optimizer_cls_and_kwargs (`tuple`, *optional*):
            Class of the optimizer and its arguments, as in [`~transformers.Trainer`].
        quantization_config ([`~diffusers.PipelineQuantizationConfig`], *optional*):
            Quantization of a model that is loaded by its name. A config of a single model, such as
            [`~diffusers.BitsAndBytesConfig`], quantizes the transformer alone.
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            Adapter to train, with the family's `target_modules` when they are omitted, or the directory, file or Hub
            id (also `"user/name/file.safetensors"`) of one to continue training: a LoRA in PEFT's format, or one that
            the pipeline's `load_lora_weights` reads, such as kohya's or ComfyUI's. If `None`, all weights of the
            transformer are trained.
        family ([`~paco_trl.rollout.Family`], *optional*):
            How the pipeline calls its transformer, for a pipeline that the package does not know. If `None`, the
            family that [`~paco_trl.rollout.get_family`] finds.

    Raises:
        TypeError: If `args` is not a `PaCoGRPOConfig`, or `peft_config` is not an adapter of an image transformer.
        ValueError: If data, settings or model cannot work. Data and settings are checked before the model is loaded.
    """

    _tag_names = ["paco-trl", "trl", "paco-grpo", "grpo"]
    _name = "PaCo-GRPO"
    _paper = PAPER
    _config_class = PaCoGRPOConfig
    _step_class = RecordedStep
    _statistics_class = RatioStatistics
    statistics: RatioStatistics

    @contextmanager
    def _generating(self, training_round: TrainingRound) -> Iterator[RecordingOptions]:
        """Place the weights that generate a round, and yield what to record: the stochastic steps."""
        with self.policy.on_device(self._sharded_engine):
            yield RecordingOptions(training_round.sde)

    # ---- Loss ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the clipped objective of one micro-batch at one stochastic step."""
        step = inputs["step"]
        sde = inputs["sde"]
        weights = inputs["weights"]

        velocity, ref_velocity = self._velocities(model, step)
        log_prob, mean, std = compute_log_prob(velocity, step, sde)
        replayed = PolicyStep(log_prob, step.log_prob, mean, step.mean, std, step.sigma, step.sigma_next)
        loss, metrics, ratio = PolicyLoss(*self.policy_loss(replayed, inputs["advantages"]))  # (B,)
        if ratio is None:
            ratio = torch.exp(log_prob - step.log_prob).detach()
        if ref_velocity is not None:
            kl = gaussian_kl(mean, compute_log_prob(ref_velocity, step, sde)[1], std)
            loss = loss + self.beta * kl
            metrics = metrics | {"kl": kl.detach()}
        self._collect_statistics(step, ratio, metrics, weights)
        return self._mean_loss(loss, weights)

    def policy_loss(self, step: PolicyStep, advantages: torch.Tensor) -> PolicyLoss:
        """
        Compute the loss of each image at one stochastic step: the method to override for a loss of your own.

        Args:
            step ([`~paco_trl.trainer.PolicyStep`]):
                The step by the policy in training, whose `log_prob` and `mean` have gradients, and by the old policy.
            advantages (`torch.Tensor` of shape `(B,)`):
                Advantages of the images.

        Returns:
            [`~paco_trl.trainer.PolicyLoss`], or a tuple of its fields: losses, which the trainer averages over the
            completions of an optimizer step (a panel of a set of n counts 1 / n); metrics to log; and, if it is not
            exp(log_prob - old_log_prob), the ratio that must be 1 before an update.
        """
        loss_type = self.args.loss_type
        low, high = self.args.clip_range
        log_probs = step.log_prob, step.old_log_prob
        if loss_type == "grpo_guard":
            weight = guard_gradient_weight(step.sigma, step.sigma_next)
            surrogate = guarded_surrogate(
                *log_probs, step.mean, step.old_mean, step.std, advantages, low, high, weight
            )
        elif loss_type == "grpo":
            surrogate = clipped_surrogate(*log_probs, advantages, low, high)
        else:
            raise NotImplementedError(f"`loss_type` is {loss_type!r}, for which `policy_loss` has no branch. Add it.")
        clipped_low = surrogate.is_low_clipped.float()
        clipped_high = surrogate.is_high_clipped.float()
        metrics = {
            "clip_ratio/low_mean": clipped_low,
            "clip_ratio/high_mean": clipped_high,
            "clip_ratio/region_mean": clipped_low + clipped_high,
        }
        return PolicyLoss(surrogate.loss, metrics, surrogate.ratio)

    def _collect_statistics(
        self, step: RecordedStep, ratio: torch.Tensor, metrics: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Collect the statistics of a micro-step, and check the ratio of a round before its first update."""
        global_step, num_trained = self.state.global_step, self.schedule.plan.num_trained_steps
        self.statistics.add_ratio(step, ratio, metrics, weights)
        is_complete = len(self.statistics.micro_steps) % num_trained == 0  # an image's steps
        if self.is_on_policy and global_step == self._initial_global_step and is_complete:
            self.statistics.check_ratio(num_trained)  # image by image, without waiting for the whole step
        if self.accelerator.sync_gradients:
            # A new adapter is zero: what differs in it shows in the next round. Later the host waits once a step
            is_early = global_step <= self._initial_global_step + self.schedule.optimizer_steps_per_round
            self._log_with_step(self.statistics.finish(global_step, self.is_on_policy, is_early))
