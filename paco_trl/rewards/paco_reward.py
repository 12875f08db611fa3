# SPDX-License-Identifier: Apache-2.0
"""PaCo-Reward: a vision-language model that says whether two images are consistent, and why."""

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path

import torch
from accelerate import PartialState
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..utils.deepspeed import without_zero3_init
from ..utils.fingerprint import weights_fingerprint
from ..utils.images import check_text, find_control_tokens, load_image, patch_size_of
from ..utils.names import public_name
from .decision import decision_direction, decision_token_ids, scales_logits
from .judge import ImageGroup, ImagePair, ImageSource, image_key, name_image, one_question_each, single_images
from .prefix_sharing import order_for_sharing, share_prefixes


_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
# Model types that take images which the vision tower has encoded already as one tensor of features each
_ENCODED_IMAGES = ("qwen2_vl", "qwen2_5_vl")
# Tokens of [`PaCoReward.top_logprobs`]: the most that a server gives
_TOP_LOGPROBS = 20
# Prefix that PeftModel puts in front of the model's own names
_PEFT_PREFIX = "base_model.model."
# Names of layers before transformers 4.52, which adapters of that time have, and what they became
_OLD_LAYERS = {r"^model\.(?=layers|norm|embed_tokens)": "model.language_model.", r"^visual": "model.visual"}


