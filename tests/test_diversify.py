# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts, and the selection of prompts that cover all others."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.dataset_building.diversify import diversify, diversify_prompts, embed_texts


TEXTS = [
    "a red house near the sea at night",
    "a cat",
    "the same girl with a green hat reads a book in the park, and then she reads a second book in a house near the sea",
    "a blue car on the road in the rain",
    "a dog that runs",
]
BERT_LENGTH = 48


# ---- Embeddings ----


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    """Folder of a sentence-embedding model: a BERT with random weights, whose tokens are averaged."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    sentences = [*TEXTS, *load_image_set_prompts(demo_prompts_path())["prompt"]]
    backend.train_from_iterator(sentences, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=BERT_LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=BERT_LENGTH, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_embeddings_are_those_of_each_text_alone(tiny_bert):
    embeddings = embed_texts(tiny_bert, TEXTS)
    assert embeddings.dtype == np.float32 and embeddings.shape == (5, 32)
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(tiny_bert), BertModel.from_pretrained(tiny_bert).eval()
    for text, embedding in zip(TEXTS, embeddings, strict=True):
        tokens = tokenizer([text], return_tensors="pt", truncation=True)["input_ids"]
        with torch.no_grad():
            mean = model(tokens).last_hidden_state[0].mean(0)  # (D,)
        assert np.abs(embedding - (mean / mean.norm()).numpy()).max() < 1e-5
    assert (embeddings @ embeddings.T)[np.triu_indices(5, 1)].max() < 0.99  # they do differ


def test_what_cannot_be_embedded(tiny_bert, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_bert, tmp_path / "pickled")
    torch.save(BertModel.from_pretrained(tiny_bert).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        embed_texts(folder, TEXTS)
    # Code of the model is not run
    folder = shutil.copytree(tiny_bert, tmp_path / "code")
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "own.Transformer"}]))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Transformer: pass\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        embed_texts(folder, TEXTS)
    assert not (tmp_path / "was-run").exists()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"paco_trl\[embeddings\]"):
        embed_texts(tiny_bert, TEXTS)


# ---- Selection ----


def units(vectors):
    vectors = np.asarray(vectors, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def random_units(count, dimensions=6, seed=0):
    """Similar enough for gains to overlap."""
    rng = np.random.default_rng(seed)
    return units(rng.normal(size=(count, dimensions)) + rng.normal(size=(4, dimensions))[rng.integers(0, 4, count)])


def by_brute_force(embeddings, num_selected, duplicate_threshold):
    """The same, written down as it is defined: all gains anew at each step."""
    total = len(embeddings)
    similarities = np.rint((embeddings @ embeddings.T).astype(np.float32) * 10_000).astype(int)
    np.fill_diagonal(similarities, 10_000)
    best, is_open, selected = np.zeros(total, dtype=int), np.ones(total, dtype=bool), []
    while len(selected) < num_selected:
        gains = [np.maximum(similarities[row] - best, 0).sum() if is_open[row] else -1 for row in range(total)]
        row = int(np.argmax(gains))
        assert is_open[row]
        selected.append(row)
        best = np.maximum(best, similarities[row])
        is_open &= similarities[row] < round(duplicate_threshold * 10_000)
    return selected


@pytest.mark.parametrize("seed", range(3))
def test_the_greedy_selection(seed):
    embeddings = random_units(60, seed=seed)
    expected = by_brute_force(embeddings, 12, 0.95)
    selected, report = diversify(embeddings, 12, 0.95)
    assert selected == expected
    assert expected != list(range(12))
    similarities = embeddings @ embeddings[expected].T  # (n, k)
    assert similarities[expected][np.triu_indices(12, 1)].max() < 0.95  # no two near-duplicates
    nearest = similarities.max(axis=1)
    assert report["coverage"] == pytest.approx((nearest >= 0.8).mean(), abs=0.02)
    assert report["near-duplicates left out"] == (nearest >= 0.95).sum() - 12
    # The first of more are the selection of fewer
    assert diversify(embeddings, 5, 0.95)[0] == expected[:5]


def test_ties_go_to_the_first():
    corners = np.eye(6, dtype=np.float32)
    assert diversify(corners, 3)[0] == [0, 1, 2]
    with pytest.raises(ValueError, match="5 of 6 rows"):  # one of two copies stays
        diversify(corners[[0, 0, 1, 2, 3, 4]], 6, duplicate_threshold=1.0)
    assert diversify(corners[[5, 4, 3, 2, 1, 0]], 6)[0] == [0, 1, 2, 3, 4, 5]


def test_many_copies_are_never_both_kept():
    rng = np.random.default_rng(0)
    copies = units(np.ones(16) + 0.01 * rng.normal(size=(200, 16)))
    others = units(rng.normal(size=(40, 16)))
    embeddings = np.concatenate([copies, others])[rng.permutation(240)]
    similarities = embeddings @ embeddings.T
    assert (copies @ copies.T).min() > 0.95 > (others @ others.T)[np.triu_indices(40, 1)].max()
    selected, report = diversify(embeddings, 41)
    chosen = similarities[np.ix_(selected, selected)]
    assert chosen[np.triu_indices(41, 1)].max() < 0.95
    assert report["near-duplicates left out"] == 199
    with pytest.raises(ValueError, match="41 of 42 rows"):
        diversify(embeddings, 42)
    # Without the rule there would be more
    kept, _ = diversify(embeddings, 42, duplicate_threshold=1.0)
    assert similarities[np.ix_(kept, kept)][np.triu_indices(42, 1)].max() > 0.95


def test_planted_subjects_are_all_covered():
    """Of two frequent subjects and eighteen rare ones, random prompts find the frequent ones."""
    rng = np.random.default_rng(0)
    sizes = [200, 100, *[6] * 18]
    centres = units(rng.normal(size=(20, 64)))
    of_subject = np.repeat(np.arange(20), sizes)[rng.permutation(sum(sizes))]
    embeddings = units(centres[of_subject] + 0.04 * rng.normal(size=(len(of_subject), 64)))
    selected, report = diversify(embeddings, 20, duplicate_threshold=0.99)
    assert len({of_subject[row] for row in selected}) == 20
    assert report["coverage"] > 0.99
    assert report["coverage of random ones"] < 0.95


@pytest.mark.parametrize("arguments, said", [((0,), "num_selected"), ((11,), "num_sel"), ((2, 1.1), "duplicate_thr")])
def test_what_cannot_be_selected(arguments, said):
    with pytest.raises(ValueError, match=said):
        diversify(random_units(10), *arguments)


def test_prompts_are_embedded_and_selected(tiny_bert):
    prompts = load_image_set_prompts(demo_prompts_path())
    # Each twice, the second time with the end of a panel changed
    rows = [dict(row) for row in prompts]
    copies = [
        {**row, "id": row["id"] + "-copy", "panels": [*row["panels"][:-1], row["panels"][-1] + "!"]} for row in rows
    ]
    doubled = Dataset.from_list([*rows, *copies])
    selected, report = diversify_prompts(doubled, tiny_bert, 8, duplicate_threshold=0.9999)
    ids = [name.removesuffix("-copy") for name in selected["id"]]
    assert len(set(ids)) == 8 and selected.column_names == doubled.column_names
    assert report["selected"] == 8 and report["near-duplicates left out"] >= 8 and 0 < report["coverage"] <= 1
    without_theme = doubled.remove_columns("theme")
    assert len(diversify_prompts(without_theme, tiny_bert, 8, duplicate_threshold=0.9999)[0]) == 8
