# SPDX-License-Identifier: Apache-2.0
"""
The policy: the pipeline on this process's accelerator. It generates the batches of a round, and computes the
log-probabilities of their steps again.

The policy decides where VAE, weights and text encoders are.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply
from PIL import Image
from torch import nn
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm

from ..utils.deepspeed import gathered_weights
from ..utils.fsdp import is_sharded, kept_gathered
from ..utils.placement import placed_on
from ..utils.tensors import copy_containers, to_device
from .encoder import ROWS_AHEAD, EncodedRows, PromptEncoder
from .families import Family
from .recording_pipeline import EncodedImage, RecordedStep, RecordingPipeline, TransformerStep, share_tensors
from .rounds import Batch, Completion, Round
from .sde import SDESettings, sde_step


@dataclass(frozen=True)
class RecordingOptions:
    """
    Which steps to record while a batch is generated: the stochastic ones of `sde`, the last one, or none.

    `on_recorded` is called with the batch and its recorded steps, while its prompts are still on the accelerator, and
    returns the steps to train.
    """

    sde: SDESettings | None = None
    last_step: bool = False
    on_recorded: Callable[[Batch, list[RecordedStep]], Sequence[TransformerStep]] | None = None


@dataclass(frozen=True)
class BatchInputs:
    """What the pipeline generates a batch from: encoded prompts and source images."""

    arguments: dict[str, torch.Tensor]  # arguments of the pipeline's call, on the accelerator in float32, (B, ...)
    # The same arguments in the dtype and on the device they are stored in (CPU with `offload_embeddings`)
    stored: dict[str, torch.Tensor]
    sources: list[EncodedImage]


class Policy:
    """
    Generates batches of rounds, and computes the model's velocity at their recorded steps.

    With `offload_embeddings`, the prompts of recorded steps are kept in CPU memory.
    """

    def __init__(
        self,
        recording_pipeline: RecordingPipeline,
        accelerator: Accelerator,
        guidance_scale: float,
        offload_embeddings: bool = False,
        embeddings_dir: str | None = None,
    ):
        self.recording_pipeline = recording_pipeline
        self.accelerator = accelerator
        self.pipeline = recording_pipeline.pipeline
        self.family = recording_pipeline.family
        self.model = recording_pipeline.model
        self.scheduler = recording_pipeline.scheduler
        self.guidance_scale = guidance_scale
        self.offload_embeddings = offload_embeddings
        self.encoder = PromptEncoder(self.pipeline, self.family, accelerator, embeddings_dir)

    @contextmanager
    def on_device(self, engine: nn.Module | None = None) -> Iterator[None]:
        """
        Put VAE and weights on the accelerator, and enable autocast.

        Pass the `engine` of ZeRO-3 or FSDP2 to gather the weights that it has sharded. DeepSpeed and FSDP place all
        other weights themselves.
        """
        if not is_sharded(self.accelerator):
            self.model.to(self.accelerator.device)
        gathered = nullcontext()
        if isinstance(engine, FSDPModule):
            gathered = kept_gathered(engine, self.accelerator)
        elif engine is not None:
            gathered = gathered_weights(self.model, engine)
        # Autocast as in the training step: Trainer adds it to the model only when training begins
        with placed_on([self.pipeline.vae], self.accelerator.device), gathered, self.accelerator.autocast():
            yield

    def rollout(
        self,
        rollout_round: Round,
        batches: list[Batch],
        num_inference_steps: int,
        *,
        encoded: EncodedRows | None = None,
        progress: str | None = None,
        is_collective: bool = True,
        recording: RecordingOptions = RecordingOptions(),  # noqa: B008 (it is frozen)
    ) -> Iterator[list[Completion]]:
        """
        Generate batches of a round within [`~Policy.on_device`]; yield the completions that each of them finishes.

        Args:
            rollout_round ([`Round`]):
                The round.
            batches (`list[Batch]`):
                Batches of this process. Each gets its recorded steps.
            num_inference_steps (`int`):
                Denoising steps.
            encoded ([`EncodedRows`], *optional*):
                Embeddings of all rows. They stay on the accelerator for the whole rollout. If `None`, each batch's
                rows are encoded just before it is generated, together with the following rows.
            progress (`str`, *optional*):
                Description of the progress bar, if there is one.
            is_collective (`bool`):
                Whether all processes call this. Several processes may then generate the images of one set.
            recording ([`RecordingOptions`]):
                Steps to record of each batch.
        """
        round_row_indices = rollout_round.row_indices_of(batches)
        gather = gather_object if is_collective else list
        with tqdm(desc=progress, total=len(batches), disable=progress is None or None, leave=False) as bar:
            for phase, first_images in rollout_round.phases(batches, gather):
                anchors = {
                    index: self.encoder.encode_image(self.family.prepare_panel(self.pipeline, image))
                    for index, image in first_images.items()
                }
                for batch in phase:
                    batch_encoded = encoded
                    if batch_encoded is None:
                        row_indices = [sample.row_index for sample in batch.samples]
                        following = round_row_indices[round_row_indices.index(row_indices[-1]) + 1 :]
                        batch_encoded = self.encoder.encode(rollout_round, row_indices, ahead=following[:ROWS_AHEAD])
                    images = self.generate(batch, batch_encoded, num_inference_steps, recording, anchors)
                    bar.update(bool(batch.groups))  # padding batches do not count
                    yield rollout_round.add_images(batch, images)
        if is_collective and self.accelerator.num_processes > 1 and rollout_round.has_separate:
            yield rollout_round.exchange(self.accelerator)

    def generate(
        self,
        batch: Batch,
        encoded: EncodedRows,
        num_inference_steps: int,
        recording: RecordingOptions = RecordingOptions(),  # noqa: B008 (it is frozen)
        anchors: Mapping[int, EncodedImage] = MappingProxyType({}),
    ) -> list[Image.Image]:
        """
        Return a batch's images, and record its steps, within [`~Policy.on_device`].

        `anchors` has the first image of each set by the index of its completion. The other images of the set are
        generated from it.
        """
        samples = batch.samples
        inputs = self.inputs(encoded, [sample.prompt_index for sample in samples])
        sources = inputs.sources
        if samples[0].is_anchored:
            panels = [anchors[sample.completion.index] for sample in samples]
            sources = [*sources, EncodedImage(panels[0].image, torch.cat([panel.latents for panel in panels]))]
        images, recorded = self.recording_pipeline.generate(
            inputs.arguments, *samples[0].size, num_inference_steps, self.guidance_scale,
            [sample.noise_key for sample in samples], sde=recording.sde, record_last_step=recording.last_step,
            sources=sources, initial_keys=[sample.initial_noise_key for sample in samples],
        )  # fmt: skip
        steps: Sequence[TransformerStep] = recorded
        if recording.on_recorded is not None:
            steps = recording.on_recorded(batch, recorded)
        batch.steps = share_tensors(steps, inputs.arguments, inputs.stored)
        return images

    def inputs(self, encoded: EncodedRows, prompt_indices: list[int]) -> BatchInputs:
        """Collect the inputs of a batch: embeddings of its prompts, and the source images that all of them share."""
        device = self.accelerator.device
        embeddings = [encoded.embeddings[prompt_index] for prompt_index in prompt_indices]
        arguments = [prompt.arguments_on("cpu" if self.offload_embeddings else device) for prompt in embeddings]
        if all(prompt is embeddings[0] for prompt in embeddings):
            size = len(embeddings)
            stored = {name: tensor.expand(size, *tensor.shape[1:]) for name, tensor in arguments[0].items()}
        else:
            stored = {name: torch.cat([prompt[name] for prompt in arguments]) for name in arguments[0]}  # (B, ...)
        # A batch has images of one prompt if the prompts have source images
        images = encoded.source_images(prompt_indices[0])
        sources = [
            EncodedImage(image, to_device(latents, device))
            for image, latents in zip(images, embeddings[0].image_latents, strict=True)
        ]
        arguments = {name: as_float32(to_device(tensor, device)) for name, tensor in stored.items()}
        return BatchInputs(arguments, stored, sources)

    def predict(self, model: nn.Module, step: TransformerStep, detach_unconditional: bool = False) -> torch.Tensor:
        """Compute the velocity `(B, ...)` that a model predicts in a step, as [`~paco_trl.rollout.predict`] does."""
        return predict(model, step.calls, self.family, self.guidance_scale, step.sample, detach_unconditional)


def compute_log_prob(
    velocity: torch.Tensor, record: RecordedStep, sde: SDESettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Compute the log-probability of a recorded step.

    Pass the velocity `(B, ...)` that [`predict`] computes for the step, and the `sde` of the rollout.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: log-probability `(B,)` of the recorded sample, mean
        `(B, ...)` and standard deviation of the step's Gaussian.
    """
    settings = (record.sigma, record.sigma_next, sde.noise_level, sde.sde_type)
    step = sde_step(velocity, record.sample, *settings, prev_sample=record.prev_sample, sigma_max=record.sigma_max)
    return step.log_prob, step.mean, step.std


