# SPDX-License-Identifier: Apache-2.0
"""From rows of pairs to a batch: what the model gets, and errors that name the row."""

import copy
import io

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor

from paco_trl.data import make_pair
from paco_trl.rewards.paco_reward import decision_token_ids
from paco_trl.trainer.data_collator import PairCollator, PairRows, PairSampler
from testing_utils import noise, pair_dataset, png


QUESTIONS = ["Same style?", "Do the two images have the same style, the same colours and the same subject?", "Same?"]
ANSWERS = ["Yes. Both are drawn in ink on paper.", "No", "Yes.\nAlike."]
SIZES = [((56, 56), (112, 84)), ((30, 90), (200, 100)), ((61, 57), (84, 84))]
# Tokens of an image, one for each 28 x 28 pixels: sides are rounded, at least 56 x 56 and at most 112 x 112 pixels
TOKENS = [(2 * 2, 4 * 3), (2 * 4, 5 * 3), (2 * 2, 3 * 3)]


@pytest.fixture(scope="module")
def processor(tiny_qwen):
    return AutoProcessor.from_pretrained(tiny_qwen)


@pytest.fixture
def pairs() -> Dataset:
    rows = []
    for question, answer, sizes in zip(QUESTIONS, ANSWERS, SIZES, strict=True):
        row = make_pair(*map(noise, range(2), sizes), question, True)
        rows.append({**row, "completion": [{"role": "assistant", "content": answer}]})
    return pair_dataset(rows)


def collator(processor, **kwargs) -> PairCollator:
    return PairCollator(processor, completion_only_loss=True, **kwargs)


def rows_of(dataset: Dataset, *numbers: int) -> list[dict]:
    rows = PairRows(dataset)
    return [rows[number] for number in numbers]


def test_rows_with_their_numbers(pairs):
    rows = PairRows(pairs.add_column("more", [1, 2, 3]))
    assert len(rows) == 3 and rows[np.int64(2)]["row"] == 2
    row = rows[1]
    assert Image.open(io.BytesIO(row.pop("images")[1]["bytes"])).size == (200, 100)
    assert row == {"prompt": pairs[1]["prompt"], "completion": pairs[1]["completion"], "row": 1}


