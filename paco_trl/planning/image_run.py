# SPDX-License-Identifier: Apache-2.0
"""Memory of an image model's training, and of commands that generate with it."""

import copy
import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from ..rollout.adapters import SavedAdapter, read_peft_config
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
from .judge_run import QUESTION_TOKENS, JudgeNetwork, judge_tokens
from .peaks import (
    PlanMode,
    cached_method,
    dequantize_in_forward,
    extrapolate,
    fake_weights,
    measure_peak,
    skip_equal_blocks,
    training_precision,
    weights_bytes,
)
from .plan import FLOAT32, LIBRARIES, MemoryPlan, Phase, largest_turn, training_memory


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


@dataclass(frozen=True)
class PlannedImage:
    """The image of a dataset that takes the most memory; `scale` is that of its source images."""

    rows: PromptRows
    row_number: int
    prompt: str
    size: tuple[int, int]
    scale: float

    @classmethod
    def largest(cls, rows: PromptRows, sizes: list[tuple[int, int]], scale: float) -> "PlannedImage":
        """Find the row with the largest size and the longest prompt."""
        largest = lambda prompt: (math.prod(sizes[prompt.row_number]), len(prompt.prompt))  # noqa: E731
        row_number, prompt = max(rows.image_prompts, key=largest)
        return cls(rows, row_number, prompt, sizes[row_number], scale)

    @property
    def negative_prompt(self) -> str | None:
        return self.rows.negative_prompts[self.row_number]


