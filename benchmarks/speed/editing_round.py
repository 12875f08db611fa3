# SPDX-License-Identifier: Apache-2.0
"""
What a round of editing with its two optimizer steps costs: encoding once, and reading sources at training size.

    export PYTHONPATH=tests
    OMP_NUM_THREADS=1 python benchmarks/speed/editing_round.py                               # both models, reduced
    python benchmarks/speed/editing_round.py --real --device cuda --dtype bfloat16 --model kontext --generations 16

Real rounds of `PaCoGRPOTrainer` with the paper's settings for FLUX.1-Kontext and Qwen-Image-Edit, random weights, and
three recipes that take turns in one run:

- as shipped: prompts and source images are encoded once, sources are read at training size;
- encoded again: prompts and sources are encoded for each micro-batch, as a plain call of the pipeline does. The encoders
  stay on the accelerator. Images and trained weights must be the same, which is checked;
- pipeline's own size: as shipped, but sources are read at about 1024 x 1024 pixels, as a plain call does.

Every round begins with the same weights and encodes its own prompts and sources, as the only round of a run would.
Medians and ratios of rounds of the same repeat are saved, with the arithmetic of the same round at the size of the real
models, whose parts are built without memory.
"""

import argparse
import functools
import hashlib
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import datasets
import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageTransformer2DModel,
)
from peft import LoraConfig
from PIL import Image
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    TrainerCallback,
)

from grpo_step import Stopwatch, machine, peak_memory, reset_peak_memory
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.planning.known_models import known_configs
from paco_trl.rewards import redness_reward
from paco_trl.rollout.encoder import EncodedRows, PromptEmbeddings, PromptEncoder
from paco_trl.tiny.flux import build_vae
from paco_trl.tiny.qwen2_5_vl import vision_token_ids
from paco_trl.trainer.round_schedule import TrainingRound
from tiny_models import build_tiny_flux_kontext, build_tiny_qwen_image_edit


SHIPPED, AGAIN, OWN_SIZE = "as shipped", "encoded again", "pipeline's own size"
TURNS = (SHIPPED, AGAIN, OWN_SIZE, AGAIN, SHIPPED)  # of a repeat: a drift of the machine meets all alike

PROMPTS, SOURCES, DRAWING, TRAINING = "encoding prompts", "encoding source images", "drawing", "training"

SCALE = 0.375  # 384 pixels for 1024 (paper)
STEPS_OF_A_ROUND = 2
GROUP = 16  # images of a prompt (paper), for the arithmetic at real size
LAYERS, HEAD = 1, 128
DROPPED_TOKENS = 64  # of Qwen-Image-Edit's template, which the pipeline cuts from what the text encoder gives
VISION_PATCH = 14  # pixels per side; 2 x 2 of them are a token

# Weights of the real models, whose parts are built and counted
WEIGHTS = {
    "kontext": {
        "transformer": 11_901_408_320,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "vae": 83_819_683,
    },
    "qwen-image-edit": {
        "transformer": 20_430_401_088,
        "text_encoder": 8_292_166_656,
        "vae": 126_892_531,
    },
}

# The paper's settings
SETTINGS = {
    "kontext": {"num_inference_steps": 8, "sde_steps": [1], "noise_level": 0.9, "guidance_scale": 2.5},
    "qwen-image-edit": {
        "num_inference_steps": 10,
        "sde_steps": [1, 2, 3, 4],
        "noise_level": 1.0,
        "guidance_scale": 4.0,
        "negative_prompt": " ",
    },
}


# ---- Models ----


