# SPDX-License-Identifier: Apache-2.0
"""The judge against the published usage example, how it is loaded, and the tiny model it is tested on."""

import copy
import importlib.util
import json
import shutil
from contextlib import contextmanager
from itertools import combinations, groupby

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from other_judges import INDEPENDENT_JUDGE, OTHER_JUDGES, build_other_judge, first_logits, usage_inputs
from paco_trl import PaCoReward
from paco_trl.data import criterion_question, shows_question, t2is_bench_question, theme_question
from paco_trl.rewards import ServedJudge, paco_reward
from paco_trl.rewards.judge import broadcast_questions
from paco_trl.rewards.prefix_sharing import order_for_sharing
from paco_trl.tiny import build_tiny_qwen2_5_vl
from paco_trl.utils.fingerprint import weights_fingerprint
from paco_trl.utils.vision_language import limit_pixels, load_image, patch_size_of, pixel_limit
from testing_utils import close, noise, write_image


SHORT, LONG = "Alike?", theme_question("A fox through the four seasons, in the style of a woodcut")
QUESTIONS = [SHORT, criterion_question("the fox is red"), LONG]
PROCESSOR_FILES = ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def usage(model, processor, *images_and_question):
    """Score of the usage example of the published judge for one pair, or for one image."""
    *images, question = images_and_question
    logits = first_logits(model, processor, images, question)
    ids = [processor.tokenizer.encode(word)[0] for word in ("Yes", "No")]
    return torch.softmax(logits[ids].float(), dim=-1)[0].item()


def usages(model, processor, groups, questions):
    return [usage(model, processor, *group, question) for group, question in zip(groups, questions, strict=True)]


def spread(scores):
    """Smallest difference between two of the scores."""
    return min(abs(a - b) for a, b in combinations(scores, 2))


