# SPDX-License-Identifier: Apache-2.0
"""`paco-trl merge`: merges an adapter into the weights of its base model."""

import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from ..checkpointing.checkpoints import find_saved_model, list_checkpoints
from ..checkpointing.weights import save_transformer
from ..data.image_sets import PANEL_OPTIONS
from ..hub.card_data import ImageModelCardData, JudgeCardData, LoRA, load_card_data
from ..hub.cards import save_card
from ..hub.licenses import base_license
from ..rewards.paco_reward import has_processor, load_judge_adapter
from ..rollout.adapters import SavedAdapter, load_transformer_adapter
from ..utils.errors import OptionError
from ..utils.files import new_folder
from ..utils.model_files import find_model_file, models_near, peft_folder
from ..utils.names import check_adapter_base
from ..utils.text import read_json
from .messages import print_message
from .model_arguments import MergeArguments


_WEIGHTS = "diffusion_pytorch_model.safetensors"


def merge(args: MergeArguments) -> None:
    """Merge an adapter into its base model, and write the result atomically."""
    with new_folder(args.output_dir) as folder:
        adapter = args.adapter
        if Path(adapter).is_dir() and list_checkpoints(Path(adapter)):
            adapter = str(find_saved_model(Path(adapter)))
        peft = peft_folder(adapter)  # rejects pickles before the base model is read
        adapter = peft or adapter
        base = args.model_name_or_path
        revision = None
        saved = None
        if peft is not None or base is not None:
            saved = SavedAdapter.read(adapter, str(base))
            if not isinstance(saved.config, LoraConfig):
                raise OptionError(f"The adapter '{adapter}' is a {saved.config.peft_type}; only LoRA can be merged.")
            if base is None:
                base, revision = saved.config.base_model_name_or_path, saved.config.revision
                base = next(iter(models_near(adapter, [base] if base else [])), base)
        if saved is None or not base:
            raise OptionError(f"The adapter '{adapter}' names no base model. Pass it as `--model_name_or_path`.")
        check_adapter_base(adapter, saved.config.base_model_name_or_path, base)
        index = find_model_file(base, "model_index.json", revision=revision)  # a judge has none
        merge_weights = _merge_judge if index is None else _merge_transformer  # return the dtype
        path = find_model_file(
            base, "config.json", revision=revision, subfolder="" if index is None else "transformer"
        )
        if path is not None and "quantization_config" in read_json(path):
            raise ValueError(
                f"The weights of the base model '{base}' are quantized, and quantizing them again would lose the "
                "adapter's changes. Use the unquantized model, also in the adapter's `base_model_name_or_path`."
            )
        print_message("merge", f"Merging '{adapter}' into '{base}'.")
        dtype = merge_weights(saved, base, revision, args.dtype, folder)

        title = Path(args.output_dir).absolute().name
        saved_card = load_card_data(peft) if peft else None
        lora = LoRA(saved.config.r, saved.config.lora_alpha)
        card_fields: dict[str, Any] = {"title": title, "repo_id": title, "merged_adapter": adapter, "lora": lora}
        card_fields |= {"base_model": base, "license": base_license(base, online=True)}
        if index is None:
            question = saved_card.settings.get("question") if saved_card else None
            settings = {"question": question} if question else {}
            save_card(JudgeCardData(weights="merged", settings=settings, **card_fields), folder)
            return
        name = read_json(index)["_class_name"]
        name = name if isinstance(name, str) else name[-1]  # for code in the repository: module and class
        card_fields |= {
            "pipeline_class": name,
            "trained_on": "edits" if "Kontext" in name or "Edit" in name else "sets",
        }
        if isinstance(saved_card, ImageModelCardData):  # for snippets that generate what the adapter was trained for
            card_fields |= {
                name: getattr(saved_card, name) for name in ("trained_on", "family", "prompt", "layout", "call")
            }
            names = ("inference_size", "guidance_scale", "negative_prompt", "set_layout", *PANEL_OPTIONS)
            card_fields["settings"] = {n: saved_card.settings[n] for n in names if n in saved_card.settings}
        transformer_class = read_json(folder / "transformer" / "config.json")["_class_name"]
        card = ImageModelCardData(
            weights="transformer", transformer_class=transformer_class, dtype=dtype, **card_fields
        )
        save_card(card, folder)


def _merge_judge(adapter: SavedAdapter, base: str, revision: str | None, dtype: str | None, folder: Path) -> str:
    network = AutoModelForImageTextToText.from_pretrained(
        base, revision=revision, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False
    )
    network = _merge_layers(load_judge_adapter(network, adapter.name))
    has_own_processor = has_processor(adapter.name)
    processor = AutoProcessor.from_pretrained(
        adapter.name if has_own_processor else base,
        revision=None if has_own_processor else revision,
        trust_remote_code=False,
    )
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(network.dtype).removeprefix("torch.")


def _merge_transformer(adapter: SavedAdapter, base: str, revision: str | None, dtype: str | None, folder: Path) -> str:
    transformer_arguments = {"revision": revision, "subfolder": "transformer"}
    if dtype is None:  # use the dtype of the files, since diffusers would load float32
        index = find_model_file(base, f"{_WEIGHTS}.index.json", **transformer_arguments)
        name = _WEIGHTS if index is None else next(iter(read_json(index)["weight_map"].values()))
        if (path := find_model_file(base, name, **transformer_arguments)) is None:
            raise OptionError(f"The transformer of '{base}' has no {_WEIGHTS}; other formats are pickles.")
        with safe_open(path, "pt") as file:
            dtype = str(file.get_tensor(next(iter(file.keys()))).dtype).removeprefix("torch.")
    # Without text encoders and VAE, which are as large
    transformer = diffusers.AutoModel.from_pretrained(
        base, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False, **transformer_arguments
    )
    transformer = _merge_layers(load_transformer_adapter(transformer, adapter))
    save_transformer(transformer, transformer.state_dict(), folder)
    return dtype


@torch.no_grad()
def _merge_layers(model: PeftModel) -> nn.Module:
    """Merge each layer in float32, and round the result once."""
    # In bf16, the adapter and its product would also be rounded, with up to 1.8 times the error for a tiny FLUX. Layer
    # by layer, since the whole model in float32 needs twice the memory
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for name, layer in tqdm(layers, desc="Merging", unit="layer"):
        module = layer.get_base_layer()
        dtypes = {key: weight.dtype for key, weight in module.named_parameters(recurse=False)}
        module.float()
        layer.merge()
        for key, weight in module.named_parameters(recurse=False):
            weight.data = weight.data.to(dtypes[key])
            if not torch.isfinite(weight).all():
                raise ValueError(
                    f"`{key}` of the layer '{name}' is not finite after merging, because the adapter is broken, or "
                    f"its weights overflow in {dtypes[key]}. Try `--dtype float32`."
                )
    with warnings.catch_warnings():
        # Merges other layers. PEFT warns about each LoRA layer that is already merged
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        return model.merge_and_unload()
