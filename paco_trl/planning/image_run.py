# SPDX-License-Identifier: Apache-2.0
"""Memory of an image model's training."""

import copy
import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from accelerate import init_empty_weights
from datasets import Dataset
from peft import PeftModel
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import CLIPConfig, CLIPModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from ..rewards.paco_reward import read_judge_config
from ..rollout import EncodedImage, PipelinePolicy, cast_floating_inputs, family_of
from ..rollout.adapters import SavedAdapter, check_peft_config
from ..rollout.families.unlisted import TransformerReachedError
from ..rollout.kernels import keep_dtype_of_norms
from ..rollout.loading import load_without_weights
from ..rollout.policy_building import prepare_transformer
from ..rollout.prompt_rows import PromptRows
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..trainer.paco_nft_config import PaCoNFTConfig
from ..trainer.round_trainer import ROUNDS_AHEAD
from ..utils.model_files import hub_arguments
from ..utils.pipelines import truncations_counted
from .judge_run import JudgeNetwork, judge_tokens
from .peaks import (
    PlanMode,
    dequantize_in_forward,
    extrapolate,
    fake_weights,
    measure_peak,
    skip_equal_blocks,
    training_precision,
    weights_bytes,
)
from .plan import FLOAT32, LIBRARIES, MemoryPlan, Phase, training_memory


def return_zeros(encoder: Any) -> None:
    """Let a text encoder return zeros in the shapes of its real outputs."""

    def forward(input_ids: torch.Tensor, *args, **kwargs) -> Any:
        config = encoder.config.get_text_config()
        states = torch.zeros(*input_ids.shape, config.hidden_size, dtype=encoder.dtype)  # (B, L, D)
        outputs = {"last_hidden_state": states, "hidden_states": (states,) * (config.num_hidden_layers + 1)}
        if hasattr(encoder, "text_projection"):
            return CLIPTextModelOutput(text_embeds=states.new_zeros(len(states), config.projection_dim), **outputs)
        return BaseModelOutputWithPooling(pooler_output=states[:, 0], **outputs)

    encoder.forward = forward


