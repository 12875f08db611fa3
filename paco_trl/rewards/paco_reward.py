# SPDX-License-Identifier: Apache-2.0
"""PaCo-Reward: a vision-language model that judges whether two images are consistent, and explains why."""

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from peft import PeftConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.peft_utils import find_adapter_config_file

from ..utils.deepspeed import without_zero3_init
from ..utils.files import read_record
from ..utils.fingerprint import weights_fingerprint
from ..utils.images import reading
from ..utils.model_files import (
    CARD_DATA_FILE,
    IMAGE_MODEL,
    find_adapter_file,
    find_model_file,
    hub_arguments,
    models_near,
)
from ..utils.names import check_model_name, public_name
from ..utils.quantization import avoid_packed_nf4, quantization_config
from ..utils.tensors import to_device
from ..utils.vision_language import find_control_tokens, load_image, patch_size_of, tower_arguments
from .judge import (
    LEAST_MASS,
    SPACES,
    TOP_LOGPROBS,
    ImageGroup,
    ImagePair,
    ImageSource,
    broadcast_questions,
    check_list,
    check_pairs,
    digits_of,
    expected_rating,
    image_key,
    read_question,
    score_both_orders,
)
from .prefix_sharing import order_for_sharing, share_prefixes


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Model types that accept images as features already encoded by the vision tower, one tensor per image
_ENCODED_IMAGES = ("qwen2_vl", "qwen2_5_vl")
# Pixels to encode together: 16 images of 512 x 512 pixels, the size of a batch of 8 pairs. About 1 GiB of activations
# in bf16 for the published judges
_PIXELS_PER_FORWARD = 2**22
# Prefix that PeftModel adds to the names of weights
_PEFT_PREFIX = "base_model.model."
# Config entries of models that scale their logits after the head
_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
# Layer names in adapters older than transformers 4.52 -> current names
_OLD_LAYERS = {r"^model\.(?=layers|norm|embed_tokens)": "model.language_model.", r"^visual": "model.visual"}


