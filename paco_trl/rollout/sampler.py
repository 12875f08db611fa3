# SPDX-License-Identifier: Apache-2.0
"""
Generate images of a dataset's rows with a policy.

What some rounds need is encoded ahead of them, each distinct prompt and source image once; text encoders and transformer
take turns on the accelerator.
"""

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object, send_to_device
from accelerate.utils.memory import clear_device_cache
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from tqdm.auto import tqdm

from ..utils.files import digest, write_atomically
from ..utils.fingerprint import component_fingerprint, describe, versions
from ..utils.images import to_device
from ..utils.pipelines import truncations_counted
from . import Family
from .policy import EncodedImage, PipelinePolicy, RecordedStep, share_tensors
from .prompt_rows import Completions, PromptKey, PromptRows


logger = get_logger(__name__)

# Rows that are encoded at a time where there are no rounds: 1 GiB for FLUX.1
ROWS_AHEAD = 256

# What is encoded: a prompt, or a source image as digest and scale
Condition = PromptKey | tuple[str, float]


@dataclass
class PromptEmbeddings:
    """Embeddings of a row's prompts and latents of its source images, batch dimension 1; rows share the tensors."""

    prompt: dict[str, torch.Tensor]
    negative_prompt: dict[str, torch.Tensor] = field(default_factory=dict)
    image_latents: list[torch.Tensor] = field(default_factory=list)

    def place(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Move the embeddings to a device for all rows that share them, as float32, and return them as arguments."""
        for arguments in (self.prompt, self.negative_prompt):
            for name, tensor in arguments.items():
                arguments[name] = to_device(tensor, device).to(torch.float32 if tensor.is_floating_point() else None)
        self.image_latents[:] = [to_device(latents, device) for latents in self.image_latents]
        return self.prompt | {f"negative_{name}": tensor for name, tensor in self.negative_prompt.items()}


class PromptEncoder:
    """Encodes prompts and source images for this process, and keeps what is needed; with `folder` also in files there."""

    # A FLUX.1-dev prompt takes 4 MB in bf16. Prompts are encoded one at a time: none depends on its neighbors

    def __init__(
        self,
        pipeline,
        family: Family,
        accelerator: Accelerator,
        folder: str | Path | None = None,
    ):
        self.pipeline = pipeline
        self.family = family
        self.accelerator = accelerator
        self._folder: Any = None if folder is None else Path(folder).expanduser() / _models_digest(pipeline, family)
        self._is_hidden = not accelerator.is_main_process  # of progress bars
        self._encoded: dict[Condition, dict[str, torch.Tensor]] = {}
        self._told: set[str] = set()  # kinds of truncation
        self._needed: WeakKeyDictionary[PromptRows, set[Condition]] = WeakKeyDictionary()
        # Layers of the transformer, which leave the accelerator to text encoders; DeepSpeed places its weights itself
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self._frozen = [] if is_deepspeed else _frozen_layers(pipeline.transformer)
        self._frozen_memory = _cpu_memory(self._frozen)

    @torch.no_grad()
    def encode(self, rows: PromptRows, numbers: Iterable[int], scale: float = 1.0, ahead: Iterable[int] = ()) -> None:
        """
        Encode some rows if they are not, and at the same time those `ahead`.

        Of these rows' embeddings the others are dropped then: memory does not grow with the dataset.
        """
        needed = self._places(rows, numbers, scale)
        if needed.keys() <= self._encoded.keys():
            return
        needed |= self._places(rows, ahead, scale)
        self._needed[rows] = set(needed)
        kept = set().union(*self._needed.values())
        self._encoded = {key: tensors for key, tensors in self._encoded.items() if key in kept}
        new = {key: place for key, place in needed.items() if key not in self._encoded and not self._read(key)}
        images = {key: place for key, place in new.items() if not isinstance(key, PromptKey)}
        prompts = {key: number for key, (number, _) in new.items() if isinstance(key, PromptKey)}
        with torch.autocast(self.accelerator.device.type, enabled=False):  # as the pipeline does
            if images:  # before prompts: damaged files are found
                self._encode_images(rows, images)
            if prompts:
                self._encode_prompts(rows, prompts)

    def fetch(self, rows: PromptRows, numbers: Iterable[int], scale: float = 1.0) -> "EncodedRows":
        """Return some encoded rows with their embeddings, which are on the CPU."""
        keys = {call: self._keys(rows, call, scale) for number in numbers for call in rows.calls_of[number]}
        needed: Iterable[Any] = (each for texts, sources in keys.values() for each in (*texts, *sources))
        encoded: Any = {key: dict(self._encoded[key]) for key in dict.fromkeys(needed)}
        embeddings = {}
        for call, (texts, sources) in keys.items():
            prompt, *negative = [encoded[key] for key in texts]
            latents = [encoded[key]["latents"] for key in sources]
            embeddings[call] = PromptEmbeddings(prompt, negative[0] if negative else {}, latents)
        read = functools.lru_cache(8)(rows.row)  # decodes source images, which may be large
        prepared = functools.cache(
            lambda row: [self.family.prepare_image(self.pipeline, image, scale) for image in rows.images_in(read(row))]
        )
        return EncodedRows(embeddings, read, lambda call: prepared(rows.calls[call].row) if rows.sources else [])

    def _keys(self, rows: PromptRows, call: int, scale: float) -> tuple[list[PromptKey], list[tuple[str, float]]]:
        """Return what the text encoders see, with true guidance of the negative prompt too, and the source images."""
        row, prompt = rows.calls[call]
        digests = () if rows.sources is None else rows.sources.digests(row)
        seen = (digests, scale) if self.family.prompt_sees_images and rows.sources is not None else ()
        prompts = [each for each in (prompt, rows.negative_prompts[row]) if each is not None]
        return [PromptKey(each, *seen) for each in prompts], [(each, scale) for each in digests]

    def _places(self, rows: PromptRows, numbers: Iterable[int], scale: float) -> dict[Condition, tuple[int, int]]:
        """Return what some rows need, each with a row that has it, and the place of a source image in the row."""
        places: dict[Condition, tuple[int, int]] = {}
        for number in numbers:
            for call in rows.calls_of[number]:
                texts, sources = self._keys(rows, call, scale)
                for key in texts:
                    places.setdefault(key, (number, 0))
                for place, image in enumerate(sources):
                    places.setdefault(image, (number, place))
        return places

    def _file(self, key: Condition) -> Path:
        return self._folder / f"{digest(repr(key))[:32]}.safetensors"

    def _read(self, key: Condition) -> bool:
        """Read what an earlier run or another process has encoded, if it has, and has written the whole of it."""
        with suppress(OSError, SafetensorError):
            if self._folder is not None:
                self._encoded[key] = load_file(self._file(key))  # mapped, which takes no memory
        return key in self._encoded

    def _keep(self, key: Condition, tensors: dict[str, torch.Tensor]) -> None:
        self._encoded[key] = tensors
        if self._folder is not None:
            # safetensors refuses tensors that share memory
            tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            write_atomically(self._file(key), save(tensors))
            self._read(key)

    def _encode_prompts(self, rows: PromptRows, new: dict[PromptKey, int]) -> None:
        device, size = self.accelerator.device, 0
        with self._text_encoders_placed(), truncations_counted(self.pipeline) as truncations:
            for condition, number in tqdm(new.items(), "Encoding prompts", disable=self._is_hidden, leave=False):
                images = rows.images(number) if condition.images else []
                arguments = (condition.prompt, device, images, condition.scale)
                with rows.add_row_to_errors(number):
                    encoded = self.family.encode_prompt(self.pipeline, *arguments)
                self._keep(condition, send_to_device(encoded, "cpu"))
                size = sum(tensor.nbytes for tensor in encoded.values())
                if self.family.is_truncated(self.pipeline, condition.prompt):
                    name = type(self.pipeline).__name__
                    truncations[f"the end of the text was truncated, because it is longer than {name} reads"] += 1
        logger.info(f"{len(new)} prompts are encoded ({size / 2**20:.1f} MiB each).")
        for message in [message for message in truncations if message not in self._told]:
            logger.warning(f"For {truncations[message]} of {len(new)} prompts: {message}.")
        self._told |= truncations.keys()

    def _encode_images(self, rows: PromptRows, new: dict[Any, tuple[int, int]]) -> None:
        vae, device = self.pipeline.vae, self.accelerator.device
        with nullcontext() if vae.device.type == device.type else on_device([vae], device):
            progress = tqdm(new.items(), "Encoding source images", disable=self._is_hidden, leave=False)
            for (digest, scale), (number, place) in progress:
                with rows.add_row_to_errors(number):
                    image = self.family.prepare_image(self.pipeline, rows.images(number)[place], scale)
                    self._keep((digest, scale), {"latents": self.encode_image(image).latents.cpu()})

    @torch.no_grad()
    def encode_image(self, image: Image.Image) -> EncodedImage:
        """Encode a prepared source image, with the VAE on the accelerator."""
        vae, device = self.pipeline.vae, self.accelerator.device
        with _untiled(vae), torch.autocast(device.type, enabled=False):  # as the pipeline does
            pixels = self.family.image_pixels(self.pipeline, image).to(device, vae.dtype)
            return EncodedImage(image, vae.encode(pixels).latent_dist.mode().float())

    @contextmanager
    def _text_encoders_placed(self) -> Iterator[None]:
        """Put the text encoders in the place of the transformer's frozen layers, if those are on the accelerator."""
        names, device = self.family.text_encoders, self.accelerator.device
        encoders = [module for name in names if (module := getattr(self.pipeline, name)) is not None]
        leaving = [layer for layer in self._frozen if next(layer.parameters()).device.type == device.type != "cpu"]
        if leaving:
            _to_cpu(leaving, self._frozen_memory)
        try:
            with on_device(encoders, device):
                yield
        finally:
            for layer in leaving:
                layer.to(device)


@contextmanager
def on_device(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Move frozen modules to a device, then back to the same CPU memory: files that are mapped stay shared."""
    memory = _cpu_memory(modules)
    for module in modules:
        module.to(device)
    try:
        yield
    finally:
        _to_cpu(modules, memory)


def _frozen_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model whose weights are not trained, without those that hold other layers."""
    layers = [layer for layer in model.modules() if not [*layer.children()] and [*layer.parameters()]]
    return [layer for layer in layers if not any(weight.requires_grad for weight in layer.parameters())]


def _cpu_memory(modules: list[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]]:
    return [
        (layer, name, weight, weight.data)
        for module in modules
        for layer in module.modules()
        for name, weight in layer.named_parameters(recurse=False)
        if type(weight) is nn.Parameter and weight.device.type == "cpu"  # a quantized weight is more than its data
    ]


def _to_cpu(modules: list[nn.Module], memory: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]]) -> None:
    for layer, name, weight, data in memory:
        weight.data = data
        setattr(layer, name, weight)
    for module in modules:
        module.to("cpu")
    clear_device_cache()  # what they reserved