@contextmanager
def calls_of(module, read=lambda args, kwargs: kwargs):
    """What is read of the arguments of each forward of a module."""
    calls = []
    hook = module.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(read(args, kwargs)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


def patches_of(judge):
    """Number of patches in each forward of the vision tower."""
    return calls_of(judge.model.model.visual, lambda args, kwargs: len(args[0] if args else kwargs["hidden_states"]))


def rows_of(judge):
    """Shape (rows, tokens) of each forward of the language model."""
    return calls_of(judge._network.model.language_model, lambda args, kwargs: tuple(kwargs["inputs_embeds"].shape[:2]))


@pytest.fixture(scope="module")
def reference(tiny_qwen):
    """Model and processor, loaded without the package."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(tiny_qwen)


@pytest.fixture(scope="module")
def judge(tiny_qwen):
    return PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="float32", batch_size=3)


@pytest.fixture(scope="module")
def pairs():
    """Seven pairs of images of several sizes and modes; none is of one size with its neighbour."""
    sizes = [(56, 56), (112, 84), (90, 61), (28, 140), (300, 200), (40, 33), (112, 112), (57, 200)]
    modes = ["RGB", "RGBA", "L", "P", "RGBA", "RGB", "RGB", "L"]
    images = [noise(seed, size, mode) for seed, (size, mode) in enumerate(zip(sizes, modes, strict=True))]
    return list(zip(images[:-1], images[1:], strict=True))


@pytest.fixture(scope="module")
def questions(pairs):
    return [QUESTIONS[index % 3] for index in range(len(pairs))]


@pytest.fixture(scope="module")
def expected(reference, pairs, questions):
    """Scores of the usage example."""
    scores = usages(*reference, pairs, questions)
    assert spread(scores) > 1e-3 and max(scores) - min(scores) > 0.05
    return scores


class TestScore:
    def test_a_batch_has_questions(self, judge):
        for batch_size in (0, -1):
            with pytest.raises(ValueError, match=f"`batch_size` is {batch_size}; it must be at least 1"):
                PaCoReward(judge.model, judge.processor, batch_size=batch_size)

    @pytest.mark.parametrize(("batch_size", "encoded"), [(1, True), (8, True), (3, False)])
    def test_is_that_of_the_usage_example(self, judge, pairs, questions, expected, batch_size, encoded, monkeypatch):
        other = PaCoReward(judge.model, judge.processor, batch_size=batch_size)
        assert other._takes_encoded_images
        monkeypatch.setattr(other, "_takes_encoded_images", encoded)
        with calls_of(judge.model) as calls:
            scores = other.score(pairs, questions)
        assert scores == close(expected) and all(isinstance(score, float) for score in scores)
        assert all(("pixel_values" in kwargs) != encoded for kwargs in calls)
        rows = [len(kwargs["input_ids"]) for kwargs in calls]
        assert sum(rows) == 7 and len(rows) == -(-7 // batch_size) and max(rows) == min(batch_size, 7)
        # Batch mates did have an effect to be kept out: rows are padded
        assert batch_size == 1 or any(not kwargs["attention_mask"].all() for kwargs in calls)
        # Twin: the question is seen
        assert other.score(pairs, questions[::-1]) != close(expected, 1e-3)

    def test_surrounding_autocast_does_not_change_the_scores(self, judge, pairs, questions):
        scores = judge.score(pairs, questions)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = torch.rand(3, 3)
            assert (a @ a).dtype == torch.bfloat16  # autocast does something here
            assert judge.score(pairs, questions) == scores

    def test_nothing_to_score(self, judge):
        for questions in (SHORT, []):
            assert judge.score([], questions) == judge.score_sets([], questions) == judge.explain([], questions) == []

    def test_symmetric_is_the_mean_of_both_orders(self, judge, pairs, questions, expected):
        swapped = judge.score([pair[::-1] for pair in pairs], questions)
        assert swapped != close(expected, 1e-2)
        symmetric = judge.score(pairs, questions, symmetric=True)
        assert symmetric == close([(a + b) / 2 for a, b in zip(expected, swapped, strict=True)])

    def test_the_score_of_a_set_is_the_mean_over_its_pairs(self, judge, reference):
        images = [noise(seed, (56 + 28 * (seed % 3), 56)) for seed in range(9)]
        sets = [images[:2], images[2:6], images[6:]]
        by_hand = [
            [usage(*reference, first, second, question) for first, second in combinations(images, 2)]
            for images, question in zip(sets, QUESTIONS, strict=True)
        ]
        assert [len(scores) for scores in by_hand] == [1, 6, 3] and spread(by_hand[1]) > 1e-4
        assert judge.score_sets(sets, QUESTIONS) == close([sum(values) / len(values) for values in by_hand])


@pytest.fixture(scope="module")
def single():
    """Nine questions about four images of several sizes and modes, as lists of images and of questions."""
    sizes, modes = [(56, 56), (90, 61), (28, 140), (112, 112)], ["RGB", "RGBA", "P", "L"]
    images = [noise(seed, size, mode) for seed, (size, mode) in enumerate(zip(sizes, modes, strict=True))]
    texts = ["a fox", "a red fox in deep snow, in the style of a woodcut", "snow"]
    return [images[index % 4] for index in range(9)], [shows_question(texts[index % 3]) for index in range(9)]


class TestImagesOfACall:
    """Images are read and encoded many at a time, and let go after their last batch."""

    def test_all_images_are_encoded_in_one_forward_within_a_limit(self, judge, monkeypatch):
        images, scores = [noise(seed, (56, 56 + 28 * (seed % 2))) for seed in range(10)], []
        pairs = list(zip(images, images[1:], strict=False))  # batches of 3
        for limit, expected in ((2**22, 1), (5 * 56 * 70, 2), (0, 3)):
            monkeypatch.setattr(paco_reward, "_PIXELS_PER_FORWARD", limit)
            with patches_of(judge) as patches:
                scores.append(judge.score(pairs, SHORT))
            assert sum(patches) == 5 * 16 + 5 * 24 and len(patches) == expected
        assert scores[0] == close(scores[1]) and scores[0] == close(scores[2])

    @pytest.mark.parametrize("encoded", [True, False])
    def test_they_are_let_go_after_their_last_batch(self, judge, encoded, monkeypatch):
        monkeypatch.setattr(judge, "_takes_encoded_images", encoded)
        images = [noise(seed) for seed in range(5)]
        monkeypatch.setattr(paco_reward, "_PIXELS_PER_FORWARD", 0)
        pairs = [(images[0], images[1]), (images[2], images[3]), (images[0], images[4])]
        kept = []
        with patches_of(judge) as patches, torch.inference_mode():
            batches = judge._image_batches(pairs, [[0], [1], [2]])
            for batch in batches:
                assert len(batch) == 2
                kept.append(len(batches.gi_frame.f_locals["encoded_images"]))
        assert kept == [1, 1, 0]  # image 0 waits for the last batch
        assert patches == ([32, 32, 16] if encoded else [])


@pytest.fixture(scope="module")
def shared():
    """Eight pairs of three first images of different sizes, with questions of different lengths."""
    a, b, c, d, e = (
        noise(seed, size) for seed, size in enumerate([(56, 56), (112, 112), (84, 56), (28, 112), (112, 84)])
    )
    pairs = [(a, b), (b, c), (a, d), (c, e), (b, a), (a, c), (b, b), (e, a)]
    return pairs, [QUESTIONS[index] for index in (0, 2, 1, 0, 0, 2, 1, 2)]


class TestSharedBeginnings:
    """Pairs of a batch with the same first image: the language model reads what they begin with once."""

    def test_of_several_questions_about_each_pair(self, judge, reference):
        """Two levels: the first image, and both. Tokens in closed form."""
        panels = [noise(seed) for seed in range(4)]
        pairs = [pair for pair in combinations(panels, 2) for _ in range(3)]
        questions = [t2is_bench_question(text) for text in ("The fox is red.", "A fox.", "Snow in all of them.")] * 6
        expected = usages(*reference, pairs, questions)
        assert spread(expected) > 1e-5 and max(expected) - min(expected) > 0.02
        judge = PaCoReward(judge.model, judge.processor, batch_size=18)
        with rows_of(judge) as rows, patches_of(judge) as patches:
            assert judge.score(pairs, questions) == close(expected)
        # 56 x 56 pixels are four tokens; between two images are the end of the one and the start of the other
        processor = reference[1]
        text = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
        before = processor.tokenizer(text[: text.index("<|image_pad|>")]).input_ids
        first, second = len(before) + 4, 2 + 4
        assert patches == [4 * 16]
        copies = [(first.copy(), second.copy()) for first, second in pairs]  # no image is the same as another's
        with rows_of(judge) as rows_of_copies:
            assert judge.score(copies, questions) == close(expected)
        (whole,) = {length for _, length in rows_of_copies}
        assert rows == [(3, first), (6, second), (18, whole - first - second)]

    def test_of_questions_and_images_of_different_sizes(self, judge, reference, shared):
        """Each pair with each question, in any order."""
        pairs = [pair for pair in shared[0] for _ in QUESTIONS]
        questions = QUESTIONS * len(shared[0])
        expected = usages(*reference, pairs, questions)
        assert spread(expected) > 1e-5
        order = np.random.default_rng(0).permutation(len(pairs)).tolist()
        for batch_size in (5, 40):
            other = PaCoReward(judge.model, judge.processor, batch_size=batch_size)
            with calls_of(judge.model) as calls:
                scores = other.score([pairs[index] for index in order], [questions[index] for index in order])
            assert scores == close([expected[index] for index in order])
            # What is not shared comes behind a cache, with padding that the mask leaves out
            assert all("past_key_values" in kwargs for kwargs in calls) and len(calls) == -(-24 // batch_size)
            assert any(not kwargs["attention_mask"].all() for kwargs in calls)


def test_questions_about_the_same_images_are_neighbours():
    draws = np.random.default_rng(0)
    images = [pair for pair in combinations("abcdef", 2) for _ in range(4)]
    images = [images[index] for index in draws.permutation(len(images))]
    prompts = ["?" * int(draws.integers(1, 99)) for _ in images]
    order = order_for_sharing(images, prompts)
    assert sorted(order) == list(range(60)) != order
    for count, num_groups in ((2, 15), (1, 5)):  # by both images, and by the first
        assert len(list(groupby(order, key=lambda index: images[index][:count]))) == num_groups
    # Within a pair by length
    lengths = [len(prompts[index]) for index in order]
    assert all(lengths[start : start + 4] == sorted(lengths[start : start + 4]) for start in range(0, 60, 4))


def greedy(model, processor, first, second, question, count):
    """Token by token, each by a whole forward: the ids, up to an end of the text."""
    ids, inputs = [], usage_inputs(processor, (first, second), question)
    for _ in range(count):
        with torch.no_grad():
            token = model(**inputs).logits[0, -1].argmax()
        if token in model.generation_config.eos_token_id:
            break
        ids.append(token.item())
        for name, value in (("input_ids", token), ("attention_mask", 1), ("mm_token_type_ids", 0)):
            inputs[name] = torch.cat([inputs[name], torch.full((1, 1), int(value))], dim=1)
    return processor.tokenizer.decode(ids)


class TestExplain:
    def test_is_the_greedy_answer(self, judge, reference, pairs, questions):
        answers = judge.explain(pairs, questions, max_new_tokens=6)
        assert answers == [
            greedy(*reference, *pair, question, 6) for pair, question in zip(pairs, questions, strict=True)
        ]
        assert len(set(answers)) > 4 and all(answers)

    def test_a_generation_config_that_samples_does_not_matter(self, judge, monkeypatch, recwarn):
        pair = (noise(0), noise(1))
        expected = judge.explain([pair], SHORT, max_new_tokens=6)
        config = copy.deepcopy(judge.model.generation_config)
        config.update(do_sample=True, temperature=5.0, top_p=0.95, top_k=500)
        monkeypatch.setattr(judge.model, "generation_config", config)

        # The config has an effect: without the judge's own settings the answers differ from draw to draw
        images = [load_image(image, patch_size_of(judge.processor), "") for image in pair]
        drawn = set()
        for seed in range(3):
            torch.manual_seed(seed)
            drawn.add(tuple(judge.model.generate(**judge._inputs([SHORT], images), max_new_tokens=6)[0].tolist()))
        assert len(drawn) == 3

        recwarn.clear()
        for seed in range(3):
            torch.manual_seed(seed)
            assert judge.explain([pair], SHORT, max_new_tokens=6) == expected
        assert [str(warning.message) for warning in recwarn if "sampl" in str(warning.message)] == []


class TestBadInput:
    @pytest.mark.parametrize(
        ("images", "question", "message"),
        [
            ([(noise(0), noise(1)), (noise(0),) * 3], SHORT, r"images\[1\]"),
            ([(noise(0), noise(1))] * 4 + [(noise(2), "/nowhere/gone.png")], SHORT, "question 4 .*gone.png"),
            *(
                ([(noise(0), noise(1))], f"Alike?<|{token}|>", rf"`prompts\[0\]` has '<\|{token}\|>'")
                for token in (
                    "im_start",
                    "im_end",
                    "endoftext",
                    "vision_start",
                    "vision_end",
                    "image_pad",
                    "video_pad",
                )
            ),
        ],
    )
    def test_pairs_and_questions(self, judge, images, question, message):
        with pytest.raises(ValueError, match=message):
            judge.score(images, question)

    def test_weights_that_are_not_finite(self, tiny_qwen):
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        pairs, questions = [(noise(0), noise(1))] * 3, [LONG, SHORT, SHORT + " Or zigzag?"]
        assert len(judge.score(pairs, questions)) == 3
        tokens = [set(judge.processor.tokenizer(question).input_ids) for question in questions]
        (token, *_) = tokens[2] - tokens[0] - tokens[1]
        with torch.no_grad():
            judge.model.get_input_embeddings().weight[token] = float("inf")
        with pytest.raises(ValueError, match="question 2"):
            judge.score(pairs, questions)
        assert len(judge.score(pairs[:2], questions[:2])) == 2


@pytest.fixture(scope="module")
def adapter(tiny_qwen, tmp_path_factory):
    """Folder of a LoRA adapter with an effect, of the language model's linear layers, without a processor."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, target_modules=r".*language_model.*\.(\w+_proj)")
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # B starts at zero, and A as the global random state is
                assert ("lora_B" in name) == torch.equal(parameter, torch.zeros_like(parameter))
                parameter.normal_(std=0.1, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "processor_config.json").exists()
    return folder


@pytest.fixture(scope="module")
def expected_adapted(tiny_qwen, adapter, reference, pairs, questions, expected):
    """Scores of the adapter as PEFT loads it."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen, dtype=torch.float32)
    scores = usages(PeftModel.from_pretrained(model, adapter).eval(), reference[1], pairs, questions)
    assert min(abs(a - b) for a, b in zip(scores, expected, strict=True)) > 1e-3  # the adapter has an effect
    return scores


@pytest.fixture
def edited(adapter, tmp_path):
    """Copies the adapter with other names of weights or another configuration."""

    def edit(rename=str, **config):
        folder = shutil.copytree(adapter, tmp_path / "edited")
        file = folder / "adapter_model.safetensors"
        save_file({rename(name): value for name, value in load_file(file).items()}, file)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return edit


class TestFromPretrained:
    def test_adapter(self, adapter, pairs, questions, expected, expected_adapted):
        judge = PaCoReward.from_pretrained(adapter, device="cpu", batch_size=2)
        assert isinstance(judge.model, PeftModel) and judge.name == str(adapter) and judge.batch_size == 2
        assert judge._takes_encoded_images and judge.score(pairs, questions) == close(expected_adapted)
        judge._takes_encoded_images = False
        assert judge.score(pairs, questions) == close(expected_adapted)

    def test_an_adapter_finds_its_base_from_another_directory(
        self, adapter, tiny_qwen, tmp_path, monkeypatch, pairs, questions, expected_adapted
    ):
        """As trained by a relative path: `tiny-qwen` beside the run's directory."""
        folder = shutil.copytree(adapter, tmp_path / "work" / "runs" / "judge")
        shutil.copytree(tiny_qwen, tmp_path / "work" / "tiny-qwen")
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "tiny-qwen"}))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        judge = PaCoReward.from_pretrained("../work/runs/judge", device="cpu", batch_size=2)
        assert judge.score(pairs, questions) == close(expected_adapted)
        shutil.rmtree(tmp_path / "work" / "tiny-qwen")
        with pytest.raises((OSError, ValueError), match="tiny-qwen"):
            PaCoReward.from_pretrained("../work/runs/judge", device="cpu")

    def test_processor_of_the_adapter(self, adapter, judge, pairs, tmp_path):
        """The adapter's own if it has one, with the number of pixels it was trained at; else that of the base."""
        folder = shutil.copytree(adapter, tmp_path / "adapter")
        assert pixel_limit(PaCoReward.from_pretrained(folder, device="cpu").processor) == 112 * 112
        processor = copy.deepcopy(judge.processor)
        limit_pixels(processor, 56 * 56)
        processor.save_pretrained(folder)
        own = PaCoReward.from_pretrained(folder, device="cpu")
        assert pixel_limit(own.processor) == 56 * 56
        base = PaCoReward.from_pretrained(adapter, device="cpu")
        assert abs(own.score(pairs[4:5], LONG)[0] - base.score(pairs[4:5], LONG)[0]) > 1e-3
        # An older name of the file
        (folder / "processor_config.json").unlink()
        processor.image_processor.save_pretrained(folder)
        assert (folder / "preprocessor_config.json").is_file()
        assert pixel_limit(PaCoReward.from_pretrained(folder, device="cpu").processor) == 56 * 56

    def test_dtype(self, tiny_qwen, adapter, judge, pairs, questions, expected, tmp_path):
        low = PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="bfloat16")
        assert {parameter.dtype for parameter in low.model.parameters()} == {torch.bfloat16}
        assert PaCoReward.from_pretrained(adapter, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
        scores = low.score(pairs, questions)
        assert scores == close(expected, 0.05) and scores != close(expected, 1e-5)
        # "auto" is that of the files
        low.model.save_pretrained(tmp_path)
        judge.processor.save_pretrained(tmp_path)
        assert PaCoReward.from_pretrained(tmp_path, device="cpu").model.dtype == torch.bfloat16

    def test_full_models_in_pickles_are_refused(self, tiny_qwen, tmp_path):
        folder = shutil.copytree(tiny_qwen, tmp_path / "model")
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        PaCoReward.from_pretrained(folder, device="cpu")
        (folder / "model.safetensors").unlink()
        AutoModelForImageTextToText.from_pretrained(folder)  # without the judge it would load
        with pytest.raises((OSError, ValueError), match="model.safetensors"):
            PaCoReward.from_pretrained(folder, device="cpu")

    def test_an_adapter_in_a_pickle(self, tiny_qwen, edited, reference, pairs, questions, expected_adapted):
        folder = edited()
        torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
        PaCoReward.from_pretrained(folder, device="cpu")  # beside a safetensors file it does no harm
        (folder / "adapter_model.safetensors").unlink()
        model = AutoModelForImageTextToText.from_pretrained(tiny_qwen, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder).eval()  # PEFT takes it
        assert usages(model, reference[1], pairs[:1], questions[:1]) == close(expected_adapted[:1])
        with pytest.raises(ValueError, match="no adapter_model.safetensors"):
            PaCoReward.from_pretrained(folder, device="cpu")

    @pytest.mark.parametrize(
        ("rename", "config", "message"),
        [
            (lambda name: name.replace("lora_B", "lora_C"), {}, "does not fit.*missing"),
            # Layers of the file that the configuration does not name: no adapter of anybody's
            (str, {"target_modules": r".*language_model.*\.q_proj"}, "does not fit.*language_model"),
            # Layers of the configuration that have no weights, in the vision tower
            (str, {"target_modules": r".*\.(\w+_proj)"}, "does not fit.*visual"),
            (str, {"base_model_name_or_path": None}, "base_model_name_or_path"),
            (str, {"base_model_name_or_path": 3}, "The adapter .*edited' cannot be read"),
            (str, {"peft_type": "NEW"}, "The adapter .*edited' cannot be read"),
            (str, {"r": "four"}, "edited' does not fit"),
        ],
        ids=["a matrix", "no place", "no weights", "no base", "a number", "a new type", "a rank in words"],
    )
    def test_an_adapter_that_does_not_fit(self, edited, rename, config, message):
        with pytest.raises(ValueError, match=message):
            PaCoReward.from_pretrained(edited(rename, **config), device="cpu")

    @pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
    def test_is_complete_while_a_zero3_config_is_live(
        self, tiny_qwen, adapter, pairs, questions, expected, expected_adapted
    ):
        from transformers.integrations import deepspeed as hf_deepspeed

        config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
        try:
            for folder, scores in ((tiny_qwen, expected), (adapter, expected_adapted)):
                assert is_deepspeed_zero3_enabled()  # the effect exists: from_pretrained would partition
                judge = PaCoReward.from_pretrained(folder, device="cpu")
                assert is_deepspeed_zero3_enabled() and config is not None
                assert all(parameter.numel() > 0 for parameter in judge.model.parameters())
                assert not any(hasattr(parameter, "ds_id") for parameter in judge.model.parameters())
                assert judge.score(pairs, questions) == close(scores)
        finally:
            hf_deepspeed.unset_hf_deepspeed_config()


def test_of_the_hub_the_revision_is_the_adapters_alone(
    tiny_qwen, adapter, tmp_path, pairs, questions, expected_adapted
):
    """Repositories in the cache of the Hub, as `hf download` leaves them there."""

    def put(name, folder, revision, commit):
        repository = tmp_path / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / revision).write_text(commit)
        return shutil.copytree(folder, repository / "snapshots" / commit)

    put("base", tiny_qwen, "main", "a" * 40)
    folder = put("adapter", adapter, "v2", "b" * 40)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "org/base"}))
    for name in PROCESSOR_FILES:
        shutil.copy(tiny_qwen / name, folder / name)
    # What an earlier look-up leaves: there is no such file
    absent = folder.parents[1] / ".no_exist" / folder.name
    absent.mkdir(parents=True)
    (absent / "config.json").touch()
    judge = PaCoReward.from_pretrained("org/adapter", device="cpu", cache_dir=tmp_path, revision="v2")
    assert judge.score(pairs, questions) == close(expected_adapted)
    for name, revision in (("base", "v2"), ("adapter", None)):  # neither is there
        with pytest.raises(OSError):
            PaCoReward.from_pretrained(f"org/{name}", device="cpu", cache_dir=tmp_path, revision=revision)


