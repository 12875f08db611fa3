# SPDX-License-Identifier: Apache-2.0
"""
Access to trained weights, their average, and the formats that users load.

Local weights are a process's partitions of the weights under ZeRO-3 and FSDP2, otherwise the full weights.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers.loaders import FluxLoraLoaderMixin
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from ..utils.fsdp import local_shard, model_class, reshard, shard_like, unshard_like


def get_zero_stage(accelerator: Accelerator, model: nn.Module, wrapped_model: nn.Module) -> int:
    """Return the stage of ZeRO, or 0 without DeepSpeed or before `train()`. DeepSpeed's own stage 0 counts as 1."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None or wrapped_model is model else max(plugin.zero_stage, 1)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name."""
    reshard(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def check_all_gradients(model: nn.Module, unused_layers: Sequence[str] = ()) -> Iterator[None]:
    """Raise `ValueError` on all processes if the backward pass leaves a trained weight without a gradient."""
    # With hooks, since DeepSpeed removes gradients from `.grad` as they arrive
    parameters = trained_parameters(model)
    names_with_gradient = set()
    handles = [
        parameter.register_hook(lambda gradient, name=name: names_with_gradient.add(name))
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    # FSDP's parameters get theirs without their hooks
    names_with_gradient |= {name for name, weight in trained_parameters(model).items() if weight.grad is not None}
    expected = [name for name in parameters if not name.startswith(tuple(f"{layer}." for layer in unused_layers))]
    missing = gather_object([name for name in expected if name not in names_with_gradient])
    if not missing:
        return
    if isinstance(model, PeftModel):
        remedy = "Leave these layers out with `exclude_modules` of the `LoraConfig`, or"
    else:
        remedy = "Leave `ddp_find_unused_parameters` unset, and"
    layers = dict.fromkeys(
        name.removeprefix("base_model.model.").partition(".lora_")[0].removesuffix(".weight").removesuffix(".bias")
        for name in missing
    )
    raise ValueError(
        f"{len(set(missing))} of {len(parameters)} trained weights have no gradient after the first backward pass, "
        "since their layers do not affect the prediction. They would not be trained, and with DDP nothing would be. "
        f"{remedy} name them in `unused_layers` of the family class (docs/families.md): "
        f"{', '.join(map(repr, layers))}."
    )


def local_weights(model: nn.Module, zero_stage: int) -> dict[str, torch.Tensor]:
    """Return this process's weights in float32, without a copy if possible. Without an engine, `zero_stage` is 0."""
    parameters = trained_parameters(model)
    if zero_stage == 0:
        # Under DeepSpeed, weights are in the compute dtype until the engine exists
        return {name: local_shard(parameter.detach()).float() for name, parameter in parameters.items()}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

    get_master = safe_get_local_fp32_param if zero_stage == 3 else safe_get_full_fp32_param
    masters = {name: get_master(parameter) for name, parameter in parameters.items()}
    # An engine that trains in float32 may not have separate masters
    return {name: (parameters[name] if m is None else m).detach().float() for name, m in masters.items()}


def gather_weights(
    model: nn.Module, local: dict[str, torch.Tensor], zero_stage: int, keep: bool = True
) -> dict[str, torch.Tensor]:
    """Gather full weights on the CPU from local ones, or nothing unless `keep`. Collective: call on all ranks."""
    full = {}
    for name, parameter in trained_parameters(model).items():
        value = local[name]
        if zero_stage == 3:
            partition = value.to(parameter.device)
            partitions = [torch.empty_like(partition) for _ in range(dist.get_world_size(parameter.ds_process_group))]
            dist.all_gather(partitions, partition, group=parameter.ds_process_group)
            # Partitions are padded to the same size
            value = torch.cat(partitions)[: parameter.ds_numel].view(parameter.ds_shape)
        else:
            value = unshard_like(value, parameter)
        if keep:
            full[name] = value.detach().to("cpu", copy=True)
    return full


def split_weights(model: nn.Module, full: dict[str, torch.Tensor], zero_stage: int) -> dict[str, torch.Tensor]:
    """Split full weights into this process's local ones, the inverse of [`gather_weights`]."""
    local = {}
    for name, parameter in trained_parameters(model).items():
        value = full[name].to(torch.float32)
        if zero_stage == 3:
            group = parameter.ds_process_group
            size = parameter.ds_tensor.numel()
            padded = value.new_zeros(size * dist.get_world_size(group))
            padded[: value.numel()] = value.flatten()
            value = padded[size * dist.get_rank(group) :][:size].clone()
        else:
            value = local_shard(shard_like(value, parameter))
        local[name] = value
    return local


@torch.no_grad()
def load_weights(model: nn.Module, full: dict[str, torch.Tensor], zero_stage: int) -> None:
    """Load full weights into the model and DeepSpeed's masters. Collective: call on all ranks, with all weights."""
    if mismatched := full.keys() ^ trained_parameters(model).keys():
        raise ValueError(
            f"The checkpoint's weights do not match the trained ones: {len(mismatched)} are only in one of them, such "
            f"as {min(mismatched)!r}. Use the same adapter, or another `output_dir`."
        )
    local = split_weights(model, full, zero_stage)
    _copy_into_model(model, local, zero_stage)
    if zero_stage == 0:
        return
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    set_master = safe_set_local_fp32_param if zero_stage == 3 else safe_set_full_fp32_param
    for name, parameter in trained_parameters(model).items():
        set_master(parameter, local[name].to(parameter.device))


@contextmanager
def use_weights(model: nn.Module, local: dict[str, torch.Tensor] | None, zero_stage: int) -> Iterator[None]:
    """Run forward passes with other local weights, not DeepSpeed's masters, and restore the old ones bit-exactly."""
    if local is None:
        yield
        return
    original_weights = {name: tensor.clone() for name, tensor in _forward_tensors(model, zero_stage).items()}
    _copy_into_model(model, local, zero_stage)
    try:
        yield
    finally:
        _copy_into_model(model, original_weights, zero_stage)


def _forward_tensors(model: nn.Module, zero_stage: int) -> dict[str, torch.Tensor]:
    """Return the tensors that forward passes read, in the model's dtype: partitions, or parameters."""
    return {
        name: (parameter.ds_tensor if zero_stage == 3 else local_shard(parameter.detach())).data
        for name, parameter in trained_parameters(model).items()
    }


@torch.no_grad()
def _copy_into_model(model: nn.Module, local: dict[str, torch.Tensor], zero_stage: int) -> None:
    parameters = trained_parameters(model)
    gathered_parameters = []
    if zero_stage == 3:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        # Small weights stay gathered between forward passes, and would be stale
        gathered_parameters = [p for p in parameters.values() if p.ds_status == ZeroParamStatus.AVAILABLE]
    for name, target in _forward_tensors(model, zero_stage).items():
        target.copy_(local[name])
    for parameter in gathered_parameters:
        parameter.partition()
    if gathered_parameters:
        gathered_parameters[0].all_gather(param_list=gathered_parameters)


class EMA:
    """Exponential moving average of a process's local weights in float32, starting from the initial ones."""

    def __init__(self, model: nn.Module, decay: float, zero_stage: int, offload: bool):
        self.model = model
        self.decay = decay
        self.zero_stage = zero_stage
        self.offload = offload
        self.average = {
            name: self._to_storage(tensor, copy=True) for name, tensor in local_weights(model, zero_stage).items()
        }

    def _to_storage(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
        return tensor.to("cpu", copy=copy) if self.offload else tensor.to(tensor.device, copy=copy)

    @torch.no_grad()
    def step(self) -> None:
        """Update the average with the current weights. Call once per optimizer step."""
        weights = local_weights(self.model, self.zero_stage)
        if self.offload:  # copy one weight at a time
            for name, tensor in weights.items():
                self.average[name].lerp_(tensor.to("cpu"), 1 - self.decay)
        else:
            torch._foreach_lerp_([self.average[name] for name in weights], list(weights.values()), 1 - self.decay)

    def state_dict(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the full average on the CPU, empty unless `keep`. Collective: call on all ranks."""
        return gather_weights(self.model, self.average, self.zero_stage, keep)

    @torch.no_grad()
    def load_state_dict(self, full: dict[str, torch.Tensor]) -> None:
        """Replace the average with full weights, on every process."""
        for name, tensor in split_weights(self.model, full, self.zero_stage).items():
            self.average[name].copy_(tensor)


# ---- Formats that users load ----


def save_adapter(model: PeftModel, pipeline, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Save an adapter for both `PeftModel.from_pretrained` and `load_lora_weights`, which give the same images."""
    # `save_embedding_layers="auto"` would request the base model's vocabulary from the Hub
    adapter = model.active_adapter  # not the reference's
    model.save_pretrained(folder, state_dict=state_dict, selected_adapters=[adapter], save_embedding_layers=False)
    lora = get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
    scales = {name: layer.scaling[adapter] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    # Include the scale `lora_alpha / r`, since ComfyUI and others ignore metadata and scale by 1
    layers = {}
    for name, tensor in lora.items():
        layer, is_up, _ = name.partition(".lora_B.")
        if is_up:
            tensor = (tensor.float() * scales[layer]).to(tensor.dtype)
        layers[name.removeprefix("base_model.model.")] = tensor
    config = model.peft_config[adapter]
    metadata = config.to_dict() | {
        "lora_alpha": config.r,
        "alpha_pattern": dict(config.rank_pattern),
        "use_rslora": False,
        "base_model_name_or_path": None,  # only in PEFT's file, since it may be a local path
    }
    # Some pipelines lack this method (LongCat-Image in diffusers 0.42); all others write the same file
    save = getattr(pipeline, "save_lora_weights", FluxLoraLoaderMixin.save_lora_weights)
    save(folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata)


def save_transformer(transformer: nn.Module, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Save a full transformer in diffusers' format and float32, in the directory `transformer`."""
    folder = Path(folder) / "transformer"
    folder.mkdir(parents=True, exist_ok=True)
    transformer.save_config(folder)
    # diffusers adds the path that the model was loaded from, which may be local
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    config["_class_name"] = model_class(transformer).__name__
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    buffers = {name: value for name, value in transformer.state_dict().items() if name not in state_dict}
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict({**buffers, **state_dict}, folder, filename_pattern=pattern)


def save_trained(model: nn.Module, pipeline, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Save trained weights, either as an adapter or as a full transformer."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        save_adapter(model, pipeline, state_dict, folder)
    else:
        save_transformer(model, state_dict, folder)
