# SPDX-License-Identifier: Apache-2.0
"""Loading of trained adapters and transformers for inference, with the precision and settings of their training."""

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from diffusers import AutoModel, DiffusionPipeline
from huggingface_hub import metadata_load, snapshot_download
from safetensors import SafetensorError, safe_open

from ..checkpointing.checkpoints import find_saved_model, list_checkpoints
from ..hub.card_data import ImageModelCardData, load_card_data
from ..rollout import get_family
from ..rollout.adapters import SavedAdapter, load_transformer_adapter
from ..rollout.loading import read_index
from ..rollout.policy_building import store_as_fp8
from ..utils.files import read_record
from ..utils.fingerprint import digest_model_files, file_digest
from ..utils.model_files import (
    check_generates,
    find_adapter_file,
    find_model_file,
    models_near,
    peft_folder,
    split_adapter,
)
from ..utils.names import check_adapter_base, is_local, is_same_model
from ..utils.option_checks import DTYPES, QUANTIZATIONS
from ..utils.quantization import pipeline_quantization_config
from .offloading import offload_components


logger = logging.getLogger(__name__)

DEFAULT_MODEL = "black-forest-labs/FLUX.1-dev"
_DTYPES = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True)
class PipelineSpec:
    """Specification of a pipeline for [`load_for_inference`], read from small files before any weights."""

    model: str  # Hub id or directory of the base model
    revision: str | None = None  # commit of the base model
    adapter: str | None = None  # Hub id, directory or file, only for the transformer
    lora: str | None = None  # any other LoRA, for example one that includes text encoders
    transformer: str | None = (
        None  # Hub id or directory of a full transformer, used in place of the base model's transformer
    )
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    vae_tiling: bool = False
    offload: bool = True
    card: ImageModelCardData | None = None

    @property
    def name(self) -> str:
        """Return the name of the adapter, LoRA or transformer, or otherwise of the base model."""
        return self.adapter or self.lora or self.transformer or self.model

    @property
    def base(self) -> "PipelineSpec":
        """Return the specification of the base model alone, with the same settings."""
        return replace(self, adapter=None, lora=None, transformer=None)

    @property
    def hub_arguments(self) -> dict[str, str]:
        """Return the arguments of `from_pretrained` for the revision of the base model."""
        return {} if self.revision is None else {"revision": self.revision}

    @property
    def call(self) -> dict[str, Any]:
        """Return the arguments of the pipeline call besides the prompt, from the training run's evaluations."""
        return {} if self.card is None else dict(self.card.call)

    @property
    def settings(self) -> dict[str, Any]:
        """Return how the weights are loaded, for records and reports."""
        settings: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.quantization,
            **self.hub_arguments,
        }
        settings["vae_tiling"] = self.vae_tiling or None
        return {name: value for name, value in settings.items() if value is not None}

    def digest_weights(self) -> dict[str, str]:
        """Return the adapter, LoRA or transformer, with a digest of its weights, for records; downloads if needed."""
        if (adapter := self.adapter or self.lora) is not None:
            return {"adapter": adapter, "adapter_weights": file_digest(find_adapter_file(adapter))}
        if self.transformer is None:
            return {}
        folder = self.transformer
        if not is_local(folder):  # loading would download it anyway
            folder = snapshot_download(folder, allow_patterns=["transformer/*.json", "transformer/*.safetensors"])
        digest = digest_model_files(os.path.join(folder, "transformer"))
        return {"adapter": self.transformer, "adapter_weights": digest or ""}

    def _load_without_adapter(self) -> DiffusionPipeline:
        """Load the pipeline without the `adapter`, on the CPU unless quantization requires a device."""
        index = read_index(self.model, self.hub_arguments)
        options: dict[str, Any] = {"dtype": self.dtype, "use_safetensors": True}
        config = pipeline_quantization_config(self.quantization, self.dtype, index)
        pipeline_kwargs = {**options, **self.hub_arguments} | (
            {} if config is None else {"quantization_config": config}
        )
        if self.transformer is not None:
            quantization_kwargs = (
                {} if config is None else {"quantization_config": config.quant_mapping["transformer"]}
            )
            pipeline_kwargs["transformer"] = AutoModel.from_pretrained(
                self.transformer, subfolder="transformer", trust_remote_code=False, **options, **quantization_kwargs
            )
        # Not the trainer's loader, which rejects pipelines that cannot be trained
        pipeline = DiffusionPipeline.from_pretrained(self.model, **pipeline_kwargs)
        if self.lora is not None:
            pipeline.load_lora_weights(file := find_adapter_file(self.lora))
            if not pipeline.get_list_adapters():  # some pipelines only log that nothing was loaded
                raise ValueError(f"'{file}' is not a LoRA that diffusers can load into {type(pipeline).__name__}.")
        if self.vae_tiling:
            pipeline.vae.enable_tiling()
        return pipeline

    def load(self, device: torch.device | str | None = None) -> DiffusionPipeline:
        """Load the pipeline with its adapter, on a device."""
        execution_device = torch.device(PartialState().device if device is None else device)
        pipeline = self._load_without_adapter()
        transformer = getattr(pipeline, "transformer", None)
        if self.adapter is not None:
            # With fp8 storage, load the adapter in the compute dtype, to which diffusers would not cast it
            options: dict[str, Any] = {"autocast_adapter_dtype": self.quantization != "fp8_storage"}
            adapter = SavedAdapter.read(self.adapter, pipeline)
            pipeline.transformer = load_transformer_adapter(transformer, adapter, **options)
        if self.quantization == "fp8_storage":
            store_as_fp8(pipeline, get_family(pipeline), transformer, self.dtype)
        if self.offload and execution_device.type != "cpu":
            offload_components(pipeline, execution_device)
        else:
            pipeline.to(execution_device)
        return pipeline