class ImageRun:
    """Memory model of an image model's training, for the largest images with the longest prompts."""

    # Prompts go through the real tokenizers and through text encoders that return zeros, and the pipeline itself
    # computes the transformer's arguments. The transformer, its backward pass and the VAE run on tensors without data.

    def __init__(
        self, model: str, args: PaCoGRPOConfig, peft_config: Any, train_dataset: Dataset, eval_dataset: Dataset | None,
        reward_models: Sequence[str], judge_quantization: str | None,
    ):  # fmt: skip
        self.args = args
        self.mode = PlanMode()
        self.weights_bytes = functools.cache(weights_bytes)
        self._read_rewards(reward_models, judge_quantization)
        self._load(model, peft_config)
        self._read_prompts(train_dataset, eval_dataset)
        names = ("quantization", "offload_embeddings", "offload_rewards", "ema_offload", "vae_tiling")
        self.settings = {name: getattr(args, name) for name in names} | {
            "batch_size": args.round_plan.batch_size, "gradient_checkpointing": args.activation_checkpointing,
            "serves_judge": not self.judges, "num_processes": args.round_plan.num_processes,
        }  # fmt: skip

    def _load(self, model: str, peft_config: Any) -> None:
        args = self.args
        init = args.model_init_kwargs or {}
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        is_deepspeed = args.deepspeed_plugin is not None
        is_continued = isinstance(peft_config, SavedAdapter | str)
        self.training_precision = functools.partial(training_precision, dtype, not is_deepspeed)
        dtypes = {"default": dtype} | ({"transformer": torch.float32} if not (peft_config or is_deepspeed) else {})
        pipeline = load_without_weights(model, dtypes, **hub_arguments(init))
        transformer, components = pipeline.transformer, pipeline.components
        self.pipeline = pipeline
        self.family = family_of(pipeline)
        self.transformer = transformer
        self.signature = inspect.signature(transformer.forward)
        if is_continued:
            peft_config = read_peft_config(peft_config, model, init).config
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
        self.num_trained = sum(w.numel() for w in weights)
        self.element_size = weights[0].element_size()
        self.reference_bytes = 0
        if args.has_reference and peft_config is None:
            self.reference_bytes = sum(p.numel() for p in transformer.parameters()) * dtype.itemsize
        elif args.has_reference and is_continued and args.reference == "initial":  # the adapter `ref`
            self.reference_bytes = self.element_size * self.num_trained
        self.text_encoders = [components[name] for name in self.family.text_encoders if components[name] is not None]
        for encoder in self.text_encoders:
            return_zeros(encoder)
        self.channels = self.vae.config.get("latent_channels") or self.vae.config.z_dim

    def _read_prompts(self, train_dataset: Dataset, eval_dataset: Dataset | None) -> None:
        """Find the images of training and evaluation that take the most memory."""

        def read(dataset: Dataset, where: str) -> PromptRows:
            return PromptRows(dataset, self.args, where).measure(self.pipeline, self.family)

        rows = self.rows = read(train_dataset, "the dataset")
        self.evaluates = eval_dataset is not None
        eval_rows = read(eval_dataset, "the evaluation dataset") if self.evaluates else rows
        self.image = PlannedImage.largest(rows, rows.training_sizes, self.args.resolution_scale)
        self.eval_image = PlannedImage.largest(eval_rows, eval_rows.inference_sizes, 1.0)
        self.size = "{} x {}".format(*self.image.size)
        self.max_batch_size = (
            1 if rows.is_anchored and not self.family.batches_sources else self.family.max_batch_size or 1024
        )

    def _read_rewards(self, models: Sequence[str], quantization: str | None) -> None:
        self.judges = list[JudgeNetwork]()
        self.clip_bytes = 0
        make = functools.cache(lambda base: JudgeNetwork(base, quantization))
        for config in map(read_judge_config, models):
            if isinstance(config, CLIPConfig):
                with init_empty_weights():
                    self.clip_bytes += weights_bytes(CLIPModel(config))
            else:
                self.judges.append(make(config.name_or_path))

    @cached_method
    def embeddings(self, image: PlannedImage) -> dict[str, torch.Tensor]:
        """Encode the prompt and the negative prompt, as zeros in the real shapes with batch dimension 1."""
        images = image.rows.images(image.row_number) if self.family.prompt_sees_images else []
        encoding_arguments = (torch.device("cpu"), images, image.scale)
        with truncations_counted(self.pipeline):  # tokenizers warn of each long text
            embeddings = dict(self.family.encode_prompt(self.pipeline, image.prompt, *encoding_arguments))
            if image.negative_prompt is not None:
                negative = self.family.encode_prompt(self.pipeline, image.negative_prompt, *encoding_arguments)
                embeddings |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        return embeddings

    def panel(self, image: PlannedImage) -> Image.Image:
        return self.family.prepare_panel(self.pipeline, Image.new("RGB", image.size[::-1]))

    def encode_image(self, image: Image.Image) -> torch.Tensor:
        """Encode a prepared source image, never in tiles."""
        pixels = self.family.image_pixels(self.pipeline, image).to(self.vae.dtype)
        self.vae.disable_tiling()
        with self.mode:
            return self.vae.encode(self.mode.from_tensor(pixels)).latent_dist.mode()

    @cached_method
    def transformer_calls(self, batch_size: int, image: PlannedImage | None = None) -> list[dict]:
        """Record the arguments of the transformer's calls in a step, by default of training, without their data."""
        image = image or self.image
        calls: list[dict] = []
        num_calls = self.family.max_calls if image.negative_prompt is not None else 1

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append(dict(self.signature.bind(*args, **kwargs).arguments))
            if len(calls) == num_calls:
                raise TransformerReachedError

        sources = [
            self.family.prepare_image(self.pipeline, source, image.scale)
            for source in image.rows.images(image.row_number)
        ]
        if image.rows.is_anchored:
            sources.append(self.panel(image))
        encoded = [EncodedImage(source, torch.zeros(self.encode_image(source).shape)) for source in sources]
        arguments = {n: t.expand(batch_size, *t.shape[1:]) for n, t in self.embeddings(image).items()}
        arguments = {n: t.float() if t.is_floating_point() else t for n, t in arguments.items()}
        keys: list[tuple[int, ...]] = [(0, number) for number in range(batch_size)]
        handle = self.model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
        steps, scale = self.args.num_inference_steps, self.args.guidance_scale
        with handle, self.training_precision(), skip_equal_blocks(self.model), suppress(TransformerReachedError):
            self.policy.generate(arguments, *image.size, steps, scale, keys, sources=encoded)
        # Keep masks, whose values Qwen-Image-2.1's transformer reads
        to_fake = lambda tensor: tensor if tensor.dtype == torch.bool else self.mode.from_tensor(tensor)  # noqa: E731
        return tree_map_only(torch.Tensor, to_fake, calls)

    @cached_method
    def training_peak(self, batch_size: int, checkpoints: bool, quantization: str | None = None) -> int:
        """Measure the peak of a micro-batch's forward and backward pass."""
        getattr(self.transformer, f"{'enable' if checkpoints else 'disable'}_gradient_checkpointing")()
        return self._transformer_peak(self.transformer_calls(batch_size), quantization, is_training=True)

    @cached_method
    def step_peak(self, batch_size: int, image: PlannedImage, quantization: str | None) -> int:
        """Measure the peak of a sampling step."""
        return self._transformer_peak(self.transformer_calls(batch_size, image), quantization)

    def _transformer_peak(self, calls: list[dict], quantization: str | None, is_training: bool = False) -> int:
        with self.mode, self.training_precision(), dequantize_in_forward(self.model, quantization):
            return measure_peak(lambda: [self.model(**call)[0] for call in calls], self.model, is_training)

    @cached_method
    def decoding_peak(self, batch_size: int, image: PlannedImage, tiled: bool) -> int:
        """Measure the peak of the VAE's decoder."""
        sides = [side // self.pipeline.vae_scale_factor for side in image.size]
        frames = [1] if "z_dim" in self.vae.config else []  # the VAE of a video model
        (self.vae.enable_tiling if tiled else self.vae.disable_tiling)()
        with self.mode, self.training_precision():
            latents = torch.empty(batch_size, self.channels, *frames, *sides, dtype=self.vae.dtype)
            return measure_peak(lambda: self.vae.decode(latents, return_dict=False), self.vae)

    @cached_method
    def first_panel_peak(self, image: PlannedImage) -> int:
        """Measure the peak of the VAE's encoder for a first panel."""
        return measure_peak(lambda: self.encode_image(self.panel(image)), self.vae)

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
    def embeddings_bytes(self) -> int:
        """Count the bytes of the embeddings that a round holds."""
        return self.prompts_per_round * sum(tensor.nbytes for tensor in self.embeddings(self.image).values())

    @property
    def latents_bytes(self) -> int:
        """Count the bytes of the float32 latents that a round keeps for each image and step."""
        args, round_plan = self.args, self.args.round_plan
        # The latents before and after a step, and its mean; in DiffusionNFT and AWM an input, a target and a velocity
        # per time. With source images, the transformer's input as well
        num_latents = 3 + 2 * bool(self.rows.sources or self.rows.is_anchored)
        num_latents += self.has_old_policy and args.loss_type == "awm"  # its velocity besides the rollout's
        latent = math.prod(side // self.pipeline.vae_scale_factor for side in self.image.size) * self.channels
        images = round_plan.micro_batches_per_process * round_plan.batch_size
        return FLOAT32 * num_latents * round_plan.num_trained_steps * images * latent

    @property
    def num_averages(self) -> int:
        return (self.args.ema_decay is not None) + self.has_old_policy

    def _frozen_bytes(self, plan: MemoryPlan, *modules: nn.Module) -> int:
        return sum(self.weights_bytes(module, False, plan.quantization) for module in modules)

    def _local_judges(self, plan: MemoryPlan) -> list[JudgeNetwork]:
        return [] if plan.serves_judge else self.judges

    def _rewards_bytes(self, plan: MemoryPlan) -> int:
        judges = self._local_judges(plan)
        return self.clip_bytes + sum(self.weights_bytes(judge.network, False, judge.quantization) for judge in judges)

    def _generation_peaks(self, plan: MemoryPlan, image: PlannedImage, batch_size: int) -> list[int]:
        """Return the activations of a sampling step and of the decoder."""
        step = extrapolate(self.step_peak, batch_size, image, plan.quantization)
        if image.rows.is_anchored:  # a first panel is encoded in between
            step = max(step, self.first_panel_peak(image))
        return [step, extrapolate(self.decoding_peak, batch_size, image, plan.vae_tiling)]

    def _judge_activations(self, plan: MemoryPlan, image: PlannedImage) -> dict[str, int]:
        """Return the activations of the largest judge."""
        # It sees pairs of panels or a whole grid, and images without panels in pairs
        num_images = 2 if image.rows.image_layouts[image.row_number] == (1, 1) else 1
        num_tokens = judge_tokens(num_images * math.prod(image.size), QUESTION_TOKENS)
        peaks = [judge.peak(plan.judge_batch_size, num_tokens) for judge in self._local_judges(plan)]
        return {"activations of the judge": max(peaks, default=0)}

    def phases(self, plan: MemoryPlan) -> list[Phase]:
        args = self.args
        image = self.image
        eval_image = self.eval_image
        step, decoding = self._generation_peaks(plan, image, plan.batch_size * args.round_plan.num_merged_batches)
        evaluating = max(self._generation_peaks(plan, eval_image, args.per_device_eval_batch_size))
        training = extrapolate(self.training_peak, plan.batch_size, plan.gradient_checkpointing, plan.quantization)
        judging, eval_judging = (self._judge_activations(plan, seen) for seen in (image, eval_image))

        always, per_batch = self._persistent(plan)
        # Between rounds the text encoders replace the frozen weights on the device, except with DeepSpeed and FSDP
        encoding = {"round": 0, "text encoders": self._frozen_bytes(plan, *self.text_encoders)}
        encoding |= {} if plan.is_divided else {"frozen weights": 0}
        rollout = self._generating(plan, always, self.has_old_policy)
        evaluation = self._generating(plan, always, args.ema_decay is not None)
        # Rewards run while the next images are generated, and offloaded ones after the last
        if plan.offload_rewards:
            visit = always | {"rewards": self._rewards_bytes(plan)}
            eval_visit = visit | {"replaced weights": evaluation["replaced weights"]} | eval_judging
            scoring = visit | judging
            evaluation = largest_turn(evaluation | {"activations": evaluating}, eval_visit)
        else:
            scoring = rollout | {"activations": max(step, decoding)} | judging
            evaluation |= {"activations": evaluating} | eval_judging
        device = {
            "load": {},
            "encode": always | encoding,
            "generate": rollout | {"activations": step},
            "decode": rollout | {"activations": decoding},
            "score": scoring,
            "train": always | per_batch | {"activations": training},
        }
        if self.evaluates:
            device["evaluate"] = evaluation
        loading = self._host_memory(plan, is_loading=True)
        running = self._host_memory(plan)
        return [
            Phase(name, uses, *(loading if name in ("load", "encode") else running)) for name, uses in device.items()
        ]

    def _persistent(self, plan: MemoryPlan) -> tuple[dict[str, int], dict[str, int]]:
        """Return what is always on the device, and what a micro-batch adds besides activations."""
        frozen_bytes = self._frozen_bytes(plan, self.model)
        always, per_batch = training_memory(
            frozen_bytes, self.num_trained, self.element_size, plan, self.num_averages, self.args.optim
        )
        always |= {
            "reference": self.reference_bytes // plan.num_shards(3),
            "rewards": 0 if plan.offload_rewards else self._rewards_bytes(plan),
            "round": self.latents_bytes + (0 if plan.offload_embeddings else self.embeddings_bytes),
        }
        return always, per_batch

    def _generating(self, plan: MemoryPlan, always: dict[str, int], uses_average: bool) -> dict[str, int]:
        """Return the device while images are generated, besides activations."""
        trained_bytes = self.element_size * self.num_trained
        num_shards = plan.num_shards(3)
        gathers = num_shards > 1 and self.args.ds3_gather_for_generation
        return always | {
            "gathered weights": gathers * (self._frozen_bytes(plan, self.model) + trained_bytes),
            "VAE": self.weights_bytes(self.vae),
            # `use_weights` keeps the trained weights, in the dtype of the forward pass
            "replaced weights": uses_average * trained_bytes // num_shards,
        }

    def _host_memory(self, plan: MemoryPlan, is_loading: bool = False) -> tuple[dict[str, int], dict[str, int]]:
        """Return the process's own host memory, and what is mapped from files."""
        averages_bytes = self.num_averages * FLOAT32 * self.num_trained // plan.num_shards(3)
        allocated = {
            "libraries": LIBRARIES,
            "average": averages_bytes if plan.ema_offload else 0,
            "round": self.embeddings_bytes if plan.offload_embeddings else 0,
        }
        if self.args.embeddings_dir is None:
            count = min(len(self.rows.image_prompts), ROUNDS_AHEAD * self.prompts_per_round)
            allocated["embeddings"] = count * sum(tensor.nbytes for tensor in self.embeddings(self.image).values())
        mapped = {"VAE": self.weights_bytes(self.vae)}
        if plan.offload_rewards:
            judges = [judge for judge in self._local_judges(plan) if judge.quantization is None]
            mapped["rewards"] = self.clip_bytes + sum(self.weights_bytes(judge.network) for judge in judges)
            allocated["rewards"] = self._rewards_bytes(plan) - mapped["rewards"]
        weights = {"text encoders": self._frozen_bytes(plan, *self.text_encoders)}
        if is_loading:
            allocated["trained weights"] = self.weights_bytes(self.model, True)
            weights["frozen weights"] = self._frozen_bytes(plan, self.model)
        return plan.host_memory(allocated, mapped, weights)

    def commands(self, plan: MemoryPlan) -> list[Phase]:
        is_adapter = isinstance(self.model, PeftModel)
        encoding = {"text encoders": self._frozen_bytes(plan, *self.text_encoders)}
        frozen = {"frozen weights": self._frozen_bytes(plan, self.model)}
        trained = {"trained weights": self.num_trained * (FLOAT32 if is_adapter else self.vae.dtype.itemsize)}
        vae = {"VAE": self.weights_bytes(self.vae)}
        generation = frozen | trained | vae | {"activations": max(self._generation_peaks(plan, self.eval_image, 1))}
        if not is_adapter and not plan.is_divided:  # as in training, they stay on the device together
            generation |= encoding
        judging = self._judge_activations(plan, self.eval_image)
        judges = [weights_bytes(judge.network) for judge in self._local_judges(plan)]
        generating = largest_turn(encoding, generation)
        device = {
            "evaluate prompts": largest_turn(generating, {"rewards": self._rewards_bytes(plan)} | judging),
            "evaluate images": generating,
            "build grids": generating,
            "space": largest_turn(generating, {"rewards": max(judges, default=0)} | judging),
        }
        host = plan.host_memory({"libraries": LIBRARIES} | trained, vae, encoding | frozen)
        return [Phase(name, uses, *host) for name, uses in device.items()]
