# SPDX-License-Identifier: Apache-2.0
"""Training prompts that occur in a benchmark: which texts are the same, nearly the same, and others that look alike."""

import pytest

from paco_trl.dataset_building.pair_building import connected_prompts
from paco_trl.image_benchmarks import find_leaks
from paco_trl.image_benchmarks.leakage import leakage_text
from paco_trl.utils.text import normalized, split_words


BENCH = ["A fox walks through the four seasons of a birch forest, in watercolour.", "A dentist at work, in blue."]


def is_near(training: str, benchmark: str) -> bool:
    """Whether one text is found to be a near-duplicate of another, and that of the first the other way."""
    found, back = (find_leaks([one], [two], ["x"]) for one, two in ((training, benchmark), (benchmark, training)))
    assert found["exact"] == back["exact"] == [] and found == back
    return bool(found["near"])


def words(count: int, first: int = 0) -> list[str]:
    return [f"w{number}" for number in range(first, first + count)]


def test_word_for_word():
    training = [
        "Something else, of which none of the words are shared with it at all.",
        "a FOX walks through the four seasons of a birch forest -- in watercolour",
        "A fox walks through the four seasons of a birch forest, in watercolour.",
    ]
    found = find_leaks(training, BENCH, ["x", "y"])
    assert found == {"num_training_prompts": 3, "exact": [{"id": "x", "training_row": 1}], "near": []}
    assert "3 training prompts, the same text: x." in leakage_text(found)
    none = find_leaks(training[:1], BENCH, ["x", "y"])
    assert none == {"num_training_prompts": 1, "exact": [], "near": []} and "none" in leakage_text(none)
    assert "not checked" in leakage_text(None)
    # The same text twice in the benchmark is two prompts of it
    twice = find_leaks(training, [BENCH[0]] * 2, ["en/1", "cn/1"])
    assert [one["id"] for one in twice["exact"]] == ["en/1", "cn/1"]


def test_chinese_and_japanese_characters_are_words():
    assert split_words("给她加一顶红帽子，Photo 2!") == "给 她 加 一 顶 红 帽 子 photo 2".split()
    assert split_words("ﾈｺを赤くする。") == "ネ コ を 赤 く す る".split()
    assert split_words("모자를 추가해 café") == "모자를 추가해 café".split()  # these have blanks
    assert find_leaks(["把背景换成城市"], ["把背景换成城市。"], ["x"])["exact"]


def test_what_is_the_same_is_the_same_everywhere():
    """The split of a dataset, the writer of prompts and the search for leaks agree."""
    same = [("A fox_trot, in ＢＬＵＥ!", "a fox trot in blue"), ("红 帽子。", "红帽子"), ("1 + 1", "1  +\n1")]
    other = [("1 + 1", "1 1"), ("का", "की"), ("🙂", "🙁"), ("naive", "naïve")]
    for first, second in same + other:
        assert (normalized(first) == normalized(second)) is ((first, second) in same)
        assert bool(find_leaks([first], [second], ["x"])["exact"]) is ((first, second) in same)
        assert (len(connected_prompts({"a": first, "b": second}, {})) == 1) is ((first, second) in same)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("Change the color of the car on the left to red.", "Change the color of the car on the left to blue."),
        ("a photo of a cat", "A poster with a photo of a cat, a dog and two birds that sit in a tree in spring."),
        ("!?", "A cat."),
    ],
)
def test_instructions_that_look_alike_are_others(one, two):
    assert not is_near(one, two)


def test_the_threshold_lies_between():
    text = " ".join(words(100))
    assert is_near(text, " ".join("other" if n % 10 == 0 else word for n, word in enumerate(words(100))))
    assert not is_near(text, " ".join("other" if n % 5 == 0 else word for n, word in enumerate(words(100))))
    # A part of a longer text; 19 shared sequences of words can be a set phrase
    assert is_near(" ".join(words(24)), " ".join(words(200)))
    assert not is_near(" ".join(words(23)), " ".join(words(200)))
    assert is_near(" ".join(words(100)), " ".join([*words(40), *words(60, 500)]))  # 36 of 96
    assert not is_near(" ".join(words(100)), " ".join([*words(30), *words(70, 500)]))  # 26 of 96


def test_the_nearest_one_is_told():
    text = words(60)
    training = [[*text[:40], *words(20, 500)], text[:55] + ["other"] * 5, [*text[:30], *words(30, 700)]]
    (found,) = find_leaks([" ".join(one) for one in training], [" ".join(text)], ["x"])["near"]
    assert found["training_row"] == 1