def load_for_inference(
    adapter_or_model: str | Path,
    model: str | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
    quantization: str | None = "auto",
    offload: bool | None = None,
    device: torch.device | str | None = None,
) -> tuple[DiffusionPipeline, dict[str, Any]]:
    """
    Load an adapter with its base model, a fully trained transformer, or a plain pipeline, ready to generate images.

    Models saved by paco_trl are loaded as they were trained: their `paco_trl.json` records the base model and its
    revision, the precision, the quantization, and the size, guidance, steps and negative prompt of the run's
    evaluations. Other LoRAs that diffusers supports are loaded into the base model that their config or card names.

    As in training, text encoders and transformer take turns on a GPU, so that the GPU of the training is large enough.

    Args:
        adapter_or_model (`str` or `Path`):
            Hub id or directory of an adapter or a pipeline, a LoRA file, or the output directory of a run (its newest
            model). Weights are read from safetensors, and no code from the model is run.
        model (`str`, *optional*):
            Hub id or directory of the base model. Defaults to the one that the adapter names.
        revision (`str`, *optional*):
            Branch, tag or commit of `adapter_or_model` on the Hub.
        dtype (`torch.dtype` or `str`, *optional*, defaults to `"auto"`):
            Compute dtype. `"auto"` uses the dtype of training, or bfloat16.
        quantization (`str`, *optional*, defaults to `"auto"`):
            Quantization of the transformer and the text encoders: `"nf4"`, `"int8"`, `"fp8"` or `"fp8_storage"`.
            `"auto"` quantizes as in training; `None` does not quantize.
        offload (`bool`, *optional*):
            Whether text encoders and transformer take turns on the device. `False` keeps everything on it, which saves
            time for each new prompt. If `None`, as in training, or `True`.
        device (`torch.device` or `str`, *optional*):
            Device. Defaults to this process's device (see [`~accelerate.PartialState`]).

    Returns:
        `tuple[DiffusionPipeline, dict[str, Any]]`: the pipeline, and the arguments of its call besides the prompt,
        empty if none are recorded.

    Raises:
        TypeError: If `adapter_or_model` is no name, or `offload` no `bool`.
        ValueError: If no base model is named, the adapter was trained on another one, or it belongs to a judge.

    Example:

    ```python
    from paco_trl import load_for_inference

    pipe, call = load_for_inference("user/paco-flux")
    image = pipe(prompt="A red fox in the snow.", **call).images[0]
    ```
    """
    if not isinstance(adapter_or_model, str | os.PathLike):
        raise TypeError(f"`adapter_or_model` is {adapter_or_model!r}; pass a Hub id or a directory.")
    if not isinstance(offload, bool | None):
        raise TypeError(f"`offload` is {offload!r}; pass `True`, `False` or `None`.")
    options: dict[str, Any] = {"revision": revision, "dtype": dtype, "quantization": quantization, "offload": offload}
    spec = read_loading_spec(adapter_or_model, model, **options)
    return spec.load(device), spec.call