def real_parts(model: str, tiny: DiffusionPipeline, layers: int | None = None, width: int | None = None) -> dict:
    """Parts of a published model, by its packaged configs, with random weights; the tokenizers stay the tiny pipeline's."""
    configs, parts = known_configs()[model], {}
    for name, entry in configs["model_index.json"].items():
        if f"{name}/config.json" not in configs:
            continue
        part_class, config = getattr(import_module(entry[0]), entry[1]), configs[f"{name}/config.json"]
        if name == "transformer":
            if layers is not None:
                config |= {"num_layers": layers}
                if "Flux" in entry[1]:
                    config["num_single_layers"] = 2 * layers
            if width is not None:
                config["num_attention_heads"] = width // HEAD
        if "vision_config" in config:
            config |= vision_token_ids(tiny.tokenizer)
        is_diffusers = entry[0] == "diffusers"
        parts[name] = part_class.from_config(config) if is_diffusers else part_class(part_class.config_class(**config))
    return parts


def kontext_parts(tiny: FluxKontextPipeline, layers: int | None, width: int | None) -> dict:
    """
    Parts that take the place of the tiny FLUX.1-Kontext's.

    The T5 has about the fraction of a forward's arithmetic that T5-XXL has (0.2), and the VAE the factor of 8.
    """
    t5 = {
        "vocab_size": len(tiny.tokenizer_2),
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 1024,
        "num_heads": 4,
        "num_layers": 1,
    }
    vae = build_vae(scaling_factor=0.3611, shift_factor=0.1159, num_halvings=3)
    return {
        "text_encoder": CLIPTextModel(tiny.text_encoder.config),
        "text_encoder_2": T5EncoderModel(T5Config(**t5, feed_forward_proj="gated-gelu")),
        "vae": AutoencoderKL(**{**vae.config, "block_out_channels": (4,) * 4}),
        "transformer": FluxTransformer2DModel(
            in_channels=16,
            joint_attention_dim=256,
            pooled_projection_dim=16,
            num_layers=layers or LAYERS,
            num_single_layers=2 * (layers or LAYERS),
            num_attention_heads=(width or HEAD) // HEAD,
            attention_head_dim=HEAD,
            guidance_embeds=True,
        ),
    }


def qwen_image_edit_parts(tiny: QwenImageEditPipeline, layers: int | None, width: int | None) -> dict:
    """
    Parts that take the place of the tiny Qwen-Image-Edit's, whose VAE has the real factor of 8.

    The text encoder has about the fraction of a forward's arithmetic that Qwen2.5-VL-7B has (0.26).
    """
    config = tiny.text_encoder.config.to_dict()
    config["text_config"] |= {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 1,
        "layer_types": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
    }
    config["vision_config"] |= {"out_hidden_size": 256, "initializer_range": 0.02}
    return {
        "text_encoder": Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)),
        "vae": AutoencoderKLQwenImage(**{**tiny.vae.config, "base_dim": 2}),
        "transformer": QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            joint_attention_dim=256,
            num_layers=layers or LAYERS,
            num_attention_heads=(width or HEAD) // HEAD,
            attention_head_dim=HEAD,
        ),
    }


@dataclass
class Model:
    """A published model, where its tiny one comes from, and the parts that replace it."""

    name: str
    pipeline_class: type[DiffusionPipeline]
    build_tiny: Callable
    small_parts: Callable

    def parts(self, tiny: DiffusionPipeline, layers: int | None, width: int | None, is_real: bool) -> dict:
        if is_real:
            return real_parts(self.name, tiny, layers, width)
        return self.small_parts(tiny, layers, width)


MODELS = {
    "kontext": Model(
        "black-forest-labs/FLUX.1-Kontext-dev", FluxKontextPipeline, build_tiny_flux_kontext, kontext_parts
    ),
    "qwen-image-edit": Model(
        "Qwen/Qwen-Image-Edit", QwenImageEditPipeline, build_tiny_qwen_image_edit, qwen_image_edit_parts
    ),
}


def build_pipeline(args: argparse.Namespace, name: str, tiny):
    """The pipeline with random weights, its encoders and its VAE on the CPU, as one that was loaded."""
    torch.manual_seed(0)
    torch.set_default_dtype(args.torch_dtype)
    with torch.device(args.device):
        parts = MODELS[name].parts(tiny, args.layers, args.width, args.real)
    torch.set_default_dtype(torch.float32)
    pipeline = MODELS[name].pipeline_class(**{**tiny.components, **parts})  # sets what depends on the VAE's factor
    for part in parts.keys() - {"transformer"}:
        getattr(pipeline, part).to("cpu")
    if name == "kontext":
        pipeline.tokenizer_2.model_max_length = 512  # T5 reads that many, of which most are padding
        if args.real:
            pipeline.tokenizer.model_max_length = 77
    else:
        # Of Qwen2.5-VL-7B: images of the sizes here are not downscaled
        pipeline.processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    return pipeline


