# SPDX-License-Identifier: Apache-2.0
"""Load a pipeline and freeze it, or build it from its configs to check it before gigabytes are read."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from accelerate.utils import extract_model_from_parallel, is_compiled_module
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from huggingface_hub import snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, OfflineModeIsEnabled
from peft import PeftModel
from safetensors import safe_open
from torch import nn

from ..utils.deepspeed import without_zero3_init
from ..utils.model_files import hub_arguments
from ..utils.names import check_model_name
from ..utils.quantization import describe_quantization, pipeline_quantization_config
from . import FAMILIES, Family, check_flow_matching, get_family


logger = logging.getLogger(__name__)


def load_pipeline(
    model: "str | DiffusionPipeline",
    dtype: torch.dtype,
    transformer_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    family: Family | None = None,
    **model_init_kwargs,
) -> DiffusionPipeline:
    """Load (or cast) and freeze a pipeline. Trained weights need float32: bf16 would lose small updates."""
    if quantization is not None and (not isinstance(model, str) or "quantization_config" in model_init_kwargs):
        raise ValueError(
            f"`quantization` is {quantization!r}, but the pipeline is loaded, or `model_init_kwargs` has a "
            "`quantization_config`. Use one of them."
        )
    dtypes = {"default": dtype, "transformer": dtype if transformer_dtype is None else transformer_dtype}
    if isinstance(model, str):
        index = check_config(model, model_init_kwargs, family)
        options = {"dtype": dtypes, "use_safetensors": True}
        if (config := pipeline_quantization_config(quantization, dtype, index)) is not None:
            options["quantization_config"] = config
        # An active ZeRO-3 config would also partition the text encoders, and no engine would gather them
        with without_zero3_init():
            pipeline = DiffusionPipeline.from_pretrained(
                model, trust_remote_code=trust_remote_code, **options | model_init_kwargs
            )
    else:
        pipeline = model
        if isinstance(pipeline.name_or_path, Path):  # JSON and cards need a string
            pipeline.register_to_config(_name_or_path=str(pipeline.name_or_path))
    _undo_compilation(pipeline)
    _check_transformer(pipeline)
    _freeze(pipeline, dtypes)
    return pipeline


def _undo_compilation(pipeline: DiffusionPipeline) -> None:
    for name, component in pipeline.components.items():
        if is_compiled_module(component):
            setattr(pipeline, name, extract_model_from_parallel(component, keep_torch_compile=False))
            warn_on_first_process(
                f"`{name}` of the pipeline is used as it was before `torch.compile`, which would compile other "
                "kernels with gradients than without. Set `compile_repeated_blocks` to compile the transformer."
            )


def _check_transformer(pipeline: DiffusionPipeline) -> None:
    """Refuse a pipeline without a transformer, or with an adapter on it."""
    transformer = getattr(pipeline, "transformer", None)
    if transformer is None:
        raise ValueError(f"{type(pipeline).__name__} has no `transformer`. Pass a flow-matching pipeline with one.")
    if isinstance(transformer, PeftModel) or getattr(transformer, "peft_config", None):
        raise ValueError(
            "The pipeline's transformer already has an adapter. Pass it as `peft_config`, or merge it: "
            "`pipeline.fuse_lora()`, `pipeline.unload_lora_weights()`, and `pipeline.save_pretrained(directory)`, "
            "whose directory is the model."
        )


def _freeze(pipeline: DiffusionPipeline, dtypes: dict[str, torch.dtype]) -> None:
    """Freeze the models of a pipeline, in eval mode and in their dtypes."""
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            if any(hasattr(parameter, "ds_id") for parameter in component.parameters()):
                raise ValueError(
                    f"`{name}` of the pipeline was loaded after the arguments, so ZeRO-3 has partitioned it. Pass the "
                    "pipeline's Hub id or directory, or load it before."
                )
            component.requires_grad_(False).eval()
            dtype = dtypes.get(name, dtypes["default"])
            if component.dtype != dtype:
                component.to(dtype)


def check_base_weights(pipeline: DiffusionPipeline, skipped: Sequence[str] = ()) -> None:
    """
    Refuse a pipeline that has other weights than the model that it is named after, for example after `fuse_lora`: its
    adapter would name that model as its base. Only the beginnings of weights are compared, and only if the model's
    files are on this machine.
    """
    name = pipeline.name_or_path
    folder = name if name and os.path.isdir(name) else None
    if name and folder is None:
        with suppress(OSError, ValueError):  # the model is not in the cache, or its name is no name of the Hub
            folder = snapshot_download(name, local_files_only=True)
    for component, module in pipeline.components.items():
        if (
            folder is None
            or component in skipped
            or not isinstance(module, nn.Module)
            or describe_quantization(module)
        ):
            continue
        for path in sorted(Path(folder, component).glob("*.safetensors")):
            if (key := _find_difference(dict(module.named_parameters()), path)) is not None:
                raise ValueError(
                    f"`{component}` of the pipeline has other weights than '{name}' (`{key}`), which the trained "
                    "model would name as its base. Save it, `pipeline.save_pretrained(directory)`, and pass the "
                    "directory as `model`."
                )


def _find_difference(weights: dict[str, torch.Tensor], path: Path) -> str | None:
    """Return the name of a weight that begins with other values than in the file, or `None`."""
    with safe_open(path, "pt") as file:
        for key in weights.keys() & {*file.keys()}:
            weight = weights[key].detach()
            stored = file.get_slice(key)
            if list(weight.shape) != (shape := stored.get_shape()) or not shape:
                continue
            rows = max(1, 1024 // max(1, weight[0].numel()))
            # A weight may have been rounded to a smaller dtype before
            if not torch.allclose(weight[:rows].float().cpu(), stored[:rows].float(), 2**-6, 1e-6):
                return key
    return None


def pipeline_quantization(pipeline: DiffusionPipeline) -> str | None:
    """Describe how the components of a pipeline are quantized; `None` if none is."""
    named: dict[str, list[str]] = {}
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and (how := describe_quantization(component)):
            named.setdefault(how, []).append(name)
    return "; ".join(f"{how} ({', '.join(names)})" for how, names in named.items()) or None


def with_quantization(
    model_init_kwargs: dict[str, Any] | None, config: Any, model: "str | DiffusionPipeline"
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` with a quantization of the pipeline, or of its transformer alone."""
    if not isinstance(model, str):
        raise ValueError(
            "`quantization_config` is for a model that is loaded by its name. Quantize the pipeline when you load it, "
            "and leave it out."
        )
    kwargs = model_init_kwargs or {}
    if "quantization_config" in kwargs:
        raise ValueError("`quantization_config` is also in `model_init_kwargs`. Pass it once.")
    if not isinstance(config, PipelineQuantizationConfig):
        config = PipelineQuantizationConfig(quant_mapping={"transformer": config})
    return {**kwargs, "quantization_config": config}