def test_code_is_run_only_when_asked_for(tiny_qwen, tmp_path, monkeypatch, pairs, questions, expected):
    """A model with code of its own, which leaves traces."""
    folder = shutil.copytree(tiny_qwen, tmp_path / "model")
    # Files have the names of layers of older versions, which transformers does not change for code that is not its own
    weights = AutoModelForImageTextToText.from_pretrained(tiny_qwen).state_dict()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for stem, base, module, config, auto_class in (
        ("own_model", Qwen2_5_VLForConditionalGeneration, "modeling", "config.json", "AutoModelForImageTextToText"),
        ("own_processor", Qwen2_5_VLProcessor, "processing", "processor_config.json", "AutoProcessor"),
    ):
        (folder / f"{stem}.py").write_text(
            f"from transformers.models.qwen2_5_vl.{module}_qwen2_5_vl import {base.__name__}\n"
            f"open({str(tmp_path / stem)!r}, 'w').close()\n"
            f"class Own({base.__name__}):\n    pass\n"
        )
        path = folder / config
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {auto_class: f"{stem}.Own"}}))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    judge = PaCoReward.from_pretrained(folder, device="cpu")
    assert not list(tmp_path.glob("own_*"))
    assert type(judge.model) is Qwen2_5_VLForConditionalGeneration and type(judge.processor) is Qwen2_5_VLProcessor
    assert judge.score(pairs, questions) == close(expected)
    PaCoReward.from_pretrained(folder, device="cpu", trust_remote_code=True)
    assert sorted(path.name for path in tmp_path.glob("own_*")) == ["own_model", "own_processor"]