class PaCoReward:
    """
    Pairwise consistency judge ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2). The score of two images
    and a question is P(Yes) / (P(Yes) + P(No)) at the first position of the model's answer.

    One forward pass scores a batch of pairs; nothing is generated. With a model of the Qwen2-VL or Qwen2.5-VL family,
    the vision tower encodes each image once per call of [`~PaCoReward.score`], and questions of a batch that begin
    with the same images share the language model's work on them.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Vision-language model. It is set to eval mode.
        processor ([`~transformers.ProcessorMixin`]):
            Its processor.
        name (`str`, *optional*):
            Name for reports. Defaults to the model's name.
        batch_size (`int`, *optional*, defaults to `8`):
            Questions per forward pass.

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
        if batch_size < 1:  # a negative one would ask no question
            raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
        self.model = model.eval()
        self.processor = processor
        self.yes_id, self.no_id = decision_token_ids(processor.tokenizer)
        self.name: str = name or model.name_or_path
        self.batch_size = batch_size
        self._network = model.get_base_model() if isinstance(model, PeftModel) else model
        # These models encode each image once, and questions share prefixes. Other models run in full: same scores,
        # more work.
        self._takes_encoded_images = self._network.config.model_type in _ENCODED_IMAGES
        self.question: str | None = None  # question that it was trained on, if it is a single one
        self.missing_score_reason: str | None = None  # why the last question without a score has none
        self._hidden_state: Any = None
        self._network.get_output_embeddings().register_forward_pre_hook(self._keep_hidden_state)
        avoid_packed_nf4(self._network)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        batch_size: int = 8,
        trust_remote_code: bool = False,
        quantization: str | None = None,
        **kwargs,
    ) -> "PaCoReward":
        """
        Load a judge. Only safetensors files are read.

        Args:
            model (`str` or `Path`):
                Hub id or directory of a full model (a merged judge, or any vision-language model), or of a LoRA
                adapter with its base model in `adapter_config.json`.
            device (`str` or `torch.device`, *optional*):
                Defaults to this process's accelerator, or the CPU if there is none.
            dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
                Dtype of the model; `"auto"` keeps the dtype of its files.
            batch_size (`int`, *optional*, defaults to `8`):
                Questions per forward pass.
            trust_remote_code (`bool`, *optional*, defaults to `False`):
                Whether to run code that comes with the model.
            quantization (`str`, *optional*):
                Quantization of the weights: `"nf4"` (bitsandbytes), `"int8"` or `"fp8"` (torchao). NF4 computes in
                `dtype`, or in bfloat16 if that is `"auto"`. For other methods pass a `quantization_config`.
            **kwargs:
                Further arguments of [`~transformers.PreTrainedModel.from_pretrained`]; `revision` and `subfolder`
                apply to the named repository, not to an adapter's base model.

        Raises:
            ValueError: If weights are missing or unexpected, an adapter does not fit its base model, or the tokenizer
                does not encode Yes and No as one token each.
        """
        model = os.fspath(model)
        if dtype != "auto" and not isinstance(getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype):
            raise ValueError(f"`dtype` is {dtype!r}; pass 'auto' or a dtype of torch, such as 'bfloat16'.")
        if quantization is not None:
            compute_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
            config = quantization_config(quantization, compute_dtype)
            kwargs = dict(quantization_config=config, **kwargs)  # raises if both are passed
        # The processor comes first: the tokenizer may lack Yes and No, and the weights have gigabytes
        processor = cls.load_processor(model, trust_remote_code, **kwargs)
        base, base_kwargs, is_adapter = resolve_base_model(model, kwargs)
        # An active ZeRO-3 config would leave the weights empty
        with without_zero3_init():
            options = {**base_kwargs, "dtype": dtype, "use_safetensors": True, "trust_remote_code": trust_remote_code}
            network, info = AutoModelForImageTextToText.from_pretrained(base, output_loading_info=True, **options)
            _check_loading(base, info)
            if is_adapter:
                network = load_judge_adapter(network, model, **hub_arguments(kwargs))
        network.to(device if device is not None else PartialState().device)
        judge = cls(network, processor, model, batch_size)
        judge.question = read_question(model, **hub_arguments(kwargs))
        return judge

    @staticmethod
    def load_processor(model: str | Path, trust_remote_code: bool = False, **kwargs) -> ProcessorMixin:
        """Load the processor of a judge (or of an adapter's base model) without the weights; check its tokenizer."""
        name = model = os.fspath(model)
        base, base_kwargs, is_adapter = resolve_base_model(model, kwargs)
        if is_adapter and not has_processor(model, **hub_arguments(kwargs)):
            model, kwargs = base, base_kwargs
        try:
            processor = AutoProcessor.from_pretrained(
                model, trust_remote_code=trust_remote_code, **hub_arguments(kwargs)
            )
        except (OSError, ValueError) as error:
            if (what := describe_image_model(name, base)) is not None:
                raise ValueError(f"{name!r} is {what}, no vision-language model, as a judge must be.") from error
            if isinstance(error, OSError):  # its message may not name the model
                raise OSError(f"The judge {model!r} cannot be read. {error}") from error
            raise ValueError(f"{model!r} is no vision-language model, as a judge must be. {error}") from error
        decision_token_ids(processor.tokenizer)
        if processor.chat_template is None:
            raise ValueError(f"{model!r} has no chat template. Save it with its processor, or use another model.")
        return processor

    @property
    def fingerprint(self) -> str:
        """Return a digest of sampled weights, to tell judges of the same name apart."""
        return weights_fingerprint(self.model)

    @property
    def model_name(self) -> str:
        """Return the name of the model for cards, never a path."""
        return public_name(str(self.name))

    @property
    def patch_size(self) -> int:
        """Return the patch size of the vision tower in pixels."""
        return patch_size_of(self.processor)

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.model.device

    def score(self, images: list[ImagePair], prompts: str | list[str], symmetric: bool = False) -> list[float]:
        """
        Score pairs of images.

        Apart from rounding, a score does not depend on the other pairs of the call. An image shared by several pairs
        (the same object or path) is encoded once.

        Args:
            images (`list[tuple]`):
                Pairs; each image is a PIL image, a path, or the bytes of an image file.
            prompts (`str` or `list[str]`):
                Question for each pair, or one for all. [`~paco_trl.data.theme_question`] and the other question
                functions of `paco_trl.data` return the questions of the published code.
            symmetric (`bool`, *optional*, defaults to `False`):
                Whether to score both orders of each pair and take the mean, at twice the cost.

        Returns:
            `list[float]`: P(Yes) / (P(Yes) + P(No)) of each pair.
        """
        pairs = check_pairs(images)
        prompts = self._check_prompts(prompts, len(images))
        return score_both_orders(self._scores, pairs, prompts) if symmetric else self._scores(pairs, prompts)

    def decide(self, images: list[ImagePair], prompts: str | list[str]) -> list[float | None]:
        """
        Score pairs of images like [`~PaCoReward.score`], but return `None` if Yes and No have less than half of the
        probability at the first position, for example because the model thinks first. Used by rewards.
        """
        read_answers = functools.partial(self._probabilities, least_mass=LEAST_MASS)
        return self._query(check_pairs(images), self._check_prompts(prompts, len(images)), read_answers)

    def score_sets(
        self, image_sets: list[list[ImageSource]], prompts: str | list[str], symmetric: bool = False
    ) -> list[float]:
        """
        Score sets of images by the mean over all unordered pairs (`itertools.combinations`).

        Args:
            image_sets (`list[list]`):
                Sets of at least two images, such as the panels of a grid.
            prompts (`str` or `list[str]`), symmetric (`bool`, *optional*, defaults to `False`):
                Question for each set, or one for all; see [`~PaCoReward.score`].
        """
        image_sets = check_list(image_sets, "image_sets")
        prompts = self._check_prompts(prompts, len(image_sets))
        sets = [list(combinations(check_list(images, "image_sets[...]"), 2)) for images in image_sets]
        if not all(sets):
            raise ValueError("Each of `image_sets` must have at least two images.")
        questions = [prompt for prompt, pairs in zip(prompts, sets, strict=True) for _ in pairs]
        scores = iter(self.score(list(chain(*sets)), questions, symmetric))
        return [sum(next(scores) for _ in pairs) / len(pairs) for pairs in sets]

    def score_images(self, images: list[ImageSource], prompts: str | list[str]) -> list[float]:
        """
        Score questions about one image each, for example whether it shows what a text says.

        Args:
            images (`list`):
                Image of each question; see [`~PaCoReward.score`].
            prompts (`str` or `list[str]`):
                Question for each image, or one for all. See [`~paco_trl.data.shows_question`].
        """
        images = check_list(images)
        return self._scores([(image,) for image in images], self._check_prompts(prompts, len(images)))

    def rate(self, images: Sequence[ImageGroup], prompts: str | list[str], scale: int = 5) -> list[float | None]:
        """
        Rate images by a rubric: the mean of the numbers 0 to `scale`, weighted by their probabilities at the first
        position of the answer, divided by `scale`; `None` if they have less than half of the probability.

        Args:
            images (`list[tuple]`):
                Pairs of images, or tuples of one image; see [`~PaCoReward.score`].
            prompts (`str` or `list[str]`):
                Rubric for each, or one for all. It should ask for a number from 0 to `scale` before anything else.
            scale (`int`, *optional*, defaults to `5`):
                Best rating, 1 to 9; the tokenizer must have each number as a token.
        """
        tokens = digit_tokens(self.processor.tokenizer, scale)
        ids = torch.tensor(list(tokens.values()), device=self._network.get_output_embeddings().weight.device)
        read_answers = functools.partial(self._token_logprobs, tokens=list(tokens), ids=ids)
        groups = [check_list(group, "images[...]") for group in check_list(images)]
        answers = self._query(groups, self._check_prompts(prompts, len(groups)), read_answers)
        return [expected_rating(answer.items(), scale) for answer in answers]

    def top_logprobs(
        self, images: list[ImagePair], prompts: str | list[str], image_labels: tuple[str, str] | None = None
    ) -> list[dict[str, float]]:
        """
        Return the 20 likeliest first tokens of each answer with their log-probabilities, like a server.

        Evaluations with `protocol="published"` use them. They come from the logits in the dtype of the model.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`):
                See [`~PaCoReward.score`].
            image_labels (`tuple[str, str]`, *optional*):
                Text before the first and before the second image. If `None`, none.
        """
        pairs = check_pairs(images)
        prompts = self._check_prompts(prompts, len(images))
        return self._query(pairs, prompts, self._top_tokens, image_labels)

    @torch.inference_mode()
    def explain(self, images: list[ImagePair], prompts: str | list[str], max_new_tokens: int = 512) -> list[str]:
        """
        Generate full answers greedily: Yes or No, and the reasons.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`):
                See [`~PaCoReward.score`].
            max_new_tokens (`int`, *optional*, defaults to `512`):
                Length at which an answer is cut.
        """
        pairs = check_pairs(images)
        prompts = self._check_prompts(prompts, len(images))
        answers = []
        for start in range(0, len(pairs), self.batch_size):
            pair_images = [
                load_image(image, self.patch_size, f"An image of question {index}")
                for index, pair in enumerate(pairs[start : start + self.batch_size], start)
                for image in pair
            ]
            inputs = self._inputs(prompts[start : start + self.batch_size], pair_images)
            # The published configs sample, and penalize repetitions. Override them: explanations should match scores.
            with torch.autocast(self.device.type, enabled=False):
                output_ids = self.model.generate(
                    **inputs, max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.0
                )
            output_ids = output_ids[:, inputs["input_ids"].shape[1] :]
            answers += self.processor.batch_decode(output_ids, skip_special_tokens=True)
        self._hidden_state = None
        return answers

    def _check_prompts(self, prompts: str | list[str], count: int) -> list[str]:
        control_tokens = find_control_tokens(self.processor)
        return broadcast_questions(prompts, count, lambda prompt: control_tokens)

    def _keep_hidden_state(self, module: torch.nn.Module, args: tuple) -> None:
        self._hidden_state = args[0]

    def _probabilities(self, inputs: dict, least_mass: float = 0.0) -> list[float | None]:
        """Compute P(Yes) / (P(Yes) + P(No)) of each row, the sigmoid of the difference between the two logits."""
        logits, hidden = self._last_logits(inputs)
        # In float32 from the hidden state: bf16 logits are too coarse, spaced by 1/8 above 16
        if scales_logits(self._network.config):
            logits = logits.float()
            difference = logits[:, self.yes_id] - logits[:, self.no_id]
        else:
            direction, offset = decision_direction(self._network.get_output_embeddings(), (self.yes_id, self.no_id))
            difference = hidden.to(direction.device) @ direction + offset
        scores = torch.sigmoid(difference.cpu().double()).tolist()
        if not least_mass:
            return scores
        masses = self._masses(logits, [self.yes_id, self.no_id], "Yes and No")
        return [None if mass < least_mass else score for score, mass in zip(scores, masses, strict=True)]

    def _masses(self, logits: torch.Tensor, ids: list[int] | torch.Tensor, answers: str) -> list[float]:
        """Return the total probability of some tokens in each row of logits `(B, V)`; record why if it is small."""
        masses = logits.float().softmax(dim=-1)[:, ids].sum(dim=-1).tolist()
        for mass, likeliest in zip(masses, logits.argmax(dim=-1).tolist(), strict=True):
            if mass < LEAST_MASS:
                token = self.processor.tokenizer.decode([likeliest])
                self.missing_score_reason = (
                    f"{answers} have {mass:.2%} of the probability of the judge's first token, of which half "
                    f"is required; the likeliest is {token!r}"
                )
        return masses

    def _last_logits(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits `(B, V)` of the first position of each answer, and hidden states `(B, D)` in float32."""
        logits = self.model(**inputs, logits_to_keep=1, use_cache="past_key_values" in inputs).logits[:, -1]
        hidden = self._hidden_state[:, -1].float()
        self._hidden_state = None
        return logits, hidden

    def _token_logprobs(self, inputs: dict, tokens: list[str], ids: torch.Tensor) -> list[dict[str, float]]:
        """Compute the log-probabilities of some tokens, from float32 logits as in `_probabilities`."""
        logits, hidden = self._last_logits(inputs)
        logits = logits.float()
        self._masses(logits, ids, f"The digits {tokens[0].strip(SPACES)} to {tokens[-1].strip(SPACES)}")
        head = self._network.get_output_embeddings()
        if not scales_logits(self._network.config):
            bias = None if head.bias is None else head.bias.detach()[ids].float()
            logits[:, ids] = F.linear(hidden.to(ids.device), head.weight.detach()[ids].float(), bias).to(logits.device)
        return [dict(zip(tokens, row, strict=True)) for row in logits.log_softmax(dim=-1)[:, ids].tolist()]

    def _top_tokens(self, inputs: dict) -> list[dict[str, float]]:
        """Return the likeliest tokens of each row, as text, with their log-probabilities."""
        logits, _ = self._last_logits(inputs)
        values, ids = logits.float().log_softmax(dim=-1).topk(min(TOP_LOGPROBS, logits.shape[-1]))  # (B, 20)
        rows = []
        for logprobs, tokens in zip(values.tolist(), ids.tolist(), strict=True):
            row: dict[str, float] = {}
            for logprob, token in zip(logprobs, tokens, strict=True):
                # Tokens may share a text. The likelier one comes first: keep it.
                row.setdefault(self.processor.tokenizer.decode([token]), logprob)
            rows.append(row)
        return rows

    def _scores(self, groups: Sequence[ImageGroup], prompts: list[str]) -> list[float]:
        return self._query(groups, prompts, self._probabilities)

    @torch.inference_mode()
    def _query(
        self,
        groups: Sequence[ImageGroup],
        prompts: list[str],
        read_answers: Callable[[dict], list],
        labels: tuple[str, str] | None = None,
    ) -> list:
        """Return one answer per question, computed from the inputs of a batch by `read_answers`."""
        keys = [tuple(image_key(image) for image in group) for group in groups]
        order = order_for_sharing(keys, prompts)
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        answers: list = [None] * len(groups)
        # A surrounding autocast would change the scores
        with torch.autocast(self.device.type, enabled=False):
            for indices, images in zip(batches, self._image_batches(groups, batches), strict=True):
                inputs = self._inputs([prompts[index] for index in indices], images, labels)
                if self._takes_encoded_images:
                    inputs = share_prefixes(self._network, inputs, [keys[index] for index in indices])
                for index, answer in zip(indices, read_answers(inputs), strict=True):
                    values = answer.values() if isinstance(answer, dict) else [answer]
                    if any(value is not None and math.isnan(value) for value in values):
                        raise ValueError(
                            f"The score of question {index} is not a number: {self.name!r} overflows in "
                            f"{self.model.dtype}, or has weights that are not finite. Try 'float32'."
                        )
                    answers[index] = answer
        return answers

    def _image_batches(self, groups: Sequence[ImageGroup], batches: list[list[int]]) -> Iterator[list]:
        """Yield the images of each batch; each is encoded once, and kept until the last batch that uses it."""
        pixel_budget = _PIXELS_PER_FORWARD if self._takes_encoded_images else 0
        batch_keys = [[image_key(image) for index in batch for image in groups[index]] for batch in batches]
        last_use = {key: batch_index for batch_index, keys in enumerate(batch_keys) for key in keys}
        encoded_images: dict = {}
        for batch_index, keys in enumerate(batch_keys):
            if not encoded_images.keys() >= set(keys):
                # Encode images of later batches along with these, as far as the pixel budget allows
                new_images: dict = {}
                pixels = 0
                indices = chain.from_iterable(batches[batch_index:])
                upcoming = ((index, image) for index in indices for image in groups[index])
                for position, (index, image) in enumerate(upcoming):
                    key = image_key(image)
                    if key in encoded_images or key in new_images:
                        continue
                    if position >= len(keys) and pixels >= pixel_budget:
                        break
                    new_images[key] = load_image(image, self.patch_size, f"An image of question {index}")
                    pixels += math.prod(new_images[key].size)
                encoded_images.update(zip(new_images, self._encode(list(new_images.values())), strict=True))
            images = [encoded_images[key] for key in keys]
            encoded_images = {key: image for key, image in encoded_images.items() if last_use[key] > batch_index}
            yield images

    def _inputs(self, prompts: list[str], images: list, labels: tuple[str, str] | None = None) -> dict[str, Any]:
        """Build left-padded inputs from all questions' images, either PIL images or features with patch grids."""
        count = len(images) // len(prompts)
        content = [{"type": "image"}] * count
        if labels is not None:
            content = list(chain(*(({"type": "text", "text": label}, {"type": "image"}) for label in labels)))
        turns = [[{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}] for prompt in prompts]
        texts = self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # The chat template has already added the special tokens
        text_kwargs = {"padding": True, "padding_side": "left", "add_special_tokens": False, "return_tensors": "pt"}
        if isinstance(images[0], Image.Image):
            # Some processors need to know which images belong to which text
            groups = [images[start : start + count] for start in range(0, len(images), count)]
            return self.processor(text=texts, images=groups, **text_kwargs).to(self.device)

        grids = torch.stack([grid for _, grid in images])  # (images, 3)
        slots = [self.processor.replace_image_token({"image_grid_thw": grids}, slot) for slot in range(len(images))]
        texts, _ = self.processor.get_text_with_replacements(texts, slots)
        inputs = self.processor.tokenizer(texts, **text_kwargs)
        inputs["mm_token_type_ids"] = torch.tensor(self.processor.create_mm_token_type_ids(inputs["input_ids"]))
        inputs["image_grid_thw"] = grids
        encoder_output = BaseModelOutputWithPooling(pooler_output=tuple(features for features, _ in images))
        return {**inputs, "mm_encoder_outputs": {"image": encoder_output}}

    def _encode(self, images: list[Image.Image]) -> list:
        """Encode images to features and patch grids in one forward pass, if the model accepts those."""
        if not self._takes_encoded_images:
            return images
        inputs = self.processor.image_processor(images, return_tensors="pt")
        grids = inputs["image_grid_thw"]  # (images, 3), on the CPU
        arguments = tower_arguments(self._network.get_encoder("image"), grids, self.device)
        pixel_values = to_device(inputs["pixel_values"], self.device)
        outputs = self._network.get_image_features(pixel_values, grids, return_dict=True, **arguments)
        return list(zip(outputs.pooler_output, grids, strict=True))


def decision_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Look up the token ids of Yes and No. Each must be one token."""
    yes, no = (tokenizer.encode(answer, add_special_tokens=False) for answer in ("Yes", "No"))
    if len(yes) != 1 or len(no) != 1:
        raise ValueError(
            f"{type(tokenizer).__name__} encodes 'Yes' as {len(yes)} tokens and 'No' as {len(no)}, but a judge must "
            "have one token for each. Use another model, for example Qwen2.5-VL."
        )
    return yes[0], no[0]


def digit_tokens(tokenizer: PreTrainedTokenizerBase, scale: int) -> dict[str, int]:
    """Look up the tokens of the numbers 0 to `scale`, with and without a leading space, and their ids."""
    digits = digits_of(scale)
    vocabulary = tokenizer.get_vocab()
    tokens = [space + digit for digit in digits for space in ("", *SPACES) if space + digit in vocabulary]
    if missing := {*digits} - {token[-1] for token in tokens}:
        raise ValueError(f"The tokenizer {type(tokenizer).__name__} has no token {min(missing)!r}. Use another model.")
    return {token: vocabulary[token] for token in tokens}


def decision_direction(
    head: torch.nn.Module, decision_ids: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return direction `(D,)` and offset that give logit(Yes) - logit(No) from a hidden state, in float32."""
    # Read rows one by one: the host would wait for a list of indices to be copied to the device
    yes, no = (head.weight.detach()[token].float() for token in decision_ids)
    if head.bias is None:
        return yes - no, 0.0
    bias_yes, bias_no = (head.bias.detach()[token].float() for token in decision_ids)
    return yes - no, bias_yes - bias_no


def scales_logits(config: PreTrainedConfig) -> str | None:
    """Return the config entry that scales logits after the head, or `None`: [`decision_direction`] would miss it."""
    text_config = config.get_text_config()
    return next((name for name in _LOGIT_SCALES if getattr(text_config, name, None) not in (None, 1, 1.0)), None)


def resolve_base_model(model: str, kwargs: dict) -> tuple[str, dict, bool]:
    """Return an adapter's base model, or the model itself; its loading arguments; and whether it was an adapter."""
    check_model_name(model)
    hub_kwargs = hub_arguments(kwargs)
    if find_adapter_config_file(model, **hub_kwargs) is None:
        return model, kwargs, False
    with reading(f"The adapter {model!r}", "Save it again, or name another"):
        config = PeftConfig.from_pretrained(model, **hub_kwargs)
        base = config.base_model_name_or_path and os.fspath(config.base_model_name_or_path)
    if not base:
        raise ValueError(f"{model!r} names no base model. Set `base_model_name_or_path` in its adapter_config.json.")
    # A relative path begins where the judge was trained
    base = next(iter(models_near(model, [base])), base)
    base_kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    return base, base_kwargs if config.revision is None else {**base_kwargs, "revision": config.revision}, True


def read_judge_config(model: str) -> PreTrainedConfig:
    """Return the config of a judge, or of an adapter's base model, or raise an error that names the model."""
    base = model
    try:
        base = resolve_base_model(model, {})[0]
        return AutoConfig.from_pretrained(base)
    except (OSError, ValueError) as error:  # its message may not name the model
        if (what := describe_image_model(model, base)) is not None:
            raise OSError(f"The reward model '{model}' is {what}. Pass a vision-language model.") from error
        raise OSError(f"The reward model '{model}' cannot be read. {error}") from error


def describe_image_model(model: str, base: str) -> str | None:
    """Describe a model that was passed as a judge but generates images; `None` for other models."""
    is_ours = read_record(os.path.join(model, CARD_DATA_FILE)).get("kind") == IMAGE_MODEL
    if not is_ours and not os.path.isfile(os.path.join(base, "model_index.json")):
        return None
    return "an image pipeline" if base == model else f"an adapter of the image pipeline '{base}'"


def _check_loading(model: str, info: dict) -> None:
    # transformers only warns: missing weights are left random, and unexpected ones ignored
    faults = {kind: sorted(map(str, info[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
    if any(faults.values()):
        counts = [f"{len(names)} weights are {kind} ({names[0]}, ...)" for kind, names in faults.items() if names]
        raise ValueError(
            f"The weights of {model!r} do not match its config.json: {'; '.join(counts)}. Save the model again with a "
            "current version of transformers."
        )


def rename_old_layers(names: Iterable[str], model_type: str) -> list[str]:
    """Update layer or weight names of adapters that were trained before transformers 4.52."""
    for old, new in _OLD_LAYERS.items() if model_type in _ENCODED_IMAGES else ():
        names = [re.sub(old, new, name) for name in names]
    return list(names)


def has_processor(model: str, **hub_kwargs) -> bool:
    """Return whether a model or adapter (Hub id or directory) comes with a processor."""
    return any(find_model_file(model, name, **hub_kwargs) is not None for name in PROCESSOR_FILES)


def load_judge_adapter(network: PreTrainedModel, adapter: str, **hub_kwargs) -> PeftModel:
    """Load an adapter, possibly with old layer names, into a vision-language model."""
    model_type = network.config.model_type
    file = find_adapter_file(adapter, **hub_kwargs)  # PEFT would fall back to a pickle
    with reading(f"The adapter {adapter!r}", "Save it again, or name another"):
        config = PeftConfig.from_pretrained(adapter, **hub_kwargs)
        state_dict = load_file(file)
    config.inference_mode = True
    if not isinstance(config.target_modules, str):  # a list, maybe with full names; a string is a pattern
        config.target_modules = set(rename_old_layers(config.target_modules or [], model_type))
    names = rename_old_layers((name.removeprefix(_PEFT_PREFIX) for name in state_dict), model_type)
    weights = dict(zip((_PEFT_PREFIX + name for name in names), state_dict.values(), strict=True))
    try:
        model = get_peft_model(network, config)
        set_peft_model_state_dict(model, weights)
        # PEFT drops weights without a layer, and initializes layers without weights
        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
        if mismatched := sorted(weights.keys() ^ expected.keys()):
            raise ValueError(f"missing or unexpected weights {mismatched}.")
    except Exception as error:  # PEFT does not validate a config, so that any error may occur
        raise ValueError(
            f"The adapter {adapter!r} does not fit {type(network).__name__} {network.name_or_path!r}: "
            f"{str(error)[:300]} If it was trained with another version of transformers, merge it with that version."
        ) from error
    return model
