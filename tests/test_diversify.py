# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts, and the selection of prompts that cover all others."""

import importlib
import json
import logging
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, CLIPModel, CLIPProcessor, CLIPTextModel, PreTrainedTokenizerFast

from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.dataset_building import text_embeddings
from paco_trl.dataset_building.diversify import diversify, diversify_prompts
from paco_trl.tiny import build_tiny_clip


# The package has the function under this name
module = importlib.import_module("paco_trl.dataset_building.diversify")


def embed_texts(*args, **kwargs) -> np.ndarray:
    return text_embeddings.embed_texts(*args, **kwargs)[0]


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
    """Folder of a BERT with random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    sentences = [*TEXTS, *load_image_set_prompts(demo_prompts_path())["prompt"]]
    backend.train_from_iterator(sentences, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=BERT_LENGTH, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    return build_tiny_clip(tmp_path_factory.mktemp("models") / "tiny-clip")


def hidden_states(folder, text):
    """Of one text alone, without padding."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    inputs = tokenizer([text], return_tensors="pt", truncation=True, max_length=BERT_LENGTH)
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=inputs["input_ids"]).last_hidden_state[0]  # (T, D)


def unit(vector):
    return (vector / vector.norm()).numpy()


def test_sentences_are_the_mean_of_their_tokens(tiny_bert):
    embeddings = embed_texts(tiny_bert, TEXTS, batch_size=3)
    assert embeddings.dtype == np.float32 and embeddings.shape == (5, 32)
    assert np.abs(np.linalg.norm(embeddings, axis=1) - 1).max() < 1e-5
    for text, embedding in zip(TEXTS, embeddings, strict=True):  # whatever the order and the others of a batch
        assert np.abs(embedding - unit(hidden_states(tiny_bert, text).mean(0))).max() < 1e-5
    assert (embeddings @ embeddings.T)[np.triu_indices(5, 1)].max() < 0.99  # they do differ


@pytest.mark.parametrize(
    ("pooling", "is_cls"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 32}, True),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, False),
        ({"pooling_mode": "cls"}, True),
        ({"pooling_mode": "mean"}, False),
    ],
)
def test_pooling_saved_with_the_model(tiny_bert, tmp_path, pooling, is_cls):
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    hidden = hidden_states(tiny_bert, TEXTS[1])
    mean, cls = unit(hidden.mean(0)), unit(hidden[0])
    assert np.abs(mean - cls).max() > 1e-2
    assert np.abs(embed_texts(folder, TEXTS)[1] - (cls if is_cls else mean)).max() < 1e-5


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode": "lasttoken"}, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, {}]
)
def test_a_pooling_that_is_not_known(tiny_bert, tmp_path, pooling):
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ValueError, match="pools by"):
        embed_texts(folder, TEXTS)


def test_what_would_give_other_embeddings_is_refused(tiny_bert, tmp_path):
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    expected = embed_texts(folder, TEXTS)

    def write(name, value):
        (folder / name).write_text(json.dumps(value))

    modules = [
        {"idx": 0, "type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")
    ]
    prompts = {"query": "query: ", "document": ""}
    for name, value, token in [
        ("modules.json", modules, "Dense"),
        ("config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"}, "query: "),
    ]:
        write(name, value)
        with pytest.raises(ValueError, match=token):
            embed_texts(folder, TEXTS)
        (folder / name).unlink()
    # What changes nothing
    write("modules.json", [*modules[:2], {"idx": 2, "type": "sentence_transformers.models.Normalize"}])
    for default in (None, "document"):
        write("config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
        assert np.array_equal(embed_texts(folder, TEXTS), expected)


def test_a_clip_gives_what_it_compares_with_images(tiny_clip, tmp_path):
    processor, model = CLIPProcessor.from_pretrained(tiny_clip), CLIPModel.from_pretrained(tiny_clip)
    for text, embedding in zip(TEXTS, embed_texts(tiny_clip, TEXTS), strict=True):
        inputs = processor.tokenizer([text], return_tensors="pt", truncation=True, max_length=77)
        with torch.no_grad():
            expected = model.get_text_features(**inputs).pooler_output[0]
        assert np.abs(embedding - unit(expected)).max() < 1e-5
    # The text part alone, as a diffusers pipeline has it, has no projection
    CLIPTextModel.from_pretrained(tiny_clip).save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="text part"):
        embed_texts(tmp_path, TEXTS)


