# SPDX-License-Identifier: Apache-2.0
"""`protocol="published"` of ConsistencyRank and EditReward-Bench, against what the published scripts send and compute."""

import io
import math
from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset, Image
from PIL import Image as PILImage
from qwen_vl_utils import process_vision_info
from scipy.stats import kendalltau, spearmanr

from paco_trl import PaCoReward
from paco_trl.data.columns import typed_dataset
from paco_trl.evaluation import evaluate_rankings, load_rankings, published_tables, report_tables, save_report
from paco_trl.evaluation.scoring import RowImages
from paco_trl.utils.images import to_rgb
from testing_utils import jsonl


# The whole text that the published scripts give to the model
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<img1>: <|vision_start|><|image_pad|><|vision_end|><img2>: <|vision_start|><|image_pad|><|vision_end|>"
    "{question}<|im_end|>\n<|im_start|>assistant\n"
)
PLAIN = (
    "Do the two images maintain consistency in terms of style, logic and identity? "
    'Answer "Yes" and "No" first, and then provide detailed reasons.'
)
FOLLOWS = (
    "Given two images after an edit with instruction 'Add a hat', is the edit following the instruction well? "
    "Answer 'Yes' or 'No' only."
)
CONSISTENT = (
    "Given two images after an edit with instruction 'Add a hat', do they maintain consistency in terms of style, logic "
    "and identity? Answer 'Yes' or 'No' only."
)
ANSWERS = ("Yes", "No", "y", "n")


def image(rng, mode="RGB"):
    base = rng.integers(0, 256, len(mode))
    values = np.clip(base + rng.integers(-90, 90, (*rng.integers(40, 120, 2), len(mode))), 0, 255)
    return PILImage.fromarray(values.astype(np.uint8), mode)


def top_20(judge, first, second, question):
    """The 20 likeliest tokens by one plain forward of the model."""
    pictures = [picture.convert("RGB") for picture in (first, second)]
    content = [{"type": "image", "image": picture} for picture in pictures]
    pictures, _ = process_vision_info([{"role": "user", "content": content}])
    inputs = judge.processor(text=[PROMPT.format(question=question)], images=pictures, return_tensors="pt")
    with torch.no_grad():
        values, ids = judge.model(**inputs).logits[0, -1].log_softmax(dim=-1).topk(20)
    return {judge.processor.tokenizer.decode([token]): value.item() for token, value in zip(ids, values, strict=True)}


def share_of_yes(tokens, yes, no):
    yes, no = (sum(math.exp(tokens[word]) for word in words if word in tokens) for words in (yes, no))
    return yes / (yes + no) if yes + no > 0 else 0.0


@pytest.fixture(scope="module")
def judge(tiny_qwen):
    """A judge whose answers are among its 20 likeliest tokens for some images, and not for others."""
    judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="float32", batch_size=5)
    hidden, rng = [], np.random.default_rng(1)
    head = judge.model.lm_head
    hook = head.register_forward_pre_hook(lambda module, args: hidden.append(args[0][0, -1].detach()))
    for _ in range(12):
        top_20(judge, image(rng), image(rng), PLAIN)
    hook.remove()
    hidden = torch.stack(hidden)  # (12, D)
    center = hidden.mean(dim=0)
    directions = torch.linalg.svd(hidden - center).Vh
    with torch.no_grad():
        head.weight.mul_(0.3)
        level = (head.weight @ center).sort(descending=True).values[15]
        for place, answer in enumerate(ANSWERS):
            direction = directions[place] / ((hidden - center) @ directions[place]).abs().mean()
            (token,) = judge.processor.tokenizer.encode(answer, add_special_tokens=False)
            head.weight[token] = level * center / (center @ center) + 0.3 * direction
    return judge


@pytest.fixture(scope="module")
def rankings():
    rng = np.random.default_rng(0)
    rows = [
        (image(rng), [image(rng, "RGBA" if index == 2 else "RGB") for _ in range(4)], rng.permutation(4), "A fox.")
        for index in range(10)
    ]
    return typed_dataset(rows, reference="image", candidates=["image"], ranking=["int64"], prompt="string")