def read_loading_spec(
    adapter_or_model: str | Path, model: str | None = None, revision: str | None = None, **options: Any
) -> PipelineSpec:
    """Read how to load a model, from small files only, so that a mistake shows before gigabytes are read."""
    name = os.fspath(adapter_or_model)
    if not _has(name, "model_index.json", revision):
        return read_adapter(name, model, revision, **options)
    if model is not None:
        raise ValueError(f"'{name}' is a pipeline, which has no base model, but `model` is '{model}'. Leave one out.")
    return read_pipeline(name, revision, **options)


def read_pipeline(
    model: str,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
    quantization: str | None = "auto",
    offload: bool | None = None,
    vae_tiling: bool | None = None,
    card: ImageModelCardData | None = None,
) -> PipelineSpec:
    """Return the specification of a pipeline, by default as recorded in a training's `card`. No file is read."""
    loading = {} if card is None else card.loading
    if dtype == "auto":
        dtype = "bfloat16" if card is None else card.settings.get("precision", card.dtype)
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise ValueError(f"`dtype` is {dtype!r}, but must be 'auto' or one of {', '.join(map(repr, _DTYPES))}.")
        dtype = _DTYPES[dtype]
    if quantization == "auto":
        quantization = loading.get("quantization")
        if quantization is None and card is not None and card.lora is not None and card.lora.quantization:
            logger.warning(
                f"The base model was quantized in training ({card.lora.quantization}), but is loaded without "
                f"quantization, since `quantization` only takes {', '.join(QUANTIZATIONS)}."
            )
    if quantization not in (None, *QUANTIZATIONS):
        choices = ", ".join(map(repr, QUANTIZATIONS))
        raise ValueError(f"`quantization` is {quantization!r}, but must be 'auto', None or one of {choices}.")
    pipeline_quantization_config(quantization, dtype, ())  # raises if the machine lacks something
    offload = loading.get("offload", True) if offload is None else offload
    vae_tiling = loading.get("vae_tiling", False) if vae_tiling is None else vae_tiling
    loading_options: dict[str, Any] = {"offload": bool(offload), "vae_tiling": bool(vae_tiling), "card": card}
    return PipelineSpec(model, revision, dtype=dtype, quantization=quantization, **loading_options)


