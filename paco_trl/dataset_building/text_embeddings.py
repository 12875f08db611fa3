# SPDX-License-Identifier: Apache-2.0
"""Embed texts with a sentence-embedding model or the text model of a CLIP."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.files import find_model_file


if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

_POOLING_FILE = "1_Pooling/config.json"  # as sentence-transformers writes it


def embed_texts(
    model: str | Path, texts: list[str], batch_size: int = 64, device: "str | torch.device | None" = None
) -> "tuple[np.ndarray, int]":
    """Embed texts as unit vectors (len(texts), D), float32; return also how many texts were cut."""
    import numpy as np
    import torch
    from accelerate import PartialState
    from tqdm.auto import tqdm
    from transformers import AutoTokenizer

    network, max_length, pooling = _load(str(model))
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        raise ValueError(f"The tokenizer of {model} has no padding token, so texts cannot be batched.")
    max_length = min(max_length, tokenizer.model_max_length)  # 1e30 if it was saved without one
    chunks = (texts[start : start + 1000] for start in range(0, len(texts), 1000))
    ids = (ids for chunk in chunks for ids in tokenizer(chunk, truncation=False, verbose=False)["input_ids"])
    lengths = np.array([*map(len, ids)])
    cut = int((lengths > max_length).sum())
    if cut:
        logger.warning(f"{cut} of {len(texts)} texts are longer than the {max_length} tokens that {model} reads.")

    device = torch.device(device) if device is not None else PartialState().device
    network.to(device)
    embeddings: Any = None
    # Longest first: what does not fit into memory is known at once
    order = np.argsort(-np.minimum(lengths, max_length), kind="stable")
    for start in tqdm(range(0, len(texts), batch_size), desc="Embedding texts"):
        rows = order[start : start + batch_size]
        inputs = tokenizer(
            [texts[row] for row in rows],
            padding=True,
            padding_side="right",  # the first token is that of the text
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
        ).to(device)
        # A surrounding autocast would change what is a near-duplicate
        with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
            vectors = _embed(network, inputs, pooling)  # (B, D)
        norms = vectors.norm(dim=-1, keepdim=True)  # (B, 1)
        if not (torch.isfinite(norms) & (norms > 0)).all():
            raise ValueError(f"Embeddings of {model} are not finite or zero. Check its weights.")
        if embeddings is None:
            embeddings = np.empty((len(texts), vectors.shape[1]), dtype=np.float32)
        embeddings[rows] = (vectors / norms).cpu().numpy()
    return embeddings, cut


def _load(model: str) -> "tuple[PreTrainedModel, int, str]":
    """Load the model; return it with the number of tokens that it reads and its pooling."""
    import torch
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model)
    if config.is_encoder_decoder:
        raise ValueError(f"{model} is an encoder-decoder model ({config.model_type}). Choose a BERT or a CLIP.")
    if config.model_type == "clip_text_model":
        raise ValueError(f"{model} is the text part of a CLIP, which may lack the projection. Choose the full CLIP.")
    pooling = "projection" if config.model_type == "clip" else _pooling(model)
    network = AutoModel.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
    # An encoder of several kinds of input keeps the lengths of texts in a part of its own
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return network.eval().requires_grad_(False), length or int(1e9), pooling


def _read_json(model: str, name: str) -> Any:
    """Read a file that sentence-transformers saves with a model; `None` if there is none."""
    path = find_model_file(model, name)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _pooling(model: str) -> str:
    """Read the pooling that sentence-transformers saves with a model: `"mean"` if there is none."""
    modules = [module["type"].rpartition(".")[2] for module in _read_json(model, "modules.json") or ()]
    layers = [name for name in modules if name not in ("Transformer", "Pooling", "Normalize")]
    settings = _read_json(model, "config_sentence_transformers.json") or {}
    prompt = (settings.get("prompts") or {}).get(settings.get("default_prompt_name"))
    if layers or prompt:
        has = f"the layers {layers} (modules.json)" if layers else f"the default prompt {prompt!r}"
        raise ValueError(
            f"{model} has {has}. Choose a model of a transformer and its pooling alone, such as all-MiniLM-L6-v2."
        )
    config = _read_json(model, _POOLING_FILE)
    if config is None:
        return "mean"
    # One name in newer files, a switch for each mode in older ones
    modes = config.get("pooling_mode") or [name for name, is_on in config.items() if is_on is True and "mode" in name]
    modes = [modes] if isinstance(modes, str) else modes
    names = [mode.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for mode in modes]
    if names not in (["mean"], ["cls"]):
        raise ValueError(f"{model} pools by {names or 'nothing'} ({_POOLING_FILE}); only mean and cls are supported.")
    return names[0]


# A CLIP gives the projected embedding. Other models give the mean over the tokens or, if their pooling file says so,
# the first token
def _embed(network: "PreTrainedModel", inputs: Any, pooling: str) -> "torch.Tensor":
    if pooling == "projection":
        texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return network.get_text_features(**texts).pooler_output  # since transformers 5 the projected embedding
    hidden = network(**inputs).last_hidden_state  # (B, T, D)
    if pooling == "cls":
        return hidden[:, 0]
    mask = inputs["attention_mask"].unsqueeze(-1)  # (B, T, 1)
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