# ---- Arithmetic ----


def forward_flops(transformer, tokens: int) -> float:
    """
    Floating-point operations of one image's forward, as in `grpo_step.py`: 12 d^2 multiply-adds a token in each block of
    either model, and the attention.
    """
    config = transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    blocks = config.num_layers + config.get("num_single_layers", 0)
    return blocks * (24 * width**2 * tokens + 4 * tokens**2 * width)


def counted_flops(function, *shapes, **inputs) -> float:
    """Operations of a module on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*(torch.empty(shape, device="meta") for shape in shapes), **inputs)
    return counter.get_total_flops()


@dataclass
class RealSize:
    """The parts of the real model, without memory, and what they compute."""

    name: str
    parts: dict[str, nn.Module]

    @classmethod
    def build(cls, name: str, tiny) -> "RealSize":
        with torch.device("meta"):
            parts = MODELS[name].parts(tiny, None, None, True)
        counted = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
        if counted != WEIGHTS[name]:
            raise SystemExit(f"The parts of {name} have {counted} weights, but the real ones have {WEIGHTS[name]}.")
        return cls(name, parts)

    def forward(self, tokens: int) -> float:
        return forward_flops(self.parts["transformer"], tokens)

    def text_encode(self, text_tokens: int, source: int) -> float:
        """Of one prompt; `source` is the side of the image that the text encoder sees."""
        if self.name == "kontext":
            return counted_flops(self.parts["text_encoder_2"], input_ids=torch.empty(1, 512, dtype=int, device="meta"))
        encoder, tokens = self.parts["text_encoder"], text_tokens + DROPPED_TOKENS
        language = counted_flops(
            encoder.model.language_model,
            inputs_embeds=torch.empty(1, tokens, 3584, device="meta"),
            position_ids=torch.zeros(3, 1, tokens, dtype=int, device="meta"),
            use_cache=False,
        )
        patches = (round(source / VISION_PATCH / 2) * 2) ** 2
        # The vision tower cannot be run without memory: without its attention, which is in windows
        blocks = sum(p.numel() for p in encoder.model.visual.blocks.parameters())
        return language + 2 * encoder.lm_head.weight.numel() * tokens + 2 * blocks * patches

    def vae_encode(self, side: int) -> float:
        frame = (side, side) if self.name == "kontext" else (1, side, side)
        return counted_flops(self.parts["vae"].encode, (1, 3, *frame))

    def vae_decode(self, side: int) -> float:
        frame = (side // 8, side // 8) if self.name == "kontext" else (1, side // 8, side // 8)
        return counted_flops(self.parts["vae"].decode, (1, 16, *frame))


def real_arithmetic(real: RealSize, done: "Round", num_images: int, sides: tuple[int, int]) -> dict[str, float]:
    """
    TFLOP for each image of the same round at the size of the real model, with groups of 16 images.

    A trained forward is computed again in the backward, and the backward is counted as one more: the weights that it
    passes are frozen.
    """
    drawn_side, source_side = sides
    text_tokens = max(text for _, text in done.tokens)  # the negative prompt is shorter, which is neglected
    # Kontext's T5 reads 512 tokens whatever the tokenizer; Qwen's text is that of the tiny tokenizer, somewhat longer
    each = {tokens: real.forward(sum(tokens)) for tokens in done.tokens}
    forwards = {
        phase: sum(each[tokens] * count for tokens, count in done.forwards[phase].items()) / num_images
        for phase in (DRAWING, TRAINING)
    }
    prompts = 1 if real.name == "kontext" else 2  # with the negative one
    share = 1 if done.recipe == AGAIN else 1 / GROUP
    found = {
        PROMPTS: share * prompts * real.text_encode(text_tokens, source_side),
        SOURCES: share * real.vae_encode(source_side),
        DRAWING: forwards[DRAWING] + real.vae_decode(drawn_side),
        TRAINING: 3 * forwards[TRAINING],
    }
    return {name: round(flops / 1e12, 3) for name, flops in found.items()} | {
        "all": round(sum(found.values()) / 1e12, 2)
    }


# ---- Rounds ----


@dataclass
class Round:
    """What was measured in a round."""

    recipe: str
    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    # By phase: how often (image tokens, text tokens) were in a forward of an image
    forwards: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    whole: float = 0.0
    memory_peak: float | None = None
    images: str = ""
    trained: str = ""

    @property
    def tokens(self) -> set[tuple[int, int]]:
        return {tokens for counts in self.forwards.values() for tokens in counts}


class MeasuredEncoder(PromptEncoder):
    """The trainer's encoder, timed. Its modules move to the accelerator and back, or are there already."""

    def __init__(self, trainer: "EditingTrainer", is_resident: bool = False):
        super().__init__(trainer.pipeline, trainer.family, trainer.accelerator)
        self.watch, self.is_resident = trainer.watch, is_resident

    def _encode_prompts(self, rows, new) -> None:
        with self.watch.section(PROMPTS):
            super()._encode_prompts(rows, new)

    def _encode_images(self, rows, new) -> None:
        with self.watch.section(SOURCES):
            super()._encode_images(rows, new)

    def _text_encoders_placed(self):
        return nullcontext() if self.is_resident else super()._text_encoders_placed()