def quantization_text(config: PipelineQuantizationConfig) -> str:
    """Return the settings of a quantization as text."""
    # Loading fills `config_mapping`
    return str({name: value for name, value in vars(config).items() if name != "config_mapping"})


def read_index(model: str, model_init_kwargs: dict) -> dict:
    """Return a pipeline's index file; refuse one that cannot be read."""
    check_model_name(model)
    try:
        index = DiffusionPipeline.load_config(model, **hub_arguments(model_init_kwargs))
        if "_class_name" not in index:
            raise ValueError(
                f"The model_index.json of '{model}' has no `_class_name`: it is no pipeline of diffusers."
            )
        return index
    except OSError as error:
        if os.path.isfile(os.path.join(model, "model_index.json")):
            raise ValueError(f"The model_index.json of '{model}' cannot be read: {error}") from error
        files = ("adapter_config.json", "pytorch_lora_weights.safetensors")
        if any(os.path.isfile(os.path.join(model, name)) for name in files):
            raise ValueError(
                f"'{model}' is an adapter: give it as `--adapter` (`peft_config`), and here its base."
            ) from error
        if os.path.isfile(os.path.join(model, "transformer", "config.json")):
            raise ValueError(
                f"'{model}' is a transformer that was trained or merged: give it as `--adapter`, and here its base."
            ) from error
        reason = error.__context__
        is_missing = isinstance(reason, EntryNotFoundError) and not isinstance(reason, LocalEntryNotFoundError)
        if is_missing or os.path.isdir(model):
            raise FileNotFoundError(
                f"'{model}' is no pipeline of diffusers, since it has no model_index.json. Give an image model, such "
                "as black-forest-labs/FLUX.1-dev; a judge is given as `--judge_model`."
            ) from error
        if isinstance(reason, LocalEntryNotFoundError):  # diffusers says that the repository lacks the file
            cause = reason.__cause__
            # The doctor enables the offline mode if there is no connection
            if isinstance(cause, OfflineModeIsEnabled):
                cause = "`HF_HUB_OFFLINE` is set" if os.environ.get("HF_HUB_OFFLINE") else "no connection"
            raise ConnectionError(
                f"The Hub cannot be reached for the model {model} ({cause}), which is not in the cache. Pass a "
                "directory, or download it once: the cache needs no network then, and with `HF_HUB_OFFLINE=1` no "
                "waiting."
            ) from error
        if not isinstance(reason, GatedRepoError):
            raise
        raise PermissionError(
            f"The model {model} is gated. Accept its terms on its page, and log in with the same account: `hf auth "
            "login`."
        ) from error