def _models_digest(pipeline, family: Family) -> str:
    """Compute a digest of what encodes: family, text encoders, VAE, tokenizers and processors, and versions."""
    parts: list[Any] = [type(pipeline).__name__, describe(family), versions()]
    for name, component in sorted(pipeline.components.items()):
        if component is not None and name in (*family.text_encoders, "vae"):
            parts.append(component_fingerprint(component))
        elif ("tokenizer" in name or "processor" in name) and component is not None:
            with tempfile.TemporaryDirectory() as folder:
                component.save_pretrained(folder)
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                parts += [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return digest(parts)[:16]


@contextmanager
def _untiled(vae):
    """Switch off `vae_tiling`, which is for generated images: a pipeline encodes source images without it."""
    is_tiled = getattr(vae, "use_tiling", False)
    if is_tiled:
        vae.disable_tiling()
    try:
        yield
    finally:
        if is_tiled:
            vae.enable_tiling()


@dataclass
class EncodedRows:
    """Embeddings of some rows by call, and what reads a row and prepares the source images of a call, each once."""

    encoded: dict[int, PromptEmbeddings]
    read: Callable[[int], dict[str, Any]]
    source_images: Callable[[int], list[Image.Image]]


class Generated(NamedTuple):
    """
    The completions that a batch has finished, by their numbers, with their rows for rewards; and its records.

    `place` is that of the batch among those that were given, or behind them.
    """

    place: int
    numbers: list[int]
    rows: list[dict[str, Any]]
    images: list[Image.Image]
    records: list


class RolloutSampler:
    """Generate images of rows, in training and elsewhere. `place_weights` puts the weights in place."""

    def __init__(
        self,
        policy: PipelinePolicy,
        prompt_encoder: PromptEncoder,
        accelerator: Accelerator,
        guidance_scale: float,
        offload_embeddings: bool = False,
        place_weights: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.policy = policy
        self.prompt_encoder = prompt_encoder
        self.accelerator = accelerator
        self.guidance_scale = guidance_scale
        self.offload_embeddings = offload_embeddings
        self.place_weights = place_weights

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Move the VAE and the weights to the accelerator, and enable autocast."""
        # Autocast as in the training step: Trainer adds it to the model only when training begins
        with (
            on_device([self.policy.pipeline.vae], self.accelerator.device),
            self.place_weights(),
            self.accelerator.autocast(),
        ):
            yield

    def inputs(
        self, fetched: EncodedRows, calls: list[int]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[EncodedImage]]:
        """Return a batch's prompts on the accelerator, the stored tensors behind them, and its source images."""
        device = self.accelerator.device
        encoded = [fetched.encoded[call] for call in calls]
        embeddings = [each.place("cpu" if self.offload_embeddings else device) for each in encoded]
        if all(each is encoded[0] for each in encoded):
            kept = {name: tensor.expand(len(encoded), *tensor.shape[1:]) for name, tensor in embeddings[0].items()}
        else:
            kept = {name: torch.cat([each[name] for each in embeddings]) for name in embeddings[0]}  # (B, ...)
        latents = [to_device(each, device) for each in encoded[0].image_latents]
        images = fetched.source_images(calls[0])
        sources = [EncodedImage(image, each) for image, each in zip(images, latents, strict=True)]
        return {name: to_device(tensor, device) for name, tensor in kept.items()}, kept, sources

    def generate(
        self,
        fetched: EncodedRows,
        calls: list[int],
        noise_keys: list[tuple[int, ...]],
        size: tuple[int, int],
        num_inference_steps: int,
        finish: Callable[[list[tuple[int, ...]], list[RecordedStep]], list] | None = None,
        anchors: Sequence[EncodedImage] = (),
        **recording,
    ) -> tuple[list[Image.Image], list]:
        """
        Generate a batch within `ready`, with `anchors` as further source images.

        `finish` gets its noise and steps while prompts are on the accelerator.
        """
        arguments, kept, sources = self.inputs(fetched, calls)
        images, records = self.policy.generate(
            arguments, *size, num_inference_steps, self.guidance_scale, noise_keys, sources=[*sources, *anchors],
            **recording,
        )  # fmt: skip
        if finish is not None:
            records = finish(noise_keys, records)
        if self.offload_embeddings:
            records = share_tensors(records, arguments, kept)
        return images, records

    def rollout(
        self,
        completions: Completions,
        batches: list[list[int]],
        key: tuple[int, int, int],
        sizes: list[tuple[int, int]],
        num_inference_steps: int,
        scale: float = 1.0,
        fetched: EncodedRows | None = None,
        progress: str | None = None,
        is_collective: bool = True,
        **recording,
    ) -> Iterator[Generated]:
        """
        Generate batches of the images of some rows, by their numbers in `completions`, within `ready`.

        The key of an image's noise is `key` (seed, stream, round), its call and its place among the images of the call.
        With `fetched` the embeddings of all rows are on the accelerator, otherwise those of a batch, which are encoded when
        it comes. `is_collective` tells that all processes call this, and that a set of separate images may be of several.
        """
        rows, generations = completions.rows, completions.num_generations
        ordered: Iterable = enumerate(batches)
        if rows.is_anchored:
            ordered = completions.in_order(batches, gather_object if is_collective else list)
        in_turn = completions.rows_of(batches)
        family, pipeline = self.policy.family, self.policy.pipeline
        encode = functools.cache(
            lambda image: self.prompt_encoder.encode_image(family.prepare_panel(pipeline, completions.anchors[image]))
        )
        for place, numbers in tqdm(ordered, progress, len(batches), disable=progress is None, leave=False):
            calls = [completions.calls[image // generations] for image in numbers]
            row_numbers = [rows.calls[call].row for call in calls]
            generation_of = [image % generations for image in numbers]
            noise_keys: list[tuple[int, ...]] = [
                (*key, *of_image) for of_image in zip(calls, generation_of, strict=True)
            ]
            initial_keys = noise_keys
            if rows.args.panel_generation == "shared_noise":  # that of the first call of the row
                first = [rows.calls_of[number][0] for number in row_numbers]
                initial_keys = [(*key, *of_image) for of_image in zip(first, generation_of, strict=True)]
            if fetched is None:
                following = in_turn[in_turn.index(row_numbers[-1]) + 1 :]
                self.prompt_encoder.encode(rows, row_numbers, scale, following[:ROWS_AHEAD])
            encoded = fetched or self.prompt_encoder.fetch(rows, row_numbers, scale)
            anchors = []
            if rows.is_anchored and completions.anchor_of(numbers[0]) is not None:
                encoded_anchors = [encode(completions.anchor_of(image)) for image in numbers]
                latents = torch.cat([anchor.latents for anchor in encoded_anchors])
                anchors = [EncodedImage(encoded_anchors[0].image, latents)]
            images, records = self.generate(
                encoded, calls, noise_keys, sizes[row_numbers[0]], num_inference_steps, initial_keys=initial_keys,
                anchors=anchors, **recording,
            )  # fmt: skip
            finished = completions.add(numbers, images) if place < len(batches) else {}
            read = [encoded.read(completions.numbers[number // generations]) for number in finished]
            yield Generated(place, [*finished], read, [*finished.values()], records)
        has_sets = len(completions.places) > len(completions.numbers)
        if is_collective and has_sets and self.accelerator.num_processes > 1:
            finished = completions.exchange(self.accelerator)
            read = [rows.row(completions.numbers[number // generations]) for number in finished]
            yield Generated(len(batches), [*finished], read, [*finished.values()], [])
