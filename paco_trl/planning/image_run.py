# SPDX-License-Identifier: Apache-2.0
"""Memory of an image model's training, and of commands that generate with it."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import CLIPConfig, CLIPModel

from ..rewards.paco_reward import read_judge_config
from ..rollout.adapters import SavedAdapter, read_peft_config
from ..rollout.prompt_rows import PromptRows
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..trainer.paco_nft_config import PaCoNFTConfig
from ..trainer.round_schedule import ROUNDS_AHEAD
from .judge_run import QUESTION_TOKENS, JudgeNetwork, judge_tokens
from .peaks import cached_method, extrapolate, weights_bytes
from .plan import (
    FLOAT32_BYTES,
    LIBRARIES_BYTES,
    MAX_BATCH_SIZE,
    MemoryPlan,
    Phase,
    PlanSettings,
    TrainingBytes,
    max_by_total,
    training_memory,
)
from .planned_pipeline import PlannedImage, PlannedPipeline


def read_rewards(models: Sequence[str], quantization: str | None) -> tuple[list[JudgeNetwork], int]:
    """Return the judges of the rewards, without data, and the bytes of their CLIP models."""
    judges, clip_bytes = list[JudgeNetwork](), 0
    make = functools.cache(lambda base: JudgeNetwork(base, quantization))
    for config in map(read_judge_config, models):
        if isinstance(config, CLIPConfig):
            with init_empty_weights():
                clip_bytes += weights_bytes(CLIPModel(config))
        else:
            judges.append(make(config.name_or_path))
    return judges, clip_bytes


class ImageRun:
    """Memory model of an image model's training, for the largest images with the longest prompts."""

    def __init__(
        self, model: str, args: PaCoGRPOConfig, peft_config: Any, train_dataset: Dataset, eval_dataset: Dataset | None,
        reward_models: Sequence[str], judge_quantization: str | None,
    ):  # fmt: skip
        self.args = args
        self.judges, self.clip_bytes = read_rewards(reward_models, judge_quantization)
        is_continued = isinstance(peft_config, SavedAdapter | str)
        if is_continued:
            peft_config = read_peft_config(peft_config, model, args.model_init_kwargs or {}).config
        self.planned = PlannedPipeline(model, args, peft_config)
        self.reference_bytes = self._count_reference(is_continued)
        self._find_largest_images(train_dataset, eval_dataset)
        family = self.planned.family
        is_single = self.rows.is_anchored and not family.batches_sources
        self.max_batch_size = 1 if is_single else family.max_batch_size or MAX_BATCH_SIZE

    def plan(self, zero_stage: int | None, is_fsdp: bool) -> MemoryPlan:
        """Plan the run with the settings of its config."""
        args = self.args
        return MemoryPlan(
            run=self,
            batch_size=args.round_plan.batch_size,
            gradient_checkpointing=args.activation_checkpointing,
            quantization=args.quantization,
            offload_embeddings=args.offload_embeddings,
            offload_rewards=args.offload_rewards,
            ema_offload=args.ema_offload,
            vae_tiling=args.vae_tiling,
            zero_stage=zero_stage,
            is_fsdp=is_fsdp,
            num_processes=args.round_plan.num_processes,
        )

    def _count_reference(self, is_continued: bool) -> int:
        """Count the bytes of the reference policy, 0 if it is the base model of a new adapter."""
        if not self.args.has_reference:
            return 0
        if not isinstance(self.planned.model, PeftModel):
            dtype = torch.bfloat16 if self.args.bf16 else torch.float32
            return sum(weight.numel() for weight in self.planned.transformer.parameters()) * dtype.itemsize
        # The adapter `ref`
        return self.planned.trained_bytes if is_continued and self.args.reference == "initial" else 0

    def _find_largest_images(self, train_dataset: Dataset, eval_dataset: Dataset | None) -> None:
        """Find the images of training and evaluation that take the most memory."""
        measured_for = self.planned.pipeline, self.planned.family
        self.rows = rows = PromptRows(train_dataset, self.args, "the dataset").resolve_for_pipeline(*measured_for)
        self.evaluates = eval_dataset is not None
        eval_rows = rows
        if eval_dataset is not None:
            eval_rows = PromptRows(eval_dataset, self.args, "the evaluation dataset").resolve_for_pipeline(
                *measured_for
            )
        self.image = PlannedImage.largest(rows, rows.training_sizes, self.args.resolution_scale)
        self.eval_image = PlannedImage.largest(eval_rows, eval_rows.inference_sizes, 1.0)
        self.size = "{} x {}".format(*self.image.size)

    @cached_method
    def weights_bytes(self, module: nn.Module, trainable: bool | None = None, quantization: str | None = None) -> int:
        return weights_bytes(module, trainable, quantization)

    @property
    def has_old_policy(self) -> bool:
        """Whether the run keeps an average that is DiffusionNFT's or AWM's old policy."""
        return isinstance(self.args, PaCoNFTConfig) and self.args.keeps_old_policy

    @property
    def prompts_per_round(self) -> int:
        """Embeddings that a round holds. Images of a prompt share them unless batches span prompts."""
        round_plan = self.args.round_plan
        if round_plan.num_generations % round_plan.rollout_batch_size:
            return round_plan.micro_batches_per_process * round_plan.batch_size
        return min(round_plan.num_prompts, round_plan.micro_batches_per_process)

    @property
    def embeddings_bytes(self) -> int:
        """Bytes of the embeddings that a round holds."""
        return self.prompts_per_round * sum(tensor.nbytes for tensor in self.planned.embeddings(self.image).values())

    @property
    def latents_bytes(self) -> int:
        """Bytes of the float32 latents that a round keeps for each image and step."""
        args, round_plan = self.args, self.args.round_plan
        # The latents before and after a step, and its mean; in DiffusionNFT and AWM an input, a target and a velocity
        # per time
        num_latents = 3
        if self.rows.sources or self.rows.is_anchored:
            num_latents += 2  # the transformer's input, which is twice as long with source images
        if self.has_old_policy and args.loss_type == "awm":
            num_latents += 1  # the old policy's velocity, besides the rollout's
        latent = math.prod(self.planned.latent_size(self.image))
        images = round_plan.micro_batches_per_process * round_plan.batch_size
        return FLOAT32_BYTES * num_latents * round_plan.num_trained_steps * images * latent

    @property
    def num_averages(self) -> int:
        """Number of averages of the trained weights."""
        return [self.args.ema_decay is not None, self.has_old_policy].count(True)

    def _frozen_bytes(self, settings: PlanSettings, *modules: nn.Module) -> int:
        return sum(self.weights_bytes(module, False, settings.quantization) for module in modules)

    def _local_judges(self, settings: PlanSettings) -> list[JudgeNetwork]:
        return [] if settings.uses_judge_server else self.judges

    def _rewards_bytes(self, settings: PlanSettings) -> int:
        judges = self._local_judges(settings)
        return self.clip_bytes + sum(self.weights_bytes(judge.network, False, judge.quantization) for judge in judges)

    def _generation_peaks(self, settings: PlanSettings, image: PlannedImage, batch_size: int) -> list[int]:
        """Return the activations of a sampling step and of the decoder."""
        step = extrapolate(self.planned.step_peak, batch_size, image, settings.quantization)
        if image.rows.is_anchored:  # a first panel is encoded in between
            step = max(step, self.planned.first_panel_peak(image))
        return [step, extrapolate(self.planned.decoding_peak, batch_size, image, settings.vae_tiling)]

    def _judge_activations(self, settings: PlanSettings, image: PlannedImage) -> dict[str, int]:
        """Return the activations of the largest judge."""
        # It sees pairs of panels or a whole grid, and images without panels in pairs
        num_images = 2 if image.rows.image_layouts[image.row_index] == (1, 1) else 1
        num_tokens = judge_tokens(num_images * math.prod(image.size), QUESTION_TOKENS)
        peaks = [judge.peak(settings.judge_batch_size, num_tokens) for judge in self._local_judges(settings)]
        return {"activations of the judge": max(peaks, default=0)}

    def phases(self, settings: PlanSettings) -> list[Phase]:
        """Return what each phase of training keeps on the device and on the host."""
        always, micro_batch = self._training_bytes(settings)
        training = extrapolate(
            self.planned.training_peak,
            settings.batch_size,
            self.image,
            settings.gradient_checkpointing,
            settings.quantization,
        )
        device = {
            "load": {},
            "encode": always | self._encoding(settings),
            **self._rollout_phases(settings, always),
            "train": always | micro_batch | {"activations": training},
        }
        if self.evaluates:
            device["evaluate"] = self._evaluation(settings, always)
        loading = self._host_memory(settings, is_loading=True)
        running = self._host_memory(settings)
        return [
            Phase(name, uses, *(loading if name in ("load", "encode") else running)) for name, uses in device.items()
        ]

    def _encoding(self, settings: PlanSettings) -> dict[str, int]:
        """Return what changes on the device while prompts are encoded."""
        uses = {
            "latents and embeddings": 0,
            "text encoders": self._frozen_bytes(settings, *self.planned.text_encoders),
        }
        # The text encoders replace the frozen weights on the device, except with DeepSpeed and FSDP
        return uses if settings.is_sharded else uses | {"frozen weights": 0}

    def _rollout_phases(self, settings: PlanSettings, always: dict[str, int]) -> dict[str, dict[str, int]]:
        """Return the uses of the device while images are generated, decoded and scored."""
        batch_size = settings.batch_size * self.args.round_plan.micro_batches_per_rollout_batch
        step, decoding = self._generation_peaks(settings, self.image, batch_size)
        rollout = self._generating(settings, always, self.has_old_policy)
        # Rewards run while the next images are generated, and offloaded ones after the last
        scoring = rollout | {"activations": max(step, decoding)}
        if settings.offload_rewards:
            scoring = always | {"rewards": self._rewards_bytes(settings)}
        return {
            "generate": rollout | {"activations": step},
            "decode": rollout | {"activations": decoding},
            "score": scoring | self._judge_activations(settings, self.image),
        }

    def _evaluation(self, settings: PlanSettings, always: dict[str, int]) -> dict[str, int]:
        """Return the uses of the device at the peak of an evaluation."""
        generating = self._generating(settings, always, self.args.ema_decay is not None)
        peaks = self._generation_peaks(settings, self.eval_image, self.args.per_device_eval_batch_size)
        activations = {"activations": max(peaks)}
        judging = self._judge_activations(settings, self.eval_image)
        if not settings.offload_rewards:
            return generating | activations | judging
        name = "weights set aside"
        scoring = always | {"rewards": self._rewards_bytes(settings), name: generating[name]} | judging
        return max_by_total(generating | activations, scoring)

    def _training_bytes(self, settings: PlanSettings) -> TrainingBytes:
        memory = training_memory(
            self._frozen_bytes(settings, self.planned.model),
            self.planned.num_trained,
            self.planned.element_size,
            settings,
            self.num_averages,
            self.args.optim,
        )
        embeddings_bytes = 0 if settings.offload_embeddings else self.embeddings_bytes
        always = memory.always | {
            "reference": self.reference_bytes // settings.num_shards(3),
            "rewards": 0 if settings.offload_rewards else self._rewards_bytes(settings),
            "latents and embeddings": self.latents_bytes + embeddings_bytes,
        }
        return memory._replace(always=always)

    def _generating(self, settings: PlanSettings, always: dict[str, int], uses_average: bool) -> dict[str, int]:
        """Return the device memory used during generation, without activations."""
        trained_bytes = self.planned.trained_bytes
        num_shards = settings.num_shards(3)
        gathers = num_shards > 1 and self.args.ds3_gather_for_generation
        model_bytes = self._frozen_bytes(settings, self.planned.model) + trained_bytes
        return always | {
            "gathered weights": model_bytes if gathers else 0,
            "VAE": self.weights_bytes(self.planned.vae),
            # `use_weights` keeps the trained weights, in the dtype of the forward pass
            "weights set aside": trained_bytes // num_shards if uses_average else 0,
        }

    def _host_memory(self, settings: PlanSettings, is_loading: bool = False) -> tuple[dict[str, int], dict[str, int]]:
        """Return the process's own host memory, and what is mapped from files."""
        averages_bytes = self.num_averages * FLOAT32_BYTES * self.planned.num_trained // settings.num_shards(3)
        allocated = {
            "libraries": LIBRARIES_BYTES,
            "EMA weights": averages_bytes if settings.ema_offload else 0,
            "embeddings of the round": self.embeddings_bytes if settings.offload_embeddings else 0,
        }
        if self.args.embeddings_dir is None:
            count = min(len(self.rows.image_prompts), ROUNDS_AHEAD * self.prompts_per_round)
            allocated["embeddings"] = count * sum(
                tensor.nbytes for tensor in self.planned.embeddings(self.image).values()
            )
        mapped = {"VAE": self.weights_bytes(self.planned.vae)}
        if settings.offload_rewards:
            judges = [judge for judge in self._local_judges(settings) if judge.quantization is None]
            mapped["rewards"] = self.clip_bytes + sum(self.weights_bytes(judge.network) for judge in judges)
            allocated["rewards"] = self._rewards_bytes(settings) - mapped["rewards"]
        weights = {"text encoders": self._frozen_bytes(settings, *self.planned.text_encoders)}
        if is_loading:
            allocated["trained weights"] = self.weights_bytes(self.planned.model, True)
            weights["frozen weights"] = self._frozen_bytes(settings, self.planned.model)
        return settings.host_memory(allocated, mapped, weights)

    def commands(self, settings: PlanSettings) -> list[Phase]:
        """Return what the other commands keep on the device and on the host with the trained model."""
        is_adapter = isinstance(self.planned.model, PeftModel)
        encoding = {"text encoders": self._frozen_bytes(settings, *self.planned.text_encoders)}
        frozen = {"frozen weights": self._frozen_bytes(settings, self.planned.model)}
        itemsize = FLOAT32_BYTES if is_adapter else self.planned.vae.dtype.itemsize
        trained = {"trained weights": self.planned.num_trained * itemsize}
        vae = {"VAE": self.weights_bytes(self.planned.vae)}
        generation = (
            frozen | trained | vae | {"activations": max(self._generation_peaks(settings, self.eval_image, 1))}
        )
        if not is_adapter and not settings.is_sharded:  # as in training, they stay on the device together
            generation |= encoding
        judging = self._judge_activations(settings, self.eval_image)
        # The Space loads its judge without quantization
        space_judges = [weights_bytes(judge.network) for judge in self._local_judges(settings)]
        generating = max_by_total(encoding, generation)
        device = {
            "evaluate prompts": max_by_total(generating, {"rewards": self._rewards_bytes(settings)} | judging),
            "evaluate images": generating,
            "build grids": generating,
            "space": max_by_total(generating, {"rewards": max(space_judges, default=0)} | judging),
        }
        host = settings.host_memory({"libraries": LIBRARIES_BYTES} | trained, vae, encoding | frozen)
        return [Phase(name, uses, *host) for name, uses in device.items()]

    def savings(self, settings: PlanSettings) -> dict[str, bool]:
        """Return which options would save memory, the cheapest first."""
        has_judge = bool(self._local_judges(settings))
        return {
            "`--vae_tiling`": not settings.vae_tiling,
            "`--ema_offload`": not settings.ema_offload and self.args.ema_decay is not None,
            "`--offload_embeddings`": not settings.offload_embeddings,
            "`--offload_rewards`": not settings.offload_rewards and (has_judge or self.clip_bytes > 0),
            "a smaller `--per_device_train_batch_size`": settings.batch_size > 1,
            "`--gradient_checkpointing`": not settings.gradient_checkpointing,
            "a judge on another GPU (`--judge_url`)": has_judge,
            "`--quantization int8` or `nf4`": settings.quantization is None,
            "`--accelerate_config zero3`": settings.could_use_zero3,
        }