@pytest.fixture(scope="module")
def edits(tmp_path_factory):
    rng = np.random.default_rng(2)
    rows = []
    for kind in ("prompt_following", "consistency", "overall"):
        for index in range(4):
            keys = [f"{kind}-{index}-{side}" for side in "ab"]
            images = image(rng), [image(rng, "RGBA" if index == 1 else "RGB"), image(rng)]
            rows.append((keys, "Add a hat", "subject-add", kind, *images))
    types = dict.fromkeys(("instruction", "task_type", "dimension"), "string")
    dataset = typed_dataset(rows, key=["string"], **types, input_image="image", output_images=["image"])
    dataset.to_parquet(path := tmp_path_factory.mktemp("edits") / "train.parquet")
    return load_rankings("edit_reward", path)


def test_consistency_rank_item_by_item(judge, rankings, tmp_path):
    results = evaluate_rankings(judge, rankings, output_path=tmp_path / "scores.jsonl", protocol="published")
    listed = [[top_20(judge, row["reference"], each, PLAIN) for each in row["candidates"]] for row in rankings]
    expected = [[share_of_yes(tokens, ["Yes"], ["No"]) for tokens in of_row] for of_row in listed]
    flat = list(chain(*expected))
    assert 0.0 in flat and 1.0 in flat and any(0.01 < score < 0.99 for score in flat)  # all three kinds are there
    for record, scores, row in zip(jsonl(tmp_path / "scores.jsonl")[1:], expected, rankings, strict=True):
        assert record["scores"] == pytest.approx(scores, abs=1e-5)
        order = sorted(range(4), key=lambda index, scores=scores: (scores[index], index))[::-1]
        assert record["metrics"]["kendall_tau"] == pytest.approx(kendalltau(order, row["ranking"]).statistic)
        assert record["metrics"]["spearman_rho"] == pytest.approx(spearmanr(order, row["ranking"]).statistic)
        assert record["metrics"]["accuracy"] == np.mean(np.array(order) == row["ranking"])
    assert results["settings"]["protocol"] == "published" and results["settings"]["template"] == "plain"
    assert results["num_ties"] == sum(len(set(scores)) < 4 for scores in expected) > 0
    assert results["num_unanswered"] == sum(not {"Yes", "No"} & set(tokens) for tokens in chain(*listed)) > 0

    # Twin: the same question by the protocol of this package has neither labels nor a limit of 20 tokens
    default = evaluate_rankings(judge, rankings, "plain", tmp_path / "default.jsonl")
    assert default["num_ties"] == default["num_unanswered"] == 0
    scores = [record["scores"] for record in jsonl(tmp_path / "default.jsonl")[1:]]
    assert scores != [pytest.approx(of_row, abs=1e-2) for of_row in expected]


def test_edit_reward_bench_item_by_item(judge, edits, tmp_path):
    options = {"protocol": "published", "benchmark": "edit_reward"}
    results = evaluate_rankings(judge, edits, output_path=tmp_path / "scores.jsonl", **options)
    found = {record["key"]: record["scores"] for record in jsonl(tmp_path / "scores.jsonl")[1:]}
    yes, no = ("yes", "Yes", "YES", "y", "Y"), ("no", "No", "NO", "n", "N")
    by_one_word, ties = [], 0
    for row in edits:
        of_images = []
        for key, output in zip(row["candidate_ids"], row["candidates"], strict=True):
            pair = row["reference"], output.convert("RGB").resize(row["reference"].size)
            questions = {"prompt_following": FOLLOWS, "consistency": CONSISTENT}
            tokens = {name: top_20(judge, *pair, question) for name, question in questions.items()}
            expected = {name: share_of_yes(listed, yes, no) for name, listed in tokens.items()}
            for name, score in found[key].items():
                assert score == pytest.approx(expected[name], abs=1e-5)
                by_one_word.append(abs(share_of_yes(tokens[name], ["Yes"], ["No"]) - score))
            overall = math.sqrt(expected["prompt_following"] * expected["consistency"])
            of_images.append(overall if row["dimension"] == "overall" else expected[row["dimension"]])
        ties += of_images[0] == of_images[1]
    assert max(by_one_word) > 0.1  # that other spellings count does something here
    assert sum(len(scores) for scores in found.values()) == 2 * (4 + 4 + 2 * 4)
    assert sum(dimension["num_ties"] for dimension in results["dimensions"].values()) == ties
    assert results["settings"]["protocol"] == "published"