def test_long_texts_are_cut_and_counted(tiny_bert, tiny_clip, caplog):
    for model, length in ((tiny_bert, BERT_LENGTH), (tiny_clip, 77)):
        long = ["a cat and a dog " * 100, "a cat and a dog " * 100 + " in a red house", *TEXTS[:2]]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            embeddings = embed_texts(model, long, batch_size=1)
        messages = [record.getMessage() for record in caplog.records if "longer than" in record.getMessage()]
        assert len(messages) == 1 and f"2 of 4 texts are longer than the {length} tokens" in messages[0]
        assert np.abs(embeddings[0] - embeddings[1]).max() < 1e-6 < np.abs(embeddings[0] - embeddings[2]).max()
        caplog.clear()
        embed_texts(model, TEXTS[:2])
        assert "longer than" not in caplog.text


def test_what_cannot_be_embedded(tiny_bert, tmp_path):
    folder = shutil.copytree(tiny_bert, tmp_path / "pickled")
    torch.save(BertModel.from_pretrained(tiny_bert).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        embed_texts(folder, TEXTS)


# ---- Selection ----


def units(vectors):
    vectors = np.asarray(vectors, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def random_units(count, dimensions=6, seed=0):
    """Similar enough for gains to overlap."""
    rng = np.random.default_rng(seed)
    return units(rng.normal(size=(count, dimensions)) + rng.normal(size=(4, dimensions))[rng.integers(0, 4, count)])


def by_brute_force(embeddings, num_selected, duplicate_threshold, num_neighbors):
    """The same, written down as it is defined: all gains anew at each step."""
    total = len(embeddings)
    similarities = np.rint((embeddings @ embeddings.T).astype(np.float32) * 10_000).astype(int)
    np.fill_diagonal(similarities, 10_000)
    linked = np.eye(total, dtype=bool)
    for row in range(total):
        others = [other for other in range(total) if other != row]
        for other in sorted(others, key=lambda other: (-similarities[row, other], other))[:num_neighbors]:  # noqa: B023
            linked[row, other] = linked[other, row] = True
    best, is_open, selected = np.zeros(total, dtype=int), np.ones(total, dtype=bool), []
    while len(selected) < num_selected:
        gains = [
            np.maximum(similarities[linked[row], row] - best[linked[row]], 0).sum() if is_open[row] else -1
            for row in range(total)
        ]
        row = int(np.argmax(gains))
        assert is_open[row]
        selected.append(row)
        best = np.maximum(best, similarities[row])
        is_open &= similarities[row] < round(duplicate_threshold * 10_000)
    return selected


@pytest.mark.parametrize("num_neighbors", [1, 3, 100])
@pytest.mark.parametrize("seed", range(2))
def test_the_greedy_selection(num_neighbors, seed):
    embeddings = random_units(60, seed=seed)
    expected = by_brute_force(embeddings, 12, 0.95, num_neighbors)
    result = diversify(embeddings, 12, 0.95, num_neighbors)
    assert result.indices.tolist() == expected
    assert expected != list(range(12))
    similarities = embeddings @ embeddings[expected].T  # (n, k)
    assert similarities[expected][np.triu_indices(12, 1)].max() < 0.95  # no two near-duplicates
    nearest = similarities.max(axis=1)
    assert result.coverage == pytest.approx((nearest >= 0.8).mean(), abs=0.02)
    assert result.mean_similarity == pytest.approx(nearest.mean(), abs=1e-4)
    assert result.min_similarity == pytest.approx(nearest.min(), abs=1e-4)
    duplicates = (nearest >= 0.95).sum() - 12
    assert result.num_duplicates == duplicates
    # The first of more are the selection of fewer
    assert diversify(embeddings, 5, 0.95, num_neighbors).indices.tolist() == expected[:5]


def test_blocks_do_not_matter(monkeypatch):
    embeddings = random_units(60)
    whole = diversify(embeddings, 12, num_neighbors=5)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 60 * 7)
    in_blocks = diversify(embeddings, 12, num_neighbors=5)
    assert in_blocks.indices.tolist() == whole.indices.tolist() and in_blocks[1:] == whole[1:]


def test_ties_go_to_the_first():
    corners = np.eye(6, dtype=np.float32)
    assert diversify(corners, 3).indices.tolist() == [0, 1, 2]
    assert diversify(corners[[5, 4, 3, 2, 1, 0]], 6).indices.tolist() == [0, 1, 2, 3, 4, 5]


def test_many_copies_are_never_both_kept():
    """Many more copies than links: those of the last ones to the first are not in the graph."""
    rng = np.random.default_rng(0)
    copies = units(np.ones(16) + 0.01 * rng.normal(size=(200, 16)))
    others = units(rng.normal(size=(40, 16)))
    embeddings = np.concatenate([copies, others])[rng.permutation(240)]
    similarities = embeddings @ embeddings.T
    assert (copies @ copies.T).min() > 0.95 > (others @ others.T)[np.triu_indices(40, 1)].max()
    result = diversify(embeddings, 41, num_neighbors=4)
    chosen = similarities[np.ix_(result.indices, result.indices)]
    assert chosen[np.triu_indices(41, 1)].max() < 0.95
    assert result.num_duplicates == 199
    with pytest.raises(ValueError, match="41 of 42 rows"):
        diversify(embeddings, 42, num_neighbors=4)
    # Without the rule there would be more
    kept = diversify(embeddings, 42, duplicate_threshold=1.0, num_neighbors=4)
    assert similarities[np.ix_(kept.indices, kept.indices)][np.triu_indices(42, 1)].max() > 0.95


def test_planted_subjects_are_all_covered():
    """Of two frequent subjects and eighteen rare ones, random prompts find the frequent ones."""
    rng = np.random.default_rng(0)
    sizes = [200, 100, *[6] * 18]
    centres = units(rng.normal(size=(20, 64)))
    of_subject = np.repeat(np.arange(20), sizes)[rng.permutation(sum(sizes))]
    embeddings = units(centres[of_subject] + 0.04 * rng.normal(size=(len(of_subject), 64)))
    result = diversify(embeddings, 20, duplicate_threshold=0.99)
    assert len({of_subject[row] for row in result.indices}) == 20
    assert result.coverage > 0.99
    assert result.coverage_of_random < 0.95 and result.coverage_of_first < 0.95
    assert len(set(of_subject[:20])) < 15  # as the first ones show


def test_what_cannot_be_selected_from():
    good = random_units(10)
    for arguments, said in [
        ((good, 0), "num_selected"),
        ((good, 11), "num_selected"),
        ((good, 2, 0.0), "duplicate_threshold"),
        ((good, 2, 1.1), "duplicate_threshold"),
    ]:
        with pytest.raises(ValueError, match=said):
            diversify(*arguments)
    assert diversify(good[:1], 1).indices.tolist() == [0]


def test_prompts_are_embedded_and_selected(tiny_bert, tiny_clip):
    prompts = load_image_set_prompts(demo_prompts_path())
    # Each twice, the second time with the end of a panel changed
    rows = [dict(row) for row in prompts]
    copies = [
        {**row, "id": row["id"] + "-copy", "panels": [*row["panels"][:-1], row["panels"][-1] + "!"]} for row in rows
    ]
    doubled = Dataset.from_list([*rows, *copies])
    for model in (tiny_bert, tiny_clip):
        selected, report = diversify_prompts(doubled, model, 8, duplicate_threshold=0.9999)
        ids = [name.removesuffix("-copy") for name in selected["id"]]
        assert len(set(ids)) == 8 and selected.column_names == doubled.column_names
        assert report["prompts"] == 48 and report["selected"] == 8 and report["texts cut"] > 0
        assert report["near-duplicates left out"] >= 8
        assert 0 < report["coverage"] <= 1
    again, _ = diversify_prompts(doubled, tiny_clip, 8, duplicate_threshold=0.9999)
    assert again["id"][:] == selected["id"][:]
    without_theme = doubled.remove_columns("theme")
    assert len(diversify_prompts(without_theme, tiny_clip, 8, duplicate_threshold=0.9999)[0]) == 8
    with pytest.raises(ValueError, match="num_selected"):
        diversify_prompts(doubled, "no-such/model", 49)
    with pytest.raises(ValueError, match="columns"):
        diversify_prompts(Dataset.from_dict({"prompt": ["a"]}), tiny_clip, 1)
