# SPDX-License-Identifier: Apache-2.0
"""PaCo-Reward: a vision-language model that says whether two images are consistent, and why."""

import math
import os
import warnings
from itertools import combinations
from pathlib import Path

import torch
from accelerate import PartialState
from peft import PeftConfig, PeftModel
from PIL import Image
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..utils.deepspeed import without_zero3_init
from ..utils.images import load_image
from .decision import decision_token_ids
from .prefix_sharing import share_prefixes


# An image in one of the forms that `score` takes
ImageSource = Image.Image | str | Path | bytes
ImagePair = tuple[ImageSource, ImageSource]


class PaCoReward:
    """
    Pairwise consistency judge ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2): the score of two images
    and a question is P(Yes) / (P(Yes) + P(No)) at the first position of the model's answer.

    One forward pass scores a batch of pairs; nothing is generated. With a model of the Qwen2-VL or Qwen2.5-VL family,
    each image is encoded by the vision tower once in a call of [`~PaCoReward.score`], in however many pairs it is, and
    pairs of a batch with the same first image share what the language model computes for it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Vision-language model. It is set to eval mode.
        processor ([`~transformers.ProcessorMixin`]):
            Its processor.
        name (`str`, *optional*):
            Name for reports. If `None`, the model's.
        batch_size (`int`, *optional*, defaults to `8`):
            Pairs of a forward pass.

    Example:

    ```python
    >>> from paco_trl import PaCoReward
    >>> from paco_trl.data import theme_question

    >>> judge = PaCoReward.from_pretrained("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16")
    >>> question = theme_question("A fox through the four seasons")
    >>> judge.score([("spring.png", "summer.png")], question)  # a list of one float
    >>> judge.explain([("spring.png", "summer.png")], question)  # a list of one text
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        processor: ProcessorMixin,
        name: str | None = None,
        batch_size: int = 8,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
        self.model = model.eval()
        self.processor = processor
        self.yes_id, self.no_id = decision_token_ids(processor.tokenizer)
        self.name = name or model.name_or_path
        self.batch_size = batch_size
        self._network = model.get_base_model() if isinstance(model, PeftModel) else model
        # For these an image is one tensor of features, so that it can be encoded once and pairs can share what they
        # begin with. For others pairs go through processor and model whole: same scores, more work.
        self._takes_encoded_images = self._network.config.model_type in ("qwen2_vl", "qwen2_5_vl")

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        batch_size: int = 8,
        trust_remote_code: bool = False,
        **kwargs,
    ) -> "PaCoReward":
        """
        Loads a judge. Only safetensors files are read.

        Args:
            model (`str` or `Path`):
                Hub id or folder of a whole model (a merged judge, or any vision-language model), or of a LoRA adapter,
                whose `adapter_config.json` names the model below it.
            device (`str` or `torch.device`, *optional*):
                Device. Defaults to this process's own: its accelerator, or the CPU if there is none.
            dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
                Dtype of the model; `"auto"` is that of its files.
            batch_size (`int`, *optional*, defaults to `8`):
                Pairs of a forward pass.
            trust_remote_code (`bool`, *optional*, defaults to `False`):
                Whether to run code that comes with the model.
            **kwargs:
                Further arguments of [`~transformers.PreTrainedModel.from_pretrained`], `revision` and `token` for the
                named repository among them.

        Returns:
            [`PaCoReward`].

        Raises:
            ValueError: An adapter that names no model, or does not fit the model it names; a tokenizer in which Yes or
                No is not one token.
        """
        model = os.fspath(model)
        hub_kwargs = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        is_adapter = find_adapter_config_file(model, **hub_kwargs) is not None
        base, base_kwargs = model, kwargs
        if is_adapter:
            base = PeftConfig.from_pretrained(model, **hub_kwargs).base_model_name_or_path
            if not base:
                raise ValueError(
                    f"The adapter {model!r} does not name the model below it: `base_model_name_or_path` in its "
                    "adapter_config.json is empty. Put the model's Hub id or folder there."
                )
            base_kwargs = {name: value for name, value in kwargs.items() if name != "revision"}
        # A judge is not trained: a live ZeRO-3 configuration would leave it empty
        with without_zero3_init():
            network = AutoModelForImageTextToText.from_pretrained(
                base, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, **base_kwargs
            )
            if is_adapter:
                network = _load_adapter(network, model, hub_kwargs)
        processor_source, processor_kwargs = model, hub_kwargs
        if is_adapter and not _has_processor(model, hub_kwargs):
            processor_source = base
            processor_kwargs = {name: value for name, value in hub_kwargs.items() if name != "revision"}
        processor = AutoProcessor.from_pretrained(
            processor_source, trust_remote_code=trust_remote_code, **processor_kwargs
        )
        network.to(device if device is not None else PartialState().device)
        return cls(network, processor, name=model, batch_size=batch_size)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def score(
        self,
        images: list[ImagePair],
        prompts: str | list[str],
        symmetric: bool = False,
        show_progress: bool = False,
    ) -> list[float]:
        """
        Scores pairs of images.

        A score does not depend on the other pairs of the call, beyond the rounding of the dtype. An image that is in
        several pairs (the same object, or the same path or URL) is encoded once.

        Args:
            images (`list[tuple]`):
                Pairs; each image a PIL image, a path, a URL, or the bytes of an image file.
            prompts (`str` or `list[str]`):
                Question for each pair, or one for all. See [`~paco_trl.data.theme_question`] and its neighbours for
                those that the published weights were trained on.
            symmetric (`bool`, *optional*, defaults to `False`):
                Whether to score both orders of each pair and take the mean, at the cost of a second forward pass.
            show_progress (`bool`, *optional*, defaults to `False`):
                Whether to show a progress bar.

        Returns:
            `list[float]`: P(Yes) / (P(Yes) + P(No)) of each pair.

        Raises:
            ValueError: A pair that is not two images, an image that cannot be read, not one question a pair, or a score
                that is not finite.
        """
        prompts = self._check(images, prompts)
        pairs = [tuple(pair) for pair in images]
        if symmetric:
            pairs, prompts = pairs + [(second, first) for first, second in pairs], prompts * 2
        scores = self._score(pairs, prompts, show_progress)
        if symmetric:
            half = len(pairs) // 2
            scores = [(forward + backward) / 2 for forward, backward in zip(scores[:half], scores[half:], strict=True)]
        return scores

    def score_sets(
        self,
        image_sets: list[list[ImageSource]],
        prompts: str | list[str],
        symmetric: bool = False,
        show_progress: bool = False,
    ) -> list[float]:
        """
        Scores sets of images: the mean over all unordered pairs of a set.

        The pairs are those of `itertools.combinations`, the earlier image first. For the scores of the single pairs,
        give these pairs to [`~PaCoReward.score`].

        Args:
            image_sets (`list[list]`):
                Sets of at least two images, the panels of a grid for example.
            prompts (`str` or `list[str]`):
                Question for each set, or one for all.
            symmetric (`bool`, *optional*, defaults to `False`), show_progress (`bool`, *optional*, defaults to `False`):
                As in [`~PaCoReward.score`].

        Returns:
            `list[float]`: score of each set.

        Raises:
            ValueError: As [`~PaCoReward.score`], and for a set of fewer than two images.
        """
        prompts = _one_each(prompts, len(image_sets), "sets")
        for index, images in enumerate(image_sets):
            if len(images) < 2:
                raise ValueError(f"Set {index} has {len(images)} image(s); consistency needs at least two.")
        pairs = [pair for images in image_sets for pair in combinations(images, 2)]
        counts = [len(images) * (len(images) - 1) // 2 for images in image_sets]
        questions = [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
        scores = iter(self.score(pairs, questions, symmetric, show_progress))
        return [sum(next(scores) for _ in range(count)) / count for count in counts]

    @torch.inference_mode()
    def explain(self, images: list[ImagePair], prompts: str | list[str], max_new_tokens: int = 512) -> list[str]:
        """
        Generates the answers, greedily: Yes or No, and the reasons.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`):
                As in [`~PaCoReward.score`].
            max_new_tokens (`int`, *optional*, defaults to `512`):
                Length at which an answer is cut.

        Returns:
            `list[str]`: answer for each pair.
        """
        prompts = self._check(images, prompts)
        pairs = [tuple(pair) for pair in images]
        batches = [
            list(range(len(pairs)))[start : start + self.batch_size] for start in range(0, len(pairs), self.batch_size)
        ]
        answers = []
        for batch in batches:
            loaded = [
                load_image(image, self.processor, f"{place} image of pair {index}")
                for index in batch
                for place, image in zip(("First", "Second"), pairs[index], strict=True)
            ]
            inputs = self._inputs([prompts[index] for index in batch], loaded)
            # The published generation configs sample; `score` is greedy too, and an explanation should explain it
            generated = self.model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
            )
            generated = generated[:, inputs["input_ids"].shape[1] :]
            answers += self.processor.batch_decode(generated, skip_special_tokens=True)
        return answers

    def _check(self, images: list[ImagePair], prompts: str | list[str]) -> list[str]:
        for index, pair in enumerate(images):
            if isinstance(pair, (str, bytes, Image.Image)) or len(pair) != 2:
                what = type(pair).__name__ if isinstance(pair, (str, bytes, Image.Image)) else f"{len(pair)} images"
                raise ValueError(
                    f"`images[{index}]` is {what}, not a pair. `score` takes pairs, `[(first, second), ...]`; for sets "
                    "of more images there is `score_sets`."
                )
        prompts = _one_each(prompts, len(images), "pairs")
        token = getattr(self.processor, "image_token", None)
        for index, prompt in enumerate(prompts):
            if token is not None and token in prompt:
                raise ValueError(f"`prompts[{index}]` has {token!r}, which would stand for an image. Take it out.")
        return prompts

    @torch.inference_mode()
    def _score(self, pairs: list[ImagePair], prompts: list[str], show_progress: bool) -> list[float]:
        # Pairs of like length share a batch: padding is computed too
        order = sorted(range(len(pairs)), key=lambda index: len(prompts[index]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        images = _Images(self, pairs, batches)
        scores: list[float | None] = [None] * len(pairs)
        progress = tqdm(total=len(pairs), desc="Scoring pairs", unit="pair", disable=not show_progress)
        # A surrounding autocast would change the scores with the place they are computed in
        with progress, torch.autocast(self.device.type, enabled=False):
            for number, indices in enumerate(batches):
                inputs = self._inputs([prompts[index] for index in indices], images.of_batch(number))
                if self._takes_encoded_images:
                    inputs = share_prefixes(self._network, inputs, [_key(pairs[index][0]) for index in indices])
                logits = self.model(**inputs, logits_to_keep=1).logits[:, -1].double()
                # = softmax over the two, in log space
                probabilities = torch.sigmoid(logits[:, self.yes_id] - logits[:, self.no_id]).tolist()
                for index, probability in zip(indices, probabilities, strict=True):
                    if math.isnan(probability):
                        raise ValueError(
                            f"The score of pair {index} is not a number: the weights of {self.name!r} are not finite, "
                            f"or overflow in {self.model.dtype}. Use `dtype='float32'` or check the weights."
                        )
                    scores[index] = probability
                progress.update(len(indices))
        return scores

    def _inputs(self, prompts: list[str], images: list) -> dict[str, torch.Tensor]:
        """
        Inputs of the model, padded on the left, so that every row ends where the answer begins.

        `images` are those of all pairs in order: encoded ones (features and patch grid) where the model takes them, as
        [`_Images`] gives them, PIL images elsewhere.
        """
        content = [{"type": "image"}, {"type": "image"}]
        texts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt in prompts
        ]
        if isinstance(images[0], Image.Image):
            inputs = self.processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
            return inputs.to(self.device)

        grids = torch.stack([grid for _, grid in images])  # (2 B, 3)
        slots = [self.processor.replace_image_token({"image_grid_thw": grids}, slot) for slot in range(len(images))]
        texts, _ = self.processor.get_text_with_replacements(texts, slots)
        inputs = self.processor.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        inputs["mm_token_type_ids"] = torch.tensor(self.processor.create_mm_token_type_ids(inputs["input_ids"]))
        inputs["image_grid_thw"] = grids
        inputs = inputs.to(self.device)
        encoded = BaseModelOutputWithPooling(pooler_output=tuple(features for features, _ in images))
        return {**inputs, "mm_encoder_outputs": {"image": encoded}}

    def _encode(self, images: list[Image.Image]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Features and patch grid of each image, from one forward of the vision tower."""
        inputs = self.processor.image_processor(images, return_tensors="pt")
        grids = inputs["image_grid_thw"]  # (images, 3)
        outputs = self._network.get_image_features(
            inputs["pixel_values"].to(self.device), grids.to(self.device), return_dict=True
        )
        return list(zip(outputs.pooler_output, grids, strict=True))


class _Images:
    """The distinct images of a call: each is read, and encoded, when a batch first needs it, and kept until the last."""

    def __init__(self, judge: PaCoReward, pairs: list[ImagePair], batches: list[list[int]]):
        self.judge = judge
        self.pairs = pairs
        self.batches = batches
        self.ready: dict = {}
        # Number of the last batch that needs an image
        self.last_use = {
            _key(image): number for number, batch in enumerate(batches) for index in batch for image in pairs[index]
        }

    def of_batch(self, number: int) -> list:
        keys, missing = [], {}
        for index in self.batches[number]:
            for place, image in zip(("First", "Second"), self.pairs[index], strict=True):
                key = _key(image)
                keys.append(key)
                if key not in self.ready and key not in missing:
                    missing[key] = load_image(image, self.judge.processor, f"{place} image of pair {index}")
        if missing:
            images = list(missing.values())
            self.ready.update(
                zip(missing, self.judge._encode(images) if self.judge._takes_encoded_images else images, strict=True)
            )
        images = [self.ready[key] for key in keys]
        self.ready = {key: image for key, image in self.ready.items() if self.last_use[key] > number}
        return images


def _key(image: ImageSource):
    """What makes two images the same without looking at them: the object, or the name."""
    return str(image) if isinstance(image, (str, Path)) else id(image)


def _one_each(prompts: str | list[str], count: int, what: str) -> list[str]:
    if isinstance(prompts, str):
        return [prompts] * count
    if len(prompts) != count:
        raise ValueError(
            f"{len(prompts)} questions for {count} {what}: `prompts` must be one text for all, or one for each."
        )
    return list(prompts)


def _has_processor(model: str, hub_kwargs: dict) -> bool:
    return any(
        cached_file(model, name, _raise_exceptions_for_missing_entries=False, **hub_kwargs) is not None
        for name in ("processor_config.json", "preprocessor_config.json")
    )


def _load_adapter(network: PreTrainedModel, adapter: str, hub_kwargs: dict) -> PeftModel:
    # PEFT would fall back to a pickle
    if (
        cached_file(adapter, "adapter_model.safetensors", _raise_exceptions_for_missing_entries=False, **hub_kwargs)
        is None
    ):
        raise ValueError(
            f"The adapter {adapter!r} has no adapter_model.safetensors. Other formats are pickles, which can run code; "
            "convert it, or ask for a safetensors file."
        )
    with warnings.catch_warnings():
        # An adapter whose names do not fit is loaded as no adapter at all, with a warning
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(network, adapter, torch_device="cpu", **hub_kwargs)
        except UserWarning as warning:
            raise ValueError(
                f"The adapter {adapter!r} does not fit {type(network).__name__} {network.name_or_path!r}: weights are "
                f"missing, as {str(warning)[:300]}. Was it trained on another model?"
            ) from warning