class NoQuestions:
    """Ranks by the mean of the red channel and reads no questions, as CLIP-I does."""

    name = "red"
    reads_questions = False

    def score(self, images, prompts):
        return [float(np.asarray(second)[..., 0].mean()) for _, second in images]


def test_scorers_and_arguments_of_the_protocol(judge, rankings, edits):
    class OnlyScores(NoQuestions):
        reads_questions = True

    with pytest.raises(AttributeError, match="top_logprobs"):
        evaluate_rankings(OnlyScores(), rankings, protocol="published")
    with pytest.raises(ValueError, match="theme"):
        evaluate_rankings(judge, rankings, "theme", protocol="published")
    with pytest.raises(ValueError, match="`benchmark` is 'edits'.*'published'.* must be edit_reward"):
        evaluate_rankings(judge, edits, protocol="published")
    # Without questions only the arithmetic differs
    results = [evaluate_rankings(NoQuestions(), rankings, protocol=protocol) for protocol in ("default", "published")]
    assert results[0]["metrics"]["accuracy"] == results[1]["metrics"]["accuracy"]
    assert results[0]["metrics"]["kendall_tau"] != results[1]["metrics"]["kendall_tau"]


def test_published_figures_only_with_the_published_protocol(rankings, edits, tmp_path):
    benchmarks = {"rankings": rankings, "edit_reward": edits}
    for benchmark, dataset in benchmarks.items():
        save_report(evaluate_rankings(NoQuestions(), dataset, benchmark=benchmark), tmp_path)
    assert "not measured here" not in (tmp_path / "results.md").read_text()
    for benchmark, dataset in benchmarks.items():
        results = evaluate_rankings(NoQuestions(), dataset, protocol="published", benchmark=benchmark)
        entries = save_report(results, tmp_path)
    # Both protocols of a scorer stay, each in a table of its own
    assert [title.split(", protocol: ") for title, _, _ in report_tables(entries)] == [
        [title, protocol] for title in ("Human rankings", "EditReward-Bench") for protocol in ("default", "published")
    ]
    text = (tmp_path / "results.md").read_text()
    default, published = (text.split("\n# ")[place::2] for place in (0, 1))
    for name, section in zip(("ConsistencyRank", "EditReward-Bench"), published, strict=True):
        for row in published_tables(name)[0].rows:
            assert " | ".join([row[0], *(f"{value:.3f}" for value in row[1:])]) in section
    assert not any("Published figures" in section for section in default)
    # Those of models that write a score are of another protocol
    assert "GPT-4.1" not in text and "GPT-4.1" in str(published_tables("EditReward-Bench"))


def test_a_transparent_color_is_dropped():
    """Judges put what is transparent on white; the published scripts show the color."""
    buffer = io.BytesIO()
    PILImage.new("RGB", (4, 4), (200, 0, 0)).save(buffer, "PNG", transparency=(200, 0, 0))
    dataset = Dataset.from_list([{"image": {"bytes": buffer.getvalue(), "path": None}}]).cast_column("image", Image())
    for protocol, color in (("default", (255, 255, 255)), ("published", (200, 0, 0))):
        (shown,) = RowImages(dataset, ["image"], protocol)[0]
        assert to_rgb(shown, "It").getpixel((0, 0)) == color