def check_config(model: str, model_init_kwargs: dict, family: Family | None = None) -> dict:
    """Return a pipeline's index file; refuse one that cannot be read or trained before gigabytes are loaded."""
    config = read_index(model, model_init_kwargs)
    name = config["_class_name"]
    if family is None:
        # A class from code in the repository is named by its module and its own name
        get_family(name if isinstance(name, str) else name[-1])
    _, scheduler = config.get("scheduler") or (None, None)
    scheduler_class = getattr(diffusers, scheduler or "", None)  # None for code in the repository
    if scheduler_class is not None:
        check_flow_matching(scheduler_class)
    return config


def load_without_weights(
    model: str, dtypes: dict[str, torch.dtype], encodes: bool = True, **model_init_kwargs: Any
) -> DiffusionPipeline:
    """Build a pipeline's models from their configs, on the meta device, the text encoders only if it `encodes`."""
    parts: dict[str, Any] = {}
    hub_kwargs = hub_arguments(model_init_kwargs)
    for name, entry in read_index(model, model_init_kwargs).items():
        if name in model_init_kwargs or not encodes and name.startswith(("text_encoder", "tokenizer")):
            parts[name] = model_init_kwargs.get(name)
            continue
        if not isinstance(entry, list | tuple) or entry[0] is None:  # a setting, or a part that is left out
            continue
        kind = getattr(import_module(entry[0]), entry[1])
        if issubclass(kind, nn.Module):
            part = _build_from_config(kind, model, subfolder=name, **hub_kwargs)
            # The `to` of diffusers warns of empty lists
            nn.Module.to(part, dtypes.get(name, dtypes["default"]))
            parts[name] = part.requires_grad_(False).eval()
    return DiffusionPipeline.from_pretrained(model, **parts, **hub_kwargs)


def _build_from_config(kind: Any, model: str, **hub_kwargs: Any) -> nn.Module:
    """Build a model of diffusers or transformers from its config, on the meta device."""
    if hasattr(kind, "load_config"):  # a class of diffusers
        config = kind.load_config(model, **hub_kwargs)
        with init_empty_weights():
            return kind.from_config(config)
    config = kind.config_class.from_pretrained(model, **hub_kwargs)
    with init_empty_weights():
        part = kind(config)
    # Within the context, tied weights would become separate ones
    part.tie_weights()
    return part


def is_buildable(model: "str | DiffusionPipeline", model_init_kwargs: dict, family: Family | None) -> bool:
    """Return whether a pipeline can be built from configs: it is named, listed, and has no custom components."""
    if not isinstance(model, str) or "custom_pipeline" in model_init_kwargs:
        return False
    has_modules = any(isinstance(value, nn.Module) for value in model_init_kwargs.values())
    return not has_modules and check_config(model, model_init_kwargs, family)["_class_name"] in FAMILIES


def base_model_name(model: "str | DiffusionPipeline") -> str:
    """Return the base model's Hub id, the last part of its path, or the class of an unnamed pipeline."""
    name = model if isinstance(model, str) else str(getattr(model, "name_or_path", None) or type(model).__name__)
    return Path(os.path.normpath(name)).name if os.path.exists(name) else name


def warn_on_first_process(message: str) -> None:
    """Warn on the first process of a run; the processes may not know one another yet."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message)