class NothingEncoded(MeasuredEncoder):
    """Encode nothing before the round: the inputs of a micro-batch are set when it is generated."""

    def encode(self, of_round, numbers, scale=1.0, ahead=()) -> EncodedRows:
        rows = of_round.rows

        def prepare(number: int) -> list[Image.Image]:
            return [self.family.prepare_image(self.pipeline, image, scale) for image in rows.images(number)]

        embeddings = {number: PromptEmbeddings({}) for number in numbers}  # a row has one call
        return EncodedRows(embeddings, functools.cache(prepare))


class EditingTrainer(PaCoGRPOTrainer):
    """The trainer, whose rounds take turns between the recipes and are the same otherwise."""

    _num_rounds = 0  # nothing is encoded before the first round, or ahead of another

    def __init__(self, watch: Stopwatch, plan: list[str], **kwargs):
        self.watch, self.plan, self.rounds = watch, plan, []
        self._current: Round | None = None
        self._weights: list[torch.Tensor] | None = None
        super().__init__(**kwargs)
        self._own_inputs, self.policy.inputs = self.policy.inputs, self._inputs
        self.train_rows.images = functools.cache(self.train_rows.images)  # reading files is not in question
        transformer = self.accelerator.unwrap_model(self.model).get_base_model()
        transformer.register_forward_pre_hook(self._count_forward, with_kwargs=True)
        self._count("text encoder forwards", getattr(self.pipeline, self.family.text_encoders[-1]))
        self._count("VAE encodes", self.pipeline.vae.encoder)
        self.add_callback(_RoundCallback(self))

    def _count(self, name: str, module: nn.Module) -> None:
        def count(*_) -> None:
            self._current.counts[name] += 1

        module.register_forward_pre_hook(count)

    def _count_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        batch_size, image_tokens, _ = kwargs["hidden_states"].shape
        phase = TRAINING if torch.is_grad_enabled() else DRAWING
        self._current.forwards[phase][image_tokens, kwargs["encoder_hidden_states"].shape[1]] += batch_size

    def _trained_weights(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.model.parameters() if parameter.requires_grad]

    def _generate_and_score_completions(self, index: int) -> TrainingRound:
        self._current = Round(self.plan[index])
        is_again = self._current.recipe == AGAIN
        # The same weights at the beginning of each round
        if self._weights is None:
            self._weights = [weights.clone() for weights in self._trained_weights()]
        for weights, saved in zip(self._trained_weights(), self._weights, strict=True):
            weights.copy_(saved)
        self.optimizer.state.clear()
        # As the only round of a run: nothing is encoded yet
        self.policy.encoder = NothingEncoded(self) if is_again else MeasuredEncoder(self)
        for name in (*self.family.text_encoders, "vae"):
            getattr(self.pipeline, name).to(self.accelerator.device if is_again else "cpu")
        # The size of the images is that of the rows, which have been measured
        self.args.resolution_scale = 1.0 if self._current.recipe == OWN_SIZE else SCALE
        reset_peak_memory(self.watch.device)
        self.watch.begin()
        with self.watch.section("scoring, bookkeeping"):
            # With the same number, that is with the same noise, in the same order
            round = super()._generate_and_score_completions(0)
        round.index = index
        return round

    @contextmanager
    def _generating(self, round: TrainingRound):
        self._generated = round
        with self.watch.section(DRAWING), super()._generating(round) as recording:
            yield recording

    def _roll_out(self, round: TrainingRound, batches: list):
        scores, timings = super()._roll_out(round, batches)
        with self.watch.section("digests"):
            latents = [step.prev_sample for batch in batches for step in batch.steps]
            pixels = [torch.from_numpy(np.array(completion.image)) for completion in round.completions]
            self._current.images = digest([*pixels, *latents])
        return scores, timings

    def _inputs(self, encoded: EncodedRows, numbers: list[int]):
        if self._current.recipe == AGAIN:
            number = numbers[0]  # the images of a micro-batch are of one prompt
            encoder = MeasuredEncoder(self, is_resident=True)
            # Outside the autocast of generation, as everything that is encoded before it
            with torch.autocast(self.accelerator.device.type, enabled=False):
                encoder.prefetch(self.train_rows, [number], SCALE)
            fresh = encoder.encode(self._generated, [number], SCALE).embeddings[number]
            first = encoded.embeddings[number]
            first.prompt, first.negative_prompt = fresh.prompt, fresh.negative_prompt
            first.image_latents = fresh.image_latents
        return self._own_inputs(encoded, numbers)

    def training_step(self, *args, **kwargs):
        with self.watch.section(TRAINING):
            return super().training_step(*args, **kwargs)

    def end_round(self) -> None:
        done = self._current
        self.watch.end()
        done.seconds = dict(self.watch.seconds)
        done.seconds.pop("digests")
        done.whole = sum(done.seconds.values())
        if self.watch.device == "cuda":
            done.memory_peak = peak_memory("cuda")
        done.trained = digest(self._trained_weights())
        self.rounds.append(done)
        print(f"{done.recipe}: {done.whole:.2f} s", {name: round(value, 2) for name, value in done.seconds.items()})