def test_one_image_is_no_list(judge, tmp_path):
    """Of a path, each letter would be an image."""
    image, path = noise(1), write_image(tmp_path / "a.png", 1)
    served = ServedJudge("http://127.0.0.1:9/v1", "a")
    for images in (image, path, path.encode()):
        for of_list in (
            judge.score,
            judge.score_sets,
            judge.score_images,
            judge.rate,
            judge.explain,
            served.score_images,
        ):
            with pytest.raises(ValueError, match="Pass a list"):
                of_list(images, "Is it red?")
    for of_groups in (judge.score_sets, judge.rate):
        with pytest.raises(ValueError, match="Pass a list"):
            of_groups([path], "Is it red?")
    served.close()


@pytest.mark.parametrize("name", ["qwen2.5", *OTHER_JUDGES, INDEPENDENT_JUDGE])
def test_scores_of_each_family_are_those_of_the_usage_example(reference, pairs, questions, shared, single, name):
    model, processor = reference if name == "qwen2.5" else build_other_judge(name, reference[1])
    judge = PaCoReward(model, processor, name=name, batch_size=3)
    expected = usages(model, processor, pairs, questions)
    assert max(expected) - min(expected) > 0.05
    assert judge.score(pairs, questions) == close(expected)
    assert judge.score(*shared) == close(usages(model, processor, *shared))
    images, prompts = single
    of_images = usages(model, processor, [(image,) for image in images], prompts)
    assert judge.score_images(images, prompts) == close(of_images)
    assert judge.score_images(images[::-1], prompts) != close(of_images, 1e-3)
    assert all(isinstance(text, str) for text in judge.explain(pairs[:2], questions[:2], max_new_tokens=2))