class PaCoReward:
    """
    Pairwise consistency judge ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2): the score of two images
    and a question is P(Yes) / (P(Yes) + P(No)) at the first position of the model's answer.

    One forward pass scores a batch of pairs; nothing is generated. With a model of the Qwen2-VL or Qwen2.5-VL family,
    each image is encoded by the vision tower once in a call of [`~PaCoReward.score`], in however many pairs it is, and
    questions of a batch about the same images, or the same first image, share what the language model computes for
    them.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Vision-language model. It is set to eval mode.
        processor ([`~transformers.ProcessorMixin`]):
            Its processor.
        name (`str`, *optional*):
            Name for reports. If `None`, the model's.
        batch_size (`int`, *optional*, defaults to `8`):
            Questions of a forward pass.
        system_prompt (`str`, *optional*):
            System turn in front of each question, for a judge that was trained with one. If `None`, what the chat
            template puts there, as the published judges have it.

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
        system_prompt: str | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
        self.model = model.eval()
        self.processor = processor
        self.yes_id, self.no_id = decision_token_ids(processor.tokenizer)
        self.name = name or model.name_or_path
        self.batch_size = batch_size
        self.system_prompt = system_prompt
        self._network = model.get_base_model() if isinstance(model, PeftModel) else model
        # For these an image is one tensor of features, so that it can be encoded once and questions can share what they
        # begin with. For others they go through processor and model whole: same scores, more work.
        self._takes_encoded_images = self._network.config.model_type in _ENCODED_IMAGES
        self._hidden_state: torch.Tensor | None = None
        self._network.get_output_embeddings().register_forward_pre_hook(self._keep_hidden_state)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        batch_size: int = 8,
        system_prompt: str | None = None,
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
                Questions of a forward pass.
            system_prompt (`str`, *optional*):
                System turn in front of each question.
            trust_remote_code (`bool`, *optional*, defaults to `False`):
                Whether to run code that comes with the model.
            **kwargs:
                Further arguments of [`~transformers.PreTrainedModel.from_pretrained`]; `revision` and `subfolder` are
                those of the named repository, not of the model below an adapter.

        Returns:
            [`PaCoReward`].

        Raises:
            ValueError: Weights that are not all there, or have no place; an adapter that names no model, or does not
                fit the model it names; a tokenizer in which Yes or No is not one token.
        """
        model = os.fspath(model)
        # Before gigabytes are read: a tokenizer without Yes and No is of no use
        processor = cls.load_processor(model, trust_remote_code, **kwargs)
        hub_kwargs = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        base, base_kwargs, is_adapter = _below_adapter(model, kwargs)
        # A judge is not trained: a live ZeRO-3 configuration would leave it empty
        with without_zero3_init():
            network, info = AutoModelForImageTextToText.from_pretrained(
                base,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **base_kwargs,
            )
            _check_loading(base, info)
            if is_adapter:
                network = load_judge_adapter(network, model, **hub_kwargs)
        network.to(device if device is not None else PartialState().device)
        return cls(network, processor, model, batch_size, system_prompt)

    @staticmethod
    def load_processor(model: str | Path, trust_remote_code: bool = False, **kwargs) -> ProcessorMixin:
        """
        Loads the processor of a judge and checks its tokenizer, without the weights.

        Args:
            model (`str` or `Path`), trust_remote_code (`bool`, *optional*, defaults to `False`), **kwargs:
                As of [`~PaCoReward.from_pretrained`].

        Returns:
            [`~transformers.ProcessorMixin`]: that of the adapter if it has one, else that of the model below it.

        Raises:
            ValueError: An adapter that names no model, or a tokenizer in which Yes or No is not one token.
        """
        model = os.fspath(model)
        hub_kwargs = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        base, base_kwargs, is_adapter = _below_adapter(model, kwargs)
        if is_adapter and not has_processor(model, **hub_kwargs):
            model = base
            hub_kwargs = {name: value for name, value in base_kwargs.items() if name in _HUB_ARGUMENTS}
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=trust_remote_code, **hub_kwargs)
        decision_token_ids(processor.tokenizer)
        return processor

    @property
    def fingerprint(self) -> str:
        """Digest of a sample of the weights: tells the judge from another one of the same name."""
        return weights_fingerprint(self.model)

    @property
    def model_name(self) -> str:
        """Name of the model as others may see it, for cards: never a path."""
        return public_name(str(self.name))

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
                those of the published code.
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
        if not symmetric:
            return self._ask(pairs, prompts, "pair", self._probabilities, show_progress)
        # Both orders of a pair beside one another, so that their images can be let go of
        pairs = [order for first, second in pairs for order in ((first, second), (second, first))]
        prompts = [prompt for prompt in prompts for _ in range(2)]
        scores = self._ask(pairs, prompts, "pair", self._probabilities, show_progress)
        return [(forward + backward) / 2 for forward, backward in zip(scores[::2], scores[1::2], strict=True)]

    def score_images(
        self, images: list[ImageSource], prompts: str | list[str], show_progress: bool = False
    ) -> list[float]:
        """
        Scores questions about one image each, such as whether it shows what a text says.

        An image of several questions (the same object, or the same path or URL) is encoded once.

        Args:
            images (`list`):
                Image of each question: a PIL image, a path, a URL, or the bytes of an image file.
            prompts (`str` or `list[str]`):
                Question for each image, or one for all. See [`~paco_trl.data.shows_question`].
            show_progress (`bool`, *optional*, defaults to `False`):
                Whether to show a progress bar.

        Returns:
            `list[float]`: P(Yes) / (P(Yes) + P(No)) of each question.

        Raises:
            ValueError: An image that cannot be read, not one question an image, or a score that is not finite.
        """
        groups = single_images(images)
        prompts = self._check_prompts(prompts, len(groups), "images")
        return self._ask(groups, prompts, "image", self._probabilities, show_progress)

    def top_logprobs(
        self,
        images: list[ImagePair],
        prompts: str | list[str],
        image_labels: tuple[str, str] | None = None,
        show_progress: bool = False,
    ) -> list[dict[str, float]]:
        """
        Gives the 20 likeliest first tokens of each answer, as a server lists them.

        The evaluations need it for `protocol="published"`. Unlike [`~PaCoReward.score`] it depends on the logits in the
        dtype of the model, and on which tokens are among the 20.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`), show_progress (`bool`, *optional*, defaults to `False`):
                As in [`~PaCoReward.score`].
            image_labels (`tuple[str, str]`, *optional*):
                Text in front of the first and of the second image. If `None`, none.

        Returns:
            `list[dict[str, float]]`: token -> log-probability of each pair, the likeliest first.

        Raises:
            ValueError: As [`~PaCoReward.score`].
        """
        prompts = self._check(images, prompts)
        pairs = [tuple(pair) for pair in images]
        return self._ask(pairs, prompts, "pair", self._top_tokens, show_progress, image_labels)

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
        prompts = one_question_each(prompts, len(image_sets), "sets")
        for index, images in enumerate(image_sets):
            if not isinstance(images, (list, tuple)):
                raise ValueError(
                    f"`image_sets[{index}]` is {type(images).__name__}, not a list of images. `score_sets` takes "
                    "several sets, `[[first, second, third], ...]`."
                )
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
                load_image(image, patch_size_of(self.processor), name_image(pairs[index], place, index))
                for index in batch
                for place, image in enumerate(pairs[index])
            ]
            inputs = self._inputs([prompts[index] for index in batch], loaded)
            # The published generation configs sample and penalise repetitions; an explanation should explain the score
            with torch.autocast(self.device.type, enabled=False):
                generated = self.model.generate(
                    **inputs, max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.0
                )
            generated = generated[:, inputs["input_ids"].shape[1] :]
            answers += self.processor.batch_decode(generated, skip_special_tokens=True)
        self._hidden_state = None
        return answers

    def _check(self, images: list[ImagePair], prompts: str | list[str]) -> list[str]:
        for index, pair in enumerate(images):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                what = f"{len(pair)} images" if isinstance(pair, (list, tuple)) else type(pair).__name__
                raise ValueError(
                    f"`images[{index}]` is {what}, not a pair. `score` takes pairs, `[(first, second), ...]`; for sets "
                    "of more images there is `score_sets`."
                )
        return self._check_prompts(prompts, len(images), "pairs")

    def _check_prompts(self, prompts: str | list[str], count: int, what: str) -> list[str]:
        prompts = one_question_each(prompts, count, what)
        control_tokens = find_control_tokens(self.processor)
        for index, prompt in enumerate(prompts):
            check_text(prompt, control_tokens, f"`prompts[{index}]`")
        return prompts

    def _keep_hidden_state(self, module: torch.nn.Module, args: tuple) -> None:
        self._hidden_state = args[0]

    def _probabilities(self, inputs: dict) -> list[float]:
        """
        P(Yes) / (P(Yes) + P(No)) of each row: the sigmoid of the difference of the two logits.

        The difference is computed in float32 from the hidden state: the logits of a bf16 model come in steps that are
        coarse for a score, an eighth above 16.
        """
        # Without shared beginnings no cache is needed
        logits = self.model(**inputs, logits_to_keep=1, use_cache="past_key_values" in inputs).logits[:, -1]
        hidden, self._hidden_state = self._hidden_state[:, -1].float(), None  # (B, D)
        if scales_logits(self._network.config):
            logits = logits.float()
            difference = logits[:, self.yes_id] - logits[:, self.no_id]
        else:
            direction, offset = decision_direction(self._network.get_output_embeddings(), (self.yes_id, self.no_id))
            difference = hidden.to(direction.device) @ direction + offset
        return torch.sigmoid(difference.cpu().double()).tolist()

    def _top_tokens(self, inputs: dict) -> list[dict[str, float]]:
        """Log-probabilities of the likeliest tokens of each row, by their text."""
        logits = self.model(**inputs, logits_to_keep=1, use_cache="past_key_values" in inputs).logits[:, -1]
        self._hidden_state = None
        values, ids = logits.float().log_softmax(dim=-1).topk(min(_TOP_LOGPROBS, logits.shape[-1]))  # (B, 20)
        rows = []
        for of_row, tokens in zip(values.tolist(), ids.tolist(), strict=True):
            row: dict[str, float] = {}
            for value, token in zip(of_row, tokens, strict=True):
                # Different tokens may have the same text: the likelier one comes first
                row.setdefault(self.processor.tokenizer.decode([token]), value)
            rows.append(row)
        return rows

    @torch.inference_mode()
    def _ask(
        self,
        groups: list[ImageGroup],
        prompts: list[str],
        noun: str,
        read: Callable[[dict], list],
        show_progress: bool,
        labels: tuple[str, str] | None = None,
    ) -> list:
        """What `read` makes of the inputs of each question."""
        keys = [tuple(image_key(image) for image in group) for group in groups]
        order = order_for_sharing(keys, prompts)
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        images = _Images(patch_size_of(self.processor), self._prepare, groups, batches)
        answers: list = [None] * len(groups)
        progress = tqdm(total=len(groups), desc=f"Scoring {noun}s", unit=noun, disable=not show_progress)
        # A surrounding autocast would change the scores with the place they are computed in
        with progress, torch.autocast(self.device.type, enabled=False):
            for number, indices in enumerate(batches):
                inputs = self._inputs([prompts[index] for index in indices], images.of_batch(number), labels)
                if self._takes_encoded_images:
                    inputs = share_prefixes(self._network, inputs, [keys[index] for index in indices])
                for index, answer in zip(indices, read(inputs), strict=True):
                    if any(map(math.isnan, answer.values() if isinstance(answer, dict) else [answer])):
                        raise ValueError(
                            f"The score of {noun} {index} is not a number: the weights of {self.name!r} are not finite, "
                            f"or overflow in {self.model.dtype}. Use `dtype='float32'` or check the weights."
                        )
                    answers[index] = answer
                progress.update(len(indices))
        return answers

    def _inputs(
        self, prompts: list[str], images: list, labels: tuple[str, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """
        Inputs of the model, padded on the left, so that every row ends where the answer begins.

        `images` are those of all questions in order, in the same number for each: encoded ones (features and patch
        grid) where the model takes them, as [`_Images`] gives them, PIL images elsewhere.
        """
        count = len(images) // len(prompts)
        content = [{"type": "image"}] * count
        if labels is not None:
            content = [part for label in labels for part in ({"type": "text", "text": label}, {"type": "image"})]
        system = []
        if self.system_prompt is not None:
            system = [{"role": "system", "content": [{"type": "text", "text": self.system_prompt}]}]
        texts = [
            self.processor.apply_chat_template(
                [*system, {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt in prompts
        ]
        # The chat template has written the special tokens already, that of the beginning among them
        text_kwargs = {
            "padding": True,
            "padding_side": "left",
            "add_special_tokens": False,
            "return_tensors": "pt",
        }
        if isinstance(images[0], Image.Image):
            # Of each text: some processors have to know which are whose
            groups = [images[start : start + count] for start in range(0, len(images), count)]
            return self.processor(text=texts, images=groups, **text_kwargs).to(self.device)

        grids = torch.stack([grid for _, grid in images])  # (images, 3)
        slots = [self.processor.replace_image_token({"image_grid_thw": grids}, slot) for slot in range(len(images))]
        texts, _ = self.processor.get_text_with_replacements(texts, slots)
        inputs = self.processor.tokenizer(texts, **text_kwargs)
        inputs["mm_token_type_ids"] = torch.tensor(self.processor.create_mm_token_type_ids(inputs["input_ids"]))
        inputs["image_grid_thw"] = grids
        encoded = BaseModelOutputWithPooling(pooler_output=tuple(features for features, _ in images))
        return {**inputs, "mm_encoder_outputs": {"image": encoded}}

    def _prepare(self, images: list[Image.Image]) -> list:
        """Features and patch grid of each image, from one forward of the vision tower; else the images themselves."""
        if not self._takes_encoded_images:
            return images
        inputs = self.processor.image_processor(images, return_tensors="pt")
        grids = inputs["image_grid_thw"]  # (images, 3)
        outputs = self._network.get_image_features(
            inputs["pixel_values"].to(self.device), grids.to(self.device), return_dict=True
        )
        return list(zip(outputs.pooler_output, grids, strict=True))


class _Images:
    """The distinct images of a call: each is read, and encoded, when a batch first needs it, and kept until the last."""

    def __init__(
        self,
        patch_size: int,
        prepare: Callable[[list[Image.Image]], list],
        groups: list[ImageGroup],
        batches: list[list[int]],
    ):
        self.patch_size = patch_size
        self.prepare = prepare
        self.groups = groups
        self.batches = batches
        self.ready: dict = {}
        # Number of the last batch that needs an image
        self.last_use = {
            image_key(image): number
            for number, batch in enumerate(batches)
            for index in batch
            for image in groups[index]
        }

    def of_batch(self, number: int) -> list:
        keys, missing = [], {}
        for index in self.batches[number]:
            group = self.groups[index]
            for place, image in enumerate(group):
                key = image_key(image)
                keys.append(key)
                if key not in self.ready and key not in missing:
                    missing[key] = load_image(image, self.patch_size, name_image(group, place, index))
        if missing:
            self.ready.update(zip(missing, self.prepare(list(missing.values())), strict=True))
        images = [self.ready[key] for key in keys]
        self.ready = {key: image for key, image in self.ready.items() if self.last_use[key] > number}
        return images


def _below_adapter(model: str, kwargs: dict) -> tuple[str, dict, bool]:
    """The model itself, or that below an adapter, with the arguments to load it, and whether it is below one."""
    hub_kwargs = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    if find_adapter_config_file(model, **hub_kwargs) is None:
        return model, kwargs, False
    config = PeftConfig.from_pretrained(model, **hub_kwargs)
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"The adapter {model!r} does not name the model below it: `base_model_name_or_path` in its "
            "adapter_config.json is empty. Put the model's Hub id or folder there."
        )
    base_kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    if config.revision is not None:
        base_kwargs["revision"] = config.revision
    return base, base_kwargs, True


def _check_loading(model: str, info: dict) -> None:
    # transformers only reports them: what is missing is random then, and what has no place is left out
    faults = {
        "are not among its files": info["missing_keys"],
        "have no place in it": info["unexpected_keys"],
        "have another shape": info["mismatched_keys"],
    }
    found = [
        f"{len(names)} weights {what} ({sorted(map(str, names))[0]}, ...)" for what, names in faults.items() if names
    ]
    if found:
        raise ValueError(
            f"The weights of {model!r} do not fit the model that its config.json describes: {'; '.join(found)}. Such a "
            "judge would score by chance. The files are incomplete, or of another version of transformers: save the "
            "model again with a current one."
        )


def rename_old_layers(names: Iterable[str], model_type: str) -> list[str]:
    """
    Gives the names that layers have now, for those of adapters that were trained before transformers 4.52.

    Args:
        names (`Iterable[str]`):
            Names of layers or weights, as the model itself has them.
        model_type (`str`):
            Type of the model in its config.

    Returns:
        `list[str]`: in the same order; current names are left as they are.
    """
    names = list(names)
    if model_type in _ENCODED_IMAGES:
        for old, new in _OLD_LAYERS.items():
            names = [re.sub(old, new, name) for name in names]
    return names


def has_processor(model: str, **hub_kwargs) -> bool:
    """
    Whether a model or adapter comes with a processor.

    Args:
        model (`str`):
            Hub id or folder.
        **hub_kwargs:
            `revision`, `token` and the like.

    Returns:
        `bool`.
    """
    return any(
        cached_file(model, name, _raise_exceptions_for_missing_entries=False, **hub_kwargs) is not None
        for name in ("processor_config.json", "preprocessor_config.json")
    )


def safetensors_of(adapter: str, **hub_kwargs) -> str:
    """
    Finds the weights of an adapter in PEFT's format, which would itself fall back to a pickle.

    Args:
        adapter (`str`):
            Hub id or folder.
        **hub_kwargs:
            `revision`, `token` and the like.

    Returns:
        `str`: path of the file.

    Raises:
        ValueError: there is none.
    """
    weights = cached_file(
        adapter, "adapter_model.safetensors", _raise_exceptions_for_missing_entries=False, **hub_kwargs
    )
    if weights is None:
        raise ValueError(
            f"The adapter {adapter!r} has no adapter_model.safetensors. Other formats are pickles, which can run code; "
            "convert it, or ask for a safetensors file."
        )
    return weights


def load_judge_adapter(network: PreTrainedModel, adapter: str, **hub_kwargs) -> PeftModel:
    """
    Puts an adapter on a vision-language model, also one with the names of layers of older versions of transformers.

    Args:
        network ([`~transformers.PreTrainedModel`]):
            Model; it gets the adapter's layers in place.
        adapter (`str`):
            Hub id or folder.
        **hub_kwargs:
            `revision`, `token` and the like.

    Returns:
        [`~peft.PeftModel`].

    Raises:
        ValueError: it has no safetensors file, or does not fit the model.
    """
    weights = safetensors_of(adapter, **hub_kwargs)
    model_type = network.config.model_type
    config = PeftConfig.from_pretrained(adapter, **hub_kwargs)
    if not isinstance(config.target_modules, str):  # a pattern, or a list which may be of whole names
        config.target_modules = set(rename_old_layers(config.target_modules or [], model_type))
    fault = None
    with warnings.catch_warnings():
        # An adapter whose names do not fit is loaded as no adapter at all, with a warning
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            model = PeftModel.from_pretrained(
                network,
                adapter,
                config=config,
                torch_device="cpu",
                key_mapping=_OLD_LAYERS if model_type in _ENCODED_IMAGES else None,
                **hub_kwargs,
            )
        except (UserWarning, ValueError, RuntimeError) as problem:
            fault = problem
    if fault is None:
        # Weights for layers that the configuration does not name are left out without a word
        with safe_open(weights, "pt") as file:
            names = set(rename_old_layers((name.removeprefix(_PEFT_PREFIX) for name in file.keys()), model_type))
        placed = {
            name.removeprefix(_PEFT_PREFIX) for name in get_peft_model_state_dict(model, save_embedding_layers=False)
        }
        if names <= placed:
            return model
        fault = f"there is no place for {sorted(names - placed)}"
    raise ValueError(
        f"The adapter {adapter!r} does not fit {type(network).__name__} {network.name_or_path!r}: {str(fault)[:300]} It "
        "was trained on another model, or its layers have the names of another version of transformers: merge it with "
        "that version and give the merged model."
    )