class _RoundCallback(TrainerCallback):
    def __init__(self, trainer: EditingTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.watch.enter(TRAINING)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.watch.leave()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer.end_round()  # the dataset is as long as a round


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def dataset_of(num_prompts: int, side: int) -> datasets.Dataset:
    """Make instructions with source images: soft colors and a square."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(num_prompts):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image = coarse.resize((side, side), Image.Resampling.BICUBIC)
        image.paste((200, 40, 40), (side // 4, side // 4, side // 2, side // 2))
        images.append(image)
    prompts = [f"Make square number {number} blue and keep everything else." for number in range(num_prompts)]
    return datasets.Dataset.from_dict({"prompt": prompts, "image": images}).cast_column("image", datasets.Image())


def measure(args: argparse.Namespace, name: str) -> dict:
    """Rounds of one model, and what they cost."""
    plan = [SHIPPED, *TURNS * args.repeats]  # the first one warms up
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    tiny = MODELS[name].pipeline_class.from_pretrained(MODELS[name].build_tiny(folder / "tiny"))
    real = RealSize.build(name, tiny)
    config = PaCoGRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=args.device == "cpu",
        bf16=args.torch_dtype == torch.bfloat16,
        # The untrained replay is compared with the rollout; in bf16 the difference is not known before
        ratio_tolerance=None if args.torch_dtype == torch.float32 else float("inf"),
        height=args.size,
        width=args.size,
        resolution_scale=SCALE,
        num_generations=args.generations,
        num_prompts_per_generation=args.prompts,
        optimizer_steps_per_generation=STEPS_OF_A_ROUND,
        max_steps=len(plan) * STEPS_OF_A_ROUND,
        shuffle_dataset=False,
        log_completions=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **SETTINGS[name],
    )
    rank = 64 if args.real else 16
    trainer = EditingTrainer(
        Stopwatch(args.device),
        plan,
        model=build_pipeline(args, name, tiny),
        reward_funcs=redness_reward,
        args=config,
        train_dataset=dataset_of(args.prompts, args.size),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights="gaussian"),
    )
    trainer.train()
    rounds = trainer.rounds[1:]
    check_same_numbers(rounds, args.device)
    (drawn_side, _), num_images = trainer.train_rows.training_sizes[0], trainer.schedule.plan.num_images
    shipped_side, own_side = (
        trainer.family.prepare_image(trainer.pipeline, trainer.train_rows.images(0)[0], scale).height
        for scale in (SCALE, 1.0)
    )
    transformer = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    drawn_tokens = (drawn_side // trainer.size_multiple) ** 2
    recipes = {}
    for recipe in (SHIPPED, AGAIN, OWN_SIZE):
        of_kind = [done for done in rounds if done.recipe == recipe]
        done, sides = of_kind[0], (drawn_side, own_side if recipe == OWN_SIZE else shipped_side)
        whole = [each.whole for each in of_kind]
        image_tokens = max(image for image, _ in done.tokens)
        # A forward with gradient is computed again in the backward
        forwards = {phase: sum(counts.values()) / num_images for phase, counts in done.forwards.items()}
        recipes[recipe] = {
            "forwards per image": {**forwards, "all": sum(forwards.values())},
            **{
                f"{what} per image": done.counts[what] / num_images
                for what in ("text encoder forwards", "VAE encodes")
            },
            "tokens of a forward": {
                "drawn": drawn_tokens,
                "source": image_tokens - drawn_tokens,
                "text, by prompt": sorted({text for _, text in done.tokens}),
            },
            "seconds of a round": round(statistics.median(whole), 3),
            "slowest / fastest round": round(max(whole) / min(whole), 3),
            "seconds by phase": {
                phase: round(statistics.median(each.seconds.get(phase, 0.0) for each in of_kind), 3)
                for phase in sorted({phase for each in of_kind for phase in each.seconds})
            },
            "TFLOP of a round's forwards": round(
                sum(
                    forward_flops(transformer, sum(tokens)) * count
                    for counts in done.forwards.values()
                    for tokens, count in counts.items()
                )
                / 1e12,
                4,
            ),
            "TFLOP per image at the real size": real_arithmetic(real, done, num_images, sides),
        }
        if args.device == "cuda":
            peak = statistics.median(each.memory_peak for each in of_kind)
            recipes[recipe]["peak memory, MiB allocated"] = round(peak, 1)
    return {
        "images in a round": num_images,
        "transformer weights": sum(p.numel() for n, p in trainer.model.named_parameters() if "lora_" not in n),
        "pixels per side": {
            "drawn": drawn_side,
            "source as shipped": shipped_side,
            "source, pipeline's own": own_side,
        },
        "images and trained weights of the first two recipes": "equal, bit for bit",
        "recipes": recipes,
        "ratios": ratios_of(rounds, recipes),
    }


def check_same_numbers(rounds: list[Round], device: str) -> None:
    """Encoding again changes no number, and the size of the sources does: else a comparison would be of nothing."""
    images = {recipe: {done.images for done in rounds if done.recipe == recipe} for recipe in set(TURNS)}
    if len(images[SHIPPED]) != 1 or images[AGAIN] != images[SHIPPED]:
        raise SystemExit("Images of rounds that encode again are not those of rounds that encode once.")
    if images[OWN_SIZE] & images[SHIPPED]:
        raise SystemExit("Images do not depend on the size of their sources.")
    trained = {done.trained for done in rounds if done.recipe != OWN_SIZE}
    # Some backward kernels of accelerators add in another order each time
    if device == "cpu" and len(trained) != 1:
        raise SystemExit("Weights that rounds have trained differ between encoding again and encoding once.")


def ratios_of(rounds: list[Round], recipes: dict[str, dict]) -> dict[str, float]:
    """Medians of the ratios within a repeat: with the mean of the shipped rounds around it."""
    by_recipe = defaultdict(list)
    for start in range(0, len(rounds), len(TURNS)):
        turns = rounds[start : start + len(TURNS)]
        base = statistics.mean(done.whole for done in turns if done.recipe == SHIPPED)
        for done in turns:
            by_recipe[done.recipe].append(done.whole / base)

    def arithmetic(recipe: str) -> float:
        return recipes[recipe]["TFLOP per image at the real size"]["all"]

    def encoding(recipe: str) -> float:
        return sum(recipes[recipe]["seconds by phase"][phase] for phase in (PROMPTS, SOURCES))

    def tokens(recipe: str) -> int:
        found = recipes[recipe]["tokens of a forward"]
        return found["drawn"] + found["source"] + max(found["text, by prompt"])

    return {
        "time, encoded again / as shipped": round(statistics.median(by_recipe[AGAIN]), 3),
        "time of encoding, encoded again / as shipped": round(encoding(AGAIN) / encoding(SHIPPED), 2),
        "time, pipeline's own size / as shipped": round(statistics.median(by_recipe[OWN_SIZE]), 2),
        "tokens, pipeline's own size / as shipped": round(tokens(OWN_SIZE) / tokens(SHIPPED), 2),
        "arithmetic of the forwards, pipeline's own size / as shipped": round(
            recipes[OWN_SIZE]["TFLOP of a round's forwards"] / recipes[SHIPPED]["TFLOP of a round's forwards"], 2
        ),
        "arithmetic at the real size, encoded again / as shipped": round(arithmetic(AGAIN) / arithmetic(SHIPPED), 3),
        "arithmetic at the real size, pipeline's own size / as shipped": round(
            arithmetic(OWN_SIZE) / arithmetic(SHIPPED), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), nargs="+", default=list(MODELS))
    parser.add_argument("--real", action="store_true", help="models of the real size, with random weights")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=int, help="double-stream blocks; FLUX has twice as many single-stream ones")
    parser.add_argument("--width", type=int, help=f"channels of the transformer, a multiple of {HEAD}")
    parser.add_argument("--size", type=int, default=1024, help=f"pixels per side; {SCALE} of them are generated")
    parser.add_argument("--generations", type=int, default=2, help="images of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a round")
    parser.add_argument(
        "--repeats", type=int, default=2, help=f"of {len(TURNS)} rounds, not counting the first, which warms up"
    )
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/speed/editing_round.json")
    args = parser.parse_args()
    if args.width is not None and (args.width < HEAD or args.width % HEAD):
        parser.error(f"--width is {args.width}, but heads have {HEAD} channels: give a multiple of it.")
    setting = {name: value for name, value in vars(args).items() if name not in ("folder", "output")}
    report = {"setting": setting, "machine": machine(args)}
    args.torch_dtype = getattr(torch, args.dtype)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    found = {}
    for name in args.model:
        found[name] = measure(args, name)
        # After each model: what a run that breaks off has measured is not lost
        ratios = {
            what: {model: of[what] for model, of in ((m, f["ratios"]) for m, f in found.items())}
            for what in found[name]["ratios"]
        }
        text = json.dumps(report | {"ratios": ratios, "models": found}, indent=2)
        Path(args.output).write_text(text + "\n", encoding="utf-8")
        print(json.dumps(found[name]["ratios"], indent=2), flush=True)


if __name__ == "__main__":
    main()