class TestIdentity:
    """What tells a judge from another one of the same name."""

    def test_fingerprint_follows_the_weights(self, tiny_qwen, tmp_path):
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        before = judge.fingerprint
        assert len(before) == 16
        copied = shutil.copytree(tiny_qwen, tmp_path / "another" / "place")
        assert PaCoReward.from_pretrained(copied, device="cpu").fingerprint == before  # the place does not matter
        other = build_tiny_qwen2_5_vl(tmp_path / "other", seed=1)
        assert PaCoReward.from_pretrained(other, device="cpu").fingerprint != before
        assert PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="bfloat16").fingerprint != before
        with torch.no_grad():
            judge.model.get_output_embeddings().weight.add_(1e-3)
        assert judge.fingerprint != before

    def test_large_weights_are_sampled_everywhere(self):
        module = torch.nn.Linear(200, 200, bias=False)
        found = {weights_fingerprint(module)}
        for part in (slice(0, 100), slice(100, 200)):
            with torch.no_grad():
                module.weight[part] += 1
            found.add(weights_fingerprint(module))
        assert len(found) == 3


def test_a_tokenizer_without_yes_is_found_before_the_weights_are_read(tiny_qwen, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_qwen, tmp_path / "judge")
    # Without the merges that make it, the text is three tokens
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["merges"] = []
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] not in ("Yes", "No")]
    file.write_text(json.dumps(content), encoding="utf-8")
    read = []
    monkeypatch.setattr(
        paco_reward.AutoModelForImageTextToText, "from_pretrained", lambda *args, **kwargs: read.append(args)
    )
    for load in (PaCoReward.load_processor, PaCoReward.from_pretrained):
        with pytest.raises(ValueError, match="encodes 'Yes' as 3 tokens"):
            load(folder)
    assert read == []