class ImageRun:
    """Memory model of an image model's training, for the row with the largest images and the longest prompt."""

    # Prompts go through the real tokenizers and through text encoders that return zeros, and the pipeline itself
    # computes the transformer's arguments. The transformer, its backward pass and the VAE run on tensors without data.

    def __init__(
        self, model: str, args: PaCoGRPOConfig, peft_config: Any, dataset: Dataset | None,
        reward_models: Sequence[str], judge_quantization: str | None,
    ):  # fmt: skip
        self.args, self.mode, self.weights_bytes = args, PlanMode(), functools.cache(weights_bytes)
        self._read_rewards(reward_models, judge_quantization)
        self._load(model, peft_config)
        self._read_prompts(dataset)
        names = ("quantization", "offload_embeddings", "offload_rewards", "ema_offload", "vae_tiling")
        self.settings = {name: getattr(args, name) for name in names} | {
            "batch_size": args.round_plan.batch_size, "gradient_checkpointing": args.activation_checkpointing,
            "serves_judge": not self.judges, "num_processes": args.round_plan.num_processes,
        }  # fmt: skip

    def _load(self, model: str, peft_config: Any) -> None:
        args, init = self.args, self.args.model_init_kwargs or {}
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        is_deepspeed, is_continued = args.deepspeed_plugin is not None, isinstance(peft_config, SavedAdapter | str)
        self.training_precision = functools.partial(training_precision, dtype, not is_deepspeed)
        dtypes = {"default": dtype} | ({"transformer": torch.float32} if not (peft_config or is_deepspeed) else {})
        pipeline = load_without_weights(model, dtypes, **hub_arguments(init))
        transformer, components = pipeline.transformer, pipeline.components
        self.pipeline, self.family, self.transformer = pipeline, family_of(pipeline), transformer
        self.signature = inspect.signature(transformer.forward)
        if is_continued:
            peft_config = check_peft_config(peft_config, model, init).config
        with init_empty_weights():
            keep_dtype_of_norms(pipeline.transformer)
            self.model = prepare_transformer(pipeline, self.family, peft_config, not is_deepspeed)
        self.vae = copy.deepcopy(pipeline.vae)  # without the policy's check of pixel values
        for component in (self.model, self.vae, *components.values()):
            if isinstance(component, nn.Module):
                with skip_equal_blocks(component):  # skipped blocks are counted, but not called
                    fake_weights(component, self.mode)
        self.policy = PipelinePolicy(pipeline, self.family, self.model.train(), self.signature)
        if is_deepspeed:
            cast_floating_inputs(self.model, dtype)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.num_trained, self.element_size = sum(w.numel() for w in weights), weights[0].element_size()
        self.reference_bytes = 0
        if args.has_reference and peft_config is None:
            self.reference_bytes = sum(p.numel() for p in transformer.parameters()) * dtype.itemsize
        elif args.has_reference and is_continued and args.reference == "initial":  # the adapter `ref`
            self.reference_bytes = self.element_size * self.num_trained
        self.text_encoders = [components[name] for name in self.family.text_encoders if components[name] is not None]
        for encoder in self.text_encoders:
            return_zeros(encoder)
        self.channels = self.vae.config.get("latent_channels") or self.vae.config.z_dim

    def _read_prompts(self, dataset: Dataset | None) -> None:
        """Find the row with the largest images and the longest prompt."""
        args = self.args
        rows = self.rows = PromptRows(dataset, args, "the dataset").measure(self.pipeline, self.family)
        size = lambda prompt: (math.prod(rows.training_sizes[prompt.row_number]), len(prompt.prompt))  # noqa: E731
        self.row_number, self.prompt = max(rows.image_prompts, key=size)
        self.negative_prompt = rows.negative_prompts[self.row_number]
        self.max_batch_size = (
            1 if rows.is_anchored and not self.family.batches_sources else self.family.max_batch_size or 1024
        )
        # Indexed by `is_full`: the training size, and the full inference size
        self.sizes = rows.training_sizes[self.row_number], rows.inference_sizes[self.row_number]
        self.scales, self.size = (args.resolution_scale, 1.0), "{} x {}".format(*self.sizes[0])

    def _read_rewards(self, models: Sequence[str], quantization: str | None) -> None:
        self.judges, self.clip_bytes = list[JudgeNetwork](), 0
        make = functools.cache(lambda base: JudgeNetwork(base, quantization))
        for config in map(read_judge_config, models):
            if isinstance(config, CLIPConfig):
                with init_empty_weights():
                    self.clip_bytes += weights_bytes(CLIPModel(config))
            else:
                self.judges.append(make(config.name_or_path))

    @functools.cache  # noqa: B019  (lives as long as the plan)
    def embeddings(self, is_full: bool = False) -> dict[str, torch.Tensor]:
        """Encode the prompt and the negative prompt, as zeros in the real shapes with batch dimension 1."""
        images = self.rows.images(self.row_number) if self.family.prompt_sees_images else []
        encoding_arguments = (torch.device("cpu"), images, self.scales[is_full])
        with truncations_counted(self.pipeline):  # tokenizers warn of each long text
            embeddings = dict(self.family.encode_prompt(self.pipeline, self.prompt, *encoding_arguments))
            if self.negative_prompt is not None:
                negative = self.family.encode_prompt(self.pipeline, self.negative_prompt, *encoding_arguments)
                embeddings |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        return embeddings

    def panel(self, is_full: bool) -> Image.Image:
        return self.family.prepare_panel(self.pipeline, Image.new("RGB", self.sizes[is_full][::-1]))

    def encode_image(self, image: Image.Image) -> torch.Tensor:
        """Encode a prepared source image, never in tiles."""
        pixels = self.family.image_pixels(self.pipeline, image).to(self.vae.dtype)
        self.vae.disable_tiling()
        with self.mode:
            return self.vae.encode(self.mode.from_tensor(pixels)).latent_dist.mode()

    @functools.cache  # noqa: B019
    def transformer_calls(self, batch_size: int, is_full: bool = False) -> list[dict]:
        """Record the arguments of the transformer's calls in a step, as tensors without data."""
        calls: list[dict] = []
        num_calls = self.family.max_calls if self.negative_prompt is not None else 1

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append(dict(self.signature.bind(*args, **kwargs).arguments))
            if len(calls) == num_calls:
                raise TransformerReachedError

        images = self.rows.images(self.row_number)
        source_images = [self.family.prepare_image(self.pipeline, image, self.scales[is_full]) for image in images]
        if self.rows.is_anchored:
            source_images.append(self.panel(is_full))
        sources = [EncodedImage(image, torch.zeros(self.encode_image(image).shape)) for image in source_images]
        arguments = {n: t.expand(batch_size, *t.shape[1:]) for n, t in self.embeddings(is_full).items()}
        arguments = {n: t.float() if t.is_floating_point() else t for n, t in arguments.items()}
        keys: list[tuple[int, ...]] = [(0, image) for image in range(batch_size)]
        handle = self.model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
        steps, scale = self.args.num_inference_steps, self.args.guidance_scale
        with handle, self.training_precision(), skip_equal_blocks(self.model), suppress(TransformerReachedError):
            self.policy.generate(arguments, *self.sizes[is_full], steps, scale, keys, sources=sources)
        # Keep masks, whose values Qwen-Image-2.1's transformer reads
        to_fake = lambda tensor: tensor if tensor.dtype == torch.bool else self.mode.from_tensor(tensor)  # noqa: E731
        return tree_map_only(torch.Tensor, to_fake, calls)

    @functools.cache  # noqa: B019
    def training_peak(self, batch_size: int, checkpoints: bool, quantization: str | None = None) -> int:
        """Measure the peak of a micro-batch's forward and backward pass."""
        getattr(self.transformer, f"{'enable' if checkpoints else 'disable'}_gradient_checkpointing")()
        return self._transformer_peak(self.transformer_calls(batch_size), quantization, is_training=True)

    @functools.cache  # noqa: B019
    def step_peak(self, batch_size: int, is_full: bool = False, quantization: str | None = None) -> int:
        """Measure the peak of a sampling step."""
        return self._transformer_peak(self.transformer_calls(batch_size, is_full), quantization)

    def _transformer_peak(self, calls: list[dict], quantization: str | None, is_training: bool = False) -> int:
        with self.mode, self.training_precision(), dequantize_in_forward(self.model, quantization):
            return measure_peak(lambda: [self.model(**call)[0] for call in calls], self.model, is_training)

    @functools.cache  # noqa: B019
    def decoding_peak(self, batch_size: int, is_full: bool, tiled: bool) -> int:
        """Measure the peak of the VAE's decoder."""
        sides = [side // self.pipeline.vae_scale_factor for side in self.sizes[is_full]]
        frames = [1] if "z_dim" in self.vae.config else []  # the VAE of a video model
        (self.vae.enable_tiling if tiled else self.vae.disable_tiling)()
        with self.mode, self.training_precision():
            latents = torch.empty(batch_size, self.channels, *frames, *sides, dtype=self.vae.dtype)
            return measure_peak(lambda: self.vae.decode(latents, return_dict=False), self.vae)

    @functools.cache  # noqa: B019
    def first_panel_peak(self, is_full: bool) -> int:
        """Measure the peak of the VAE's encoder for a first panel."""
        return measure_peak(lambda: self.encode_image(self.panel(is_full)), self.vae)

    @property
    def has_old_policy(self) -> bool:
        return isinstance(self.args, PaCoNFTConfig) and self.args.keeps_old_policy

    @property
    def prompts_per_round(self) -> int:
        """Count the embeddings that a round holds; images of a prompt share them unless batches span prompts."""
        round_plan = self.args.round_plan
        if round_plan.num_generations % round_plan.rollout_batch_size:
            return round_plan.micro_batches_per_process * round_plan.batch_size
        return min(round_plan.num_prompts, round_plan.micro_batches_per_process)

    @property
    def latents_bytes(self) -> int:
        """Count the bytes of the float32 latents that a round keeps for each image and step."""
        args, round_plan = self.args, self.args.round_plan
        # The latents before and after a step, and its mean; in DiffusionNFT and AWM an input, a target and a velocity
        # per time. With source images, the transformer's input as well
        num_latents = 3 + 2 * bool(self.rows.sources or self.rows.is_anchored)
        num_latents += (
            self.has_old_policy and args.loss_type == "awm"
        )  # the old policy's velocity besides the rollout's
        latent = math.prod(side // self.pipeline.vae_scale_factor for side in self.sizes[0]) * self.channels
        images = round_plan.micro_batches_per_process * round_plan.batch_size
        return FLOAT32 * num_latents * round_plan.num_trained_steps * images * latent

    def _activations(self, plan: MemoryPlan) -> dict[str, int]:
        """Return the activations of each phase of the image model."""
        args = self.args
        batch, eval_batch = plan.batch_size * args.round_plan.num_merged_batches, args.per_device_eval_batch_size
        train = extrapolate(self.training_peak, plan.batch_size, plan.gradient_checkpointing, plan.quantization)
        step = extrapolate(self.step_peak, batch, False, plan.quantization)
        decode = extrapolate(self.decoding_peak, batch, False, plan.vae_tiling)
        is_full = args.resolution_scale != 1  # otherwise the same as in training
        evaluate = extrapolate(self.step_peak, eval_batch, is_full, plan.quantization)
        evaluate = max(evaluate, extrapolate(self.decoding_peak, eval_batch, is_full, plan.vae_tiling))
        if self.rows.is_anchored:  # a first panel is encoded in between
            step = max(step, self.first_panel_peak(False))
            evaluate = max(evaluate, self.first_panel_peak(is_full))
        return {"generate": step, "decode": decode, "train": train, "evaluate": evaluate}

    def _judge_activations(self, plan: MemoryPlan, size: tuple[int, int]) -> int:
        """Return the activations of the largest judge."""
        judges = () if plan.serves_judge else self.judges
        return max((judge.peak(plan.judge_batch_size, judge_tokens(math.prod(size))) for judge in judges), default=0)

    def phases(self, plan: MemoryPlan) -> list[Phase]:
        args, prompt_embeddings = self.args, self.embeddings().values()
        frozen_bytes = self.weights_bytes(self.model, False, plan.quantization)
        encoders = sum(self.weights_bytes(encoder, False, plan.quantization) for encoder in self.text_encoders)
        vae, num_shards = self.weights_bytes(self.vae), plan.num_processes if plan.zero_stage == 3 else 1
        judges = () if plan.serves_judge else self.judges
        rewards = sum(self.weights_bytes(judge.network, False, judge.quantization) for judge in judges)
        rewards += self.clip_bytes
        embeddings = FLOAT32 * self.prompts_per_round * sum(tensor.numel() for tensor in prompt_embeddings)

        averages = (args.ema_decay is not None) + self.has_old_policy
        persistent, per_batch = training_memory(
            frozen_bytes, self.num_trained, self.element_size, plan, averages, args.optim
        )
        persistent["reference"] = self.reference_bytes // num_shards
        persistent["rewards"] = 0 if plan.offload_rewards else rewards
        persistent["round"] = self.latents_bytes + (0 if plan.offload_embeddings else embeddings)
        is_gathered = num_shards > 1 and args.ds3_gather_for_generation
        gathered_bytes = frozen_bytes + self.element_size * self.num_trained if is_gathered else 0
        generation = {**persistent, "gathered weights": gathered_bytes, "VAE": vae}
        # While an average generates, `use_weights` keeps the trained weights, in the dtype of the forward pass
        replaced_bytes = self.element_size * self.num_trained // num_shards
        rollout = {**generation, "replaced weights": replaced_bytes * self.has_old_policy}
        evaluation = {**generation, "replaced weights": replaced_bytes * (args.ema_decay is not None)}
        # Between rounds, when the text encoders replace the frozen weights on the device, except with DeepSpeed
        encoding = {**persistent, "round": 0, "text encoders": encoders}
        encoding["frozen weights"] = 0 if plan.zero_stage is None else persistent["frozen weights"]

        activations = self._activations(plan)
        judge_activations = {"activations of the judge": self._judge_activations(plan, self.sizes[0])}
        # Rewards run while the next images are generated, and offloaded ones after the last
        is_offloaded, generation_peak = plan.offload_rewards, max(activations["generate"], activations["decode"])
        score = {**persistent, "rewards": rewards} if is_offloaded else {**rollout, "activations": generation_peak}
        evaluation |= {"activations": activations["evaluate"], **({} if is_offloaded else judge_activations)}

        host = {
            "libraries": LIBRARIES,
            "text encoders": encoders,
            "VAE": vae,
            "average": averages * FLOAT32 * self.num_trained // num_shards if plan.ema_offload else 0,
            "round": embeddings if plan.offload_embeddings else 0,
            "rewards": rewards if is_offloaded else 0,
        }
        if args.embeddings_dir is None:
            count = min(len(self.rows.image_prompts), ROUNDS_AHEAD * self.prompts_per_round)
            host["embeddings"] = count * sum(tensor.nbytes for tensor in prompt_embeddings)
        # Weights are quantized one by one while they are read from memory-mapped files
        loading_memory = {**host, "transformer": self.weights_bytes(self.model, None, plan.quantization)}
        return [
            Phase("load", {}, loading_memory),
            Phase("encode", encoding, loading_memory),
            Phase("generate", {**rollout, "activations": activations["generate"]}, host),
            Phase("decode", {**rollout, "activations": activations["decode"]}, host),
            Phase("score", {**score, **judge_activations}, host),
            Phase("train", {**persistent, **per_batch, "activations": activations["train"]}, host),
            Phase("evaluate", evaluation, host),
        ]

    def commands(self, plan: MemoryPlan) -> list[Phase]:
        """Return the memory of commands that generate with the trained model, loaded as in training, at inference size."""
        is_adapter, is_full = isinstance(self.model, PeftModel), self.args.resolution_scale != 1
        frozen_bytes_of = functools.partial(self.weights_bytes, trainable=False, quantization=plan.quantization)
        encoding = {"text encoders": sum(map(frozen_bytes_of, self.text_encoders))}
        trained_bytes = self.num_trained * (FLOAT32 if is_adapter else self.vae.dtype.itemsize)
        network = {
            "frozen weights": frozen_bytes_of(self.model),
            "trained weights": trained_bytes,
            "VAE": self.weights_bytes(self.vae),
        }
        if not is_adapter and plan.zero_stage is None:  # as in training, they stay on the device together
            network |= encoding
        judges = () if plan.serves_judge else self.judges
        weights = [self.weights_bytes(judge.network, False, judge.quantization) for judge in judges]
        judge_activations = self._judge_activations(plan, self.sizes[1])

        activations = max(
            self.step_peak(1, is_full, plan.quantization), self.decoding_peak(1, is_full, plan.vae_tiling)
        )
        images = {**network, "activations": activations}  # generated one by one

        def scoring(size: int) -> dict[str, int]:
            return {"rewards": size, "activations of the judge": judge_activations}

        host = {"libraries": LIBRARIES, **encoding, "transformer": network["frozen weights"] + trained_bytes}
        turns = {
            "evaluate prompts": [encoding, images, scoring(sum(weights) + self.clip_bytes)],
            "evaluate images": [encoding, images],
            "build grids": [encoding, images],
            "space": [encoding, images, scoring(max((weights_bytes(judge.network) for judge in judges), default=0))],
        }
        return [
            Phase(name, max(name_turns, key=lambda turn: sum(turn.values())), host)
            for name, name_turns in turns.items()
        ]