def predict(
    model: nn.Module,
    calls: list[dict[str, Any]],
    family: Family,
    guidance_scale: float,
    sample: torch.Tensor,
    detach_unconditional: bool = False,
) -> torch.Tensor:
    """
    Compute the velocity `(B, ...)` that a model predicts for one step, with one forward pass for each of its calls.

    Pass the `guidance_scale` of the rollout. With `detach_unconditional` no gradient flows through the unconditional
    prediction of true CFG; if that is a separate call, it keeps nothing for the backward pass.
    """
    outputs = []
    for call_index, call in enumerate(calls):
        # The unconditional prediction is the second call in every pipeline that makes two
        with torch.no_grad() if detach_unconditional and call_index > 0 else nullcontext():
            outputs.append(model(**_arguments(call))[0])
    return family.combine(outputs, guidance_scale, sample, detach_unconditional)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recorded call, in copied lists and dicts: a transformer may remove items from them."""
    # The latents are the first argument, and keep the dtype in which the pipeline passed them
    sample, *others = call
    return copy_containers({sample: call[sample]}) | recursively_apply(
        as_float32, {name: call[name] for name in others}
    )


def as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """
    Cast embeddings to float32: they may be stored in bfloat16, but the pipeline creates latents in their dtype.

    Integers and tensors of fewer than two dimensions, such as times, stay as they are.
    """
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return tensor
    if tensor.stride(0) == 0:  # the images of a prompt share one copy
        return tensor[:1].float().expand_as(tensor)
    return tensor.float()


def check_call_at(record: RecordedStep, family: Family) -> None:
    """
    Check that the family's `call_at` returns the recorded calls for the recorded sample and time.

    Raises:
        RuntimeError: It returns other calls.
    """
    recorded = torch.full((len(record.sample),), record.sigma, device=record.sample.device)  # (B,)
    compared = []
    for call in record.calls:
        again = family.call_at(call, record.sample, recorded)
        for name in sorted(call.keys() | again.keys()):
            compared += [(name, flag) for flag in _sameness(call.get(name), again.get(name))]
    on_device = [flag for _, flag in compared if torch.is_tensor(flag)]
    # Reading a value waits for the device, so read all at once
    values = iter(torch.stack(on_device).tolist() if on_device else ())
    flags = [next(values) if torch.is_tensor(flag) else flag for _, flag in compared]
    wrong = dict.fromkeys(name for (name, _), is_same in zip(compared, flags, strict=True) if not is_same)
    if wrong:
        raise RuntimeError(
            f"At step {record.index} the pipeline called its transformer with other arguments than "
            f"{type(family).__name__}.call_at makes of the same sample and time: {', '.join(wrong)} differ. The "
            "images would be trained at wrong times; correct the family class."
        )


def _sameness(first: Any, second: Any) -> Iterator[bool | torch.Tensor]:
    """Compare tensors, or lists of them: values are compared on the device, and not read."""
    if first is second:
        yield True
    elif isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        is_alike = (first.shape, first.dtype) == (second.shape, second.dtype)
        yield (first == second).all() if is_alike else False
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        yield from itertools.chain(*map(_sameness, first, second))
    else:
        yield False


def cast_floating_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """
    Cast floating-point inputs of a low-precision module to `dtype`, because the pipeline computes in float32.

    The hook acts on the calls of rollout and replay alike, so that both see the same numbers. Tensors with one number
    for each image are unchanged: some transformers read times and guidance scales in float32.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim > 1 else tensor

    def hook(module: nn.Module, args: tuple, kwargs: dict):
        return recursively_apply(cast, args), recursively_apply(cast, kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True)