class TestPrecision:
    def test_scores_of_a_bf16_model_are_not_those_of_its_coarse_logits(self, tiny_qwen):
        """Logits of a bf16 model above 16 come in steps of an eighth: pairs would tie that are not alike."""
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="bfloat16", batch_size=32)
        pairs = [(noise(index), noise(index + 1)) for index in range(24)]
        head = judge.model.get_output_embeddings()
        states = []
        hook = head.register_forward_hook(lambda module, args, output: states.append((args[0], output)))
        scores = judge.score(pairs, SHORT)
        hook.remove()
        hidden, logits = (torch.cat([state[index][:, -1] for state in states]) for index in range(2))
        # Raised as a whole, which changes no probability
        coarse = (logits + 24).to(torch.bfloat16)
        assert len(set((coarse[:, judge.yes_id] - coarse[:, judge.no_id]).tolist())) < len(pairs)
        assert len(set(scores)) == len(pairs)
        weight = head.weight.float()
        expected = torch.sigmoid(hidden.float() @ (weight[judge.yes_id] - weight[judge.no_id]))
        assert scores == pytest.approx(expected.tolist(), abs=1e-6)

    def test_a_model_that_changes_its_logits_is_read_from_them(self, tiny_qwen, pairs, questions, expected):
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        judge.model.config.get_text_config().logit_scale = 0.5
        head = judge.model.get_output_embeddings()
        head.register_forward_hook(lambda module, args, output: output * 0.5)
        halved = torch.sigmoid(torch.logit(torch.tensor(expected, dtype=torch.float64)) / 2)
        assert halved.tolist() != close(expected)
        assert judge.score(pairs, questions) == close(halved.tolist())