def read_adapter(name: str, model: str | None = None, revision: str | None = None, **options: Any) -> PipelineSpec:
    """Read the specification of an adapter or a full transformer. `options` are those of [`read_pipeline`]."""
    if Path(name).is_dir() and list_checkpoints(Path(name)):
        name = str(find_saved_model(Path(name)))
    name = name if revision is None else _download(name, revision)
    is_full_transformer = _has(name, "transformer/config.json", None)
    peft = None
    folder: str | None = name
    if _has(name, "model_index.json", None):
        raise ValueError(f"'{name}' is a pipeline, not an adapter. Pass it as `--model_name_or_path`.")
    if not is_full_transformer:
        peft = _find_peft(name)
        parent, file = split_adapter(name)
        folder = peft or (parent if file in (None, "pytorch_lora_weights.safetensors") else None)
    if folder:
        check_generates(name, folder)
    card = cast(ImageModelCardData | None, load_card_data(folder) if folder else None)
    base = _find_base(name, folder, card) if model is None else model
    base_revision = None
    if card is not None and not os.path.isdir(base) and is_same_model(card.base_model, base):
        base_revision = card.base_revision
    source = read_pipeline(base, base_revision, card=card, **options)
    if is_full_transformer:
        check_adapter_base(name, None if card is None else card.base_model, base)
        return replace(source, transformer=name)
    if peft is None and not _is_of_transformer(name, read_index(base, source.hub_arguments)):
        return replace(source, lora=name)
    check_adapter_base(
        name, SavedAdapter.read(name, base, **source.hub_arguments).config.base_model_name_or_path, base
    )
    return replace(source, adapter=name)


def _find_peft(name: str) -> str | None:
    """Return the directory or Hub id of an adapter in PEFT's format, `None` for a LoRA file."""
    try:
        return peft_folder(name)
    except ValueError:
        if not is_local(name):
            try:
                read_index(name, {})
            except (ConnectionError, PermissionError):  # the Hub is down, or the repository gated
                raise
            except OSError:
                pass
        raise


def _find_base(name: str, folder: str | None, card: ImageModelCardData | None) -> str:
    """Find the base model named by an adapter's config, `paco_trl.json` or card, preferably a local directory."""
    path = find_model_file(folder, "adapter_config.json") if folder else None
    bases = [read_record(path or "").get("base_model_name_or_path"), None if card is None else card.base_model]
    if folder and not any(bases) and (readme := find_model_file(folder, "README.md")) is not None:
        metadata = (metadata_load(readme) or {}).get("base_model")
        bases = metadata if isinstance(metadata, list) else [metadata]
    base_names = [str(base) for base in bases if base]
    if candidates := [
        *models_near(name, base_names),
        *(base for base in base_names if os.path.isdir(base) or not is_local(base) and "/" in base),
    ]:
        return candidates[0]
    reason = f"which is not on this machine: '{base_names[0]}'" if base_names else "but does not say which"
    raise ValueError(f"'{name}' needs a base model, {reason}. Pass it as `model` (`--model_name_or_path`).")


def _is_of_transformer(lora: str, index: dict[str, Any]) -> bool:
    keys = list[str]()
    with (
        suppress(SafetensorError),
        safe_open(find_adapter_file(lora), "pt") as file,
    ):  # a broken file is reported later
        keys = list(file.keys())
    return "transformer" in index and not any(key.startswith(("lora_te", "text_encoder")) for key in keys)


def _has(name: str, file: str, revision: str | None) -> bool:
    if is_local(name) or name.endswith(".safetensors"):
        return os.path.isfile(os.path.join(name, file))
    with suppress(OSError):  # an unreachable Hub or missing model is reported by the next read
        return find_model_file(name, file, revision=revision) is not None
    return False


def _download(name: str, revision: str) -> str:
    """Download a revision of an adapter or a transformer, and return its directory or file."""
    folder, file = split_adapter(name)
    if is_local(folder):
        raise ValueError(f"`revision` is {revision!r}, but '{name}' is on this machine. Leave `revision` out.")
    patterns = ["*.json", "*.safetensors", "README.md"]
    inside = os.path.dirname(file or "")
    selected = {"allow_patterns": [os.path.join(inside, pattern) for pattern in patterns]}
    if not inside:
        selected["ignore_patterns"] = ["*checkpoint*/*"]
    return os.path.join(snapshot_download(folder, revision=revision, **selected), file or "").rstrip(os.sep)
