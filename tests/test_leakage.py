# SPDX-License-Identifier: Apache-2.0
"""Training prompts that occur in a benchmark: which texts are the same, nearly the same, and others that look alike."""

import random

import pytest

from paco_trl.data.texts import normalized, words_of
from paco_trl.dataset_building.pairs import connected_prompts
from paco_trl.image_benchmarks import find_leaks
from paco_trl.image_benchmarks.leakage import NEAR_DUPLICATE


BENCH = ["A fox walks through the four seasons of a birch forest, in watercolour.", "A dentist at work, in blue."]


def near(training: str, benchmark: str) -> float | None:
    """The similarity by which one text is found to be a near-duplicate of another, and that of both the other way."""
    found, back = (find_leaks([one], [two], ["x"]) for one, two in ((training, benchmark), (benchmark, training)))
    assert found["exact"] == back["exact"] == []
    assert [one["similarity"] for one in found["near"]] == [one["similarity"] for one in back["near"]]
    return found["near"][0]["similarity"] if found["near"] else None


def words(count: int, first: int = 0) -> list[str]:
    return [f"w{number}" for number in range(first, first + count)]


def test_word_for_word():
    training = [
        "Something else, of which none of the words are shared with it at all.",
        "a FOX walks through the four seasons of a birch forest -- in watercolour",
        "A fox walks through the four seasons of a birch forest, in watercolour.",
    ]
    found = find_leaks(training, BENCH, ["x", "y"])
    assert found == {
        "num_training_prompts": 3,
        "exact": [{"id": "x", "training_row": 1, "text": training[1]}],
        "near": [],
    }
    assert find_leaks(training[:1], BENCH, ["x", "y"]) == {"num_training_prompts": 1, "exact": [], "near": []}
    # The same text twice in the benchmark is two prompts of it
    twice = find_leaks(training, [BENCH[0]] * 2, ["en/1", "cn/1"])
    assert [one["id"] for one in twice["exact"]] == ["en/1", "cn/1"]


def test_chinese_and_japanese_characters_are_words():
    assert words_of("给她加一顶红帽子，Photo 2!") == "给 她 加 一 顶 红 帽 子 photo 2".split()
    assert words_of("ﾈｺを赤くする。") == "ネ コ を 赤 く す る".split()
    assert words_of("모자를 추가해 café") == "모자를 추가해 café".split()  # these have blanks
    assert find_leaks(["把背景换成城市"], ["把背景换成城市。"], ["x"])["exact"]
    assert near("给她加一顶红帽子", "给她加一顶红色帽子") == pytest.approx(16 / 17)
    assert near("猫を赤い帽子をかぶった猫にする", "猫を赤い帽子をかぶった子猫にする") is not None
    assert near("把背景换成城市", "把背景换成海滩") is None
    assert near("把汽车的颜色改成红色", "把汽车的颜色改成蓝色") is None


def test_what_is_the_same_is_the_same_everywhere():
    """The split of a dataset, the writer of prompts and the search for leaks agree."""
    same = [("A fox_trot, in ＢＬＵＥ!", "a fox trot in blue"), ("红 帽子。", "红帽子"), ("1 + 1", "1  +\n1")]
    other = [("1 + 1", "1 1"), ("का", "की"), ("🙂", "🙁"), ("naive", "naïve")]
    for first, second in same + other:
        assert (normalized(first) == normalized(second)) is ((first, second) in same)
        assert bool(find_leaks([first], [second], ["x"])["exact"]) is ((first, second) in same)
        assert (len(connected_prompts({"a": first, "b": second}, {})) == 1) is ((first, second) in same)


class TestShort:
    @pytest.mark.parametrize(
        ("one", "two"),
        [
            ("Change the background to a city", "Change the background to a beach"),
            ("Change the color of the car on the left to red.", "Change the color of the car on the left to blue."),
            ("Add a hat to the man on the right.", "Remove a hat from the man on the right."),
            ("a photo of a cat", "A poster with a photo of a cat, a dog and two birds that sit in a tree in spring."),
            ("cat", "cats"),
            ("!?", "A cat."),
        ],
    )
    def test_instructions_that_look_alike_are_others(self, one, two):
        assert near(one, two) is None

    def test_a_word_more(self):
        assert near("Change the background to a city.", "Please change the background to a city") == 12 / 13
        assert near("Add a red hat to the man on the right.", "Add a hat to the man on the right") == 18 / 19
        # Two more of so few words are too many, and another order is another text
        assert near("Change the background to a city", "Please do change the background to a city") is None
        assert (
            near("Put the red cube to the left of the blue one", "Put the blue cube to the left of the red one")
            is None
        )

    def test_a_replaced_word_in_twenty(self):
        text = words(20)
        assert near(" ".join(text), " ".join([*text[:7], "other", *text[8:]])) == 0.95
        assert near(" ".join(text[:19]), " ".join([*text[:7], "other", *text[8:19]])) is None

    def test_the_rarest_words_miss_nothing(self):
        """The training texts are looked up by a few words; a comparison with each of them finds the same."""
        generator = random.Random(0)
        pool = [f"w{number}" for number in range(12)]  # few, so that many texts share many

        def changed(text):
            for _ in range(generator.randrange(4)):
                text.insert(generator.randrange(len(text) + 1), "new")
            return " ".join(text)

        texts = [generator.choices(pool, k=generator.randrange(5, 25)) for _ in range(40)]
        training = [changed(list(text)) for text in texts for _ in range(3)]
        names = [str(number) for number in range(40)]
        benchmark = [" ".join(text) for text in texts]
        found = {one["id"]: one["similarity"] for one in find_leaks(training, benchmark, names)["near"]}
        alone = {}
        for name, text in zip(names, benchmark, strict=True):
            if words_of(text) in map(words_of, training):
                continue
            each = [one["similarity"] for row in training for one in find_leaks([row], [text], [name])["near"]]
            alone |= {name: max(each)} if each else {}
        assert found == alone and len(found) > 5


class TestLong:
    def test_the_threshold_lies_between(self):
        text = " ".join(words(100))
        tenth = near(text, " ".join("other" if n % 10 == 0 else word for n, word in enumerate(words(100))))
        assert NEAR_DUPLICATE < tenth < 0.7
        assert near(text, " ".join("other" if n % 5 == 0 else word for n, word in enumerate(words(100)))) is None

    def test_a_part_of_a_longer_text(self):
        assert near(" ".join(words(24)), " ".join(words(200))) == 1.0
        assert (
            near(" ".join(words(23)), " ".join(words(200))) is None
        )  # 19 shared shingles: a set phrase may be so long
        assert near(" ".join(words(100)), " ".join([*words(40), *words(60, 500)])) == 36 / 96
        assert near(" ".join(words(100)), " ".join([*words(30), *words(70, 500)])) is None  # 26 of 96

    def test_words_between_are_for_short_texts(self):
        for count in (43, 44):
            more = [word for n, word in enumerate(words(count)) for word in ([word, "more"] if n % 5 == 4 else [word])]
            assert (near(" ".join(words(count)), " ".join(more)) is None) == (count == 44)

    def test_the_nearest_one_is_told(self):
        text = words(60)
        training = [[*text[:40], *words(20, 500)], text[:55] + ["other"] * 5, [*text[:30], *words(30, 700)]]
        (found,) = find_leaks([" ".join(one) for one in training], [" ".join(text)], ["x"])["near"]
        assert found["training_row"] == 1 and found["similarity"] == 51 / 56
        assert find_leaks([" ".join(words(300))], [" ".join(text)], ["x"])["near"][0]["text"].endswith("…")