class TestTemplates:
    def test_text_in_front_of_the_images(self, tiny_qwen):
        """Pairs with the same first image do not begin alike then."""
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        template, parts = judge.processor.chat_template, "for part in message.content"
        judge.processor.chat_template = template.replace(parts, f"{parts} | sort(attribute='type', reverse=true)")
        first = noise(0)
        pairs, questions = [(first, noise(1)), (first, noise(2)), (first, noise(3))], [SHORT, LONG, SHORT]
        alone = [judge.score([pair], question)[0] for pair, question in zip(pairs, questions, strict=True)]
        assert judge.score(pairs, questions) == close(alone)
        judge.processor.chat_template = template
        assert judge.score(pairs, questions) != close(alone)

    def test_special_tokens_are_those_of_the_template(self, tiny_qwen):
        """A tokenizer that puts a token of the beginning in front would do so a second time."""
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        pairs = [(noise(0), noise(1))]
        for takes_encoded_images in (True, False):
            judge._takes_encoded_images = takes_encoded_images
            expected = judge.score(pairs, SHORT)
            tokenizer = judge.processor.tokenizer
            before = tokenizer._tokenizer.post_processor
            tokenizer._tokenizer.post_processor = TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.pad_token_id)]
            )
            assert tokenizer("Same?").input_ids[0] == tokenizer.pad_token_id
            assert judge.score(pairs, SHORT) == expected
            tokenizer._tokenizer.post_processor = before


@pytest.mark.parametrize("prompts", [None, 5])
def test_questions_that_are_none(prompts):
    assert broadcast_questions("Same?", 2, lambda text: []) == ["Same?", "Same?"]
    with pytest.raises(TypeError, match=f"`prompts` is {prompts}; it must be a question"):
        broadcast_questions(prompts, 2, lambda text: [])
    with pytest.raises(ValueError, match=r"`prompts\[1\]` is ' '; it must be a question"):
        broadcast_questions(["Same?", " "], 2, lambda text: [])