def test_a_batch_is_what_the_processor_makes_of_each_row_alone(processor, pairs):
    batch = collator(processor)(rows_of(pairs, 2, 0, 1))
    assert batch["rows"].tolist() == [2, 0, 1]
    image, vision = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>"])
    lengths = []
    for place, number in enumerate((2, 0, 1)):
        slots = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in TOKENS[number])
        prompt = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{slots}{QUESTIONS[number]}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompt_ids = processor.tokenizer(prompt).input_ids
        # The terminators belong to the completion
        answer_ids = processor.tokenizer(f"{ANSWERS[number]}<|im_end|>\n").input_ids
        assert answer_ids[0] in decision_token_ids(processor.tokenizer) and len(answer_ids) > 2
        lengths.append(length := len(prompt_ids) + len(answer_ids))
        padding = batch["input_ids"].shape[1] - length
        # Padding is on the right
        assert batch["input_ids"][place, :length].tolist() == prompt_ids + answer_ids
        assert batch["attention_mask"][place].tolist() == [1] * length + [0] * padding
        assert batch["labels"][place].tolist() == [-100] * len(prompt_ids) + answer_ids + [-100] * padding
        is_image = (batch["input_ids"][place] == image).int()
        assert is_image.sum() == sum(TOKENS[number])
        assert torch.equal(batch["mm_token_type_ids"][place].int(), is_image)
        assert (batch["input_ids"][place] == vision).sum() == 2
    assert len(set(lengths)) == 3 and batch["input_ids"].shape == (3, max(lengths))
    pixels = [collator(processor)(rows_of(pairs, number))["pixel_values"] for number in (2, 0, 1)]
    assert torch.equal(batch["pixel_values"], torch.cat(pixels))
    grids = batch["image_grid_thw"]
    assert (grids.prod(dim=1) // 4).tolist() == [*TOKENS[2], *TOKENS[0], *TOKENS[1]]


def test_reasons_are_cut_from_the_end(processor, pairs):
    whole = collator(processor)(rows_of(pairs, 0, 2))
    decision = (whole["labels"][0] != -100).int().argmax().item()
    for length in (decision + 5, decision + 1):  # all but the decision can be cut
        cut = collator(processor, max_length=length)(rows_of(pairs, 0, 2))
        for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
            assert torch.equal(cut[name], whole[name][:, :length]), name
        for name in ("pixel_values", "image_grid_thw", "rows"):
            assert torch.equal(cut[name], whole[name]), name
    with pytest.raises(ValueError, match="Row 0 has"):
        collator(processor, max_length=decision)(rows_of(pairs, 0, 2))


class TestDecisionOnly:
    def test_what_comes_behind_the_decision_is_left_out(self, processor, pairs):
        whole = collator(processor)(rows_of(pairs, 0, 1, 2))
        only = collator(processor, decision_only_loss=True)(rows_of(pairs, 0, 1, 2))
        decisions = (whole["labels"] != -100).int().argmax(dim=1).tolist()
        length = max(decisions) + 1
        assert len(set(decisions)) == 3 and length < whole["input_ids"].shape[1]
        assert only["input_ids"].shape == (3, length)
        for name in ("input_ids", "mm_token_type_ids"):
            assert torch.equal(only[name], whole[name][:, :length]), name
        with pytest.raises(ValueError, match="Row . has"):
            collator(processor, decision_only_loss=True, max_length=length - 1)(rows_of(pairs, 0, 1, 2))
        yes, no = decision_token_ids(processor.tokenizer)
        for row, (position, answer) in enumerate(zip(decisions, (yes, no, yes), strict=True)):
            behind = length - position - 1
            assert only["labels"][row].tolist() == [-100] * position + [answer] + [-100] * behind
            assert only["attention_mask"][row].tolist() == [1] * (position + 1) + [0] * behind

    @pytest.mark.parametrize("answer", ["No", "No."])
    def test_labels_alone(self, processor, pairs, answer):
        rows = rows_of(pairs, 0, 1, 2)
        rows[1]["completion"][0]["content"] = answer
        whole, cut = (
            collator(processor, label_only_without_eos=alone)(copy.deepcopy(rows)) for alone in (False, True)
        )
        decision = (whole["labels"][1] != -100).int().argmax().item()
        assert (whole["labels"][1] != -100).sum() >= 3
        whole["labels"][1, decision + 1 :] = -100
        whole["attention_mask"][1, decision + 1 :] = 0
        assert cut.keys() == whole.keys() and all(torch.equal(cut[name], whole[name]) for name in whole)
        alone = collator(processor, label_only_without_eos=True)(copy.deepcopy(rows[1:2]))
        assert alone["input_ids"].shape == (1, decision + 1)


class TestLengths:
    @pytest.mark.parametrize("settings", [{"max_length": 86}, {"decision_only_loss": True}], ids=str)
    def test_are_those_of_the_batches(self, processor, pairs, settings):
        of_batches = [
            collator(processor, **settings)(rows_of(pairs, row))["attention_mask"].sum().item() for row in range(3)
        ]
        assert len(set(of_batches)) > 1
        assert collator(processor, **settings).lengths(pairs, "pairs") == of_batches

    def test_headers_are_enough(self, processor, pairs):
        data = [png(image) for image in pairs[1]["images"]]
        images = [{"bytes": content[: len(content) // 2], "path": None} for content in data]
        question, answer = pairs[1]["prompt"], pairs[1]["completion"]
        cut = pair_dataset([{"images": images, "prompt": question, "completion": answer}])
        assert collator(processor).lengths(cut, "cut") == collator(processor).lengths(pairs, "pairs")[1:2]
        bad = [images[0], {"bytes": b"<html>", "path": None}]
        dataset = pair_dataset([{"images": bad, "prompt": question, "completion": answer}])
        with pytest.raises(ValueError, match="^Second image of row 0 of `pairs` cannot be read"):
            collator(processor).lengths(dataset, "pairs")


class TestPairSampler:
    LENGTHS = np.random.default_rng(0).permutation([*range(700, 1060), *range(2400, 2440)] * 10).tolist()

    def orders(self, seed=3, epochs=2):
        sampler = PairSampler(8, self.LENGTHS, seed)
        orders = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        return orders

    def padding(self, order):
        batches = np.array(self.LENGTHS)[order].reshape(-1, 8)
        return 1 - batches.sum() / (8 * batches.max(axis=1)).sum()

    def test_a_tenth_three_times_as_long(self):
        """Nearly half of the tokens of random batches are padding."""
        assert self.padding(np.random.default_rng(1).permutation(4000)) > 0.35
        (order,) = self.orders(epochs=1)
        assert sorted(order) == list(range(4000))
        assert self.padding(order) < 0.04

    def test_the_order_is_that_of_seed_and_epoch(self):
        first, second = self.orders()
        torch.rand(7)  # whatever else is random
        assert self.orders() == [first, second] and first != second
        assert self.orders(seed=9)[0] != first
        resumed = PairSampler(8, self.LENGTHS, 3)
        resumed.set_epoch(1)
        assert list(resumed) == second


@pytest.mark.parametrize("kind", ["missing", "truncated"])
def test_bad_images(processor, tmp_path, kind):
    path, data = tmp_path / "image.png", png(noise(0))
    stored = {"bytes": data, "path": None}
    rows = [make_pair(stored, stored, "Same?", True)] * 3
    dataset = pair_dataset([*rows, make_pair(stored, {"bytes": None, "path": str(path)}, "Same?", True)])
    path.write_bytes(data)
    collator(processor)(rows_of(dataset, 1, 3))
    path.unlink() if kind == "missing" else path.write_bytes(data[:2000])
    with pytest.raises(ValueError, match=r"^Second image of row 3 .*image\.png"):
        collator(processor)(rows_of(dataset, 1, 3))
