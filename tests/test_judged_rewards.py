# SPDX-License-Identifier: Apache-2.0
"""Rewards that compare the images of a set: what they ask, and what they make of it."""

import asyncio
import inspect
import math
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from judge_server import JudgeServer, pictures_of
from paco_trl import PaCoReward
from paco_trl.data import criterion_question, edit_following_question, theme_question
from paco_trl.data.columns import criteria_list
from paco_trl.data.questions import edit_consistency_question, reference_question
from paco_trl.rewards import (
    ConsistencyReward,
    EditReward,
    ReferenceReward,
    RubricReward,
    ServedJudge,
    panel_similarity_reward,
)
from paco_trl.rewards.errors import RewardError
from paco_trl.rewards.judge_rewards import select_pairs
from paco_trl.rewards.limits import check_evaluation_scores, check_failures
from paco_trl.rewards.weighting import Rewards
from testing_utils import plain


# In a theme: the judge has no answer
POISON = "poison"
THEME = "a fox through the year"
CRITERIA = {
    "identity": {"face": "The face is the same", "fur": "The fur is red"},
    "style": {"paint": "It is a woodcut"},
    "logic": {"time": "The time goes on", "fur": "The fur is red"},
}


def log_odds(first, second, question):
    """Sees images, their order and the question."""
    return (first.getpixel((0, 0))[0] - 2 * second.getpixel((0, 0))[0]) / 100 + sum(map(ord, question)) % 100 / 50


def score_of(first, second, question):
    return 1 / (1 + math.exp(-log_odds(first, second, question)))


class FormulaJudge:
    """A judge of a user's own."""

    name = "formula"

    def __init__(self):
        self.asked = []

    def score(self, images, prompts):
        self.asked += zip(images, prompts, strict=True)
        return [
            None if POISON in prompt else score_of(*pair, prompt) for pair, prompt in zip(images, prompts, strict=True)
        ]


SETS = [[plain(10), plain(200)], [plain(40), plain(90), plain(5), plain(140)], [plain(70), plain(30), plain(77)]]
THEMES = [THEME, "a cat in the rain", "three ships"]
PROMPTS = ["first", "second", "third"]


def run(result):
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def call(reward, panel_images=SETS, prompts=None, **columns):
    """Calls a reward as the trainer does, sync or async; the themes are there if nothing else is."""
    count = len(panel_images)
    columns = columns or {"theme": THEMES[:count]}
    completions = [plain(index) for index in range(count)]
    return run(reward(prompts or PROMPTS[:count], completions, panel_images=panel_images, rows=[2], **columns))


def mean_over_pairs(score, panels, question):
    scores = [score(first, second, question) for first, second in combinations(panels, 2)]
    return sum(scores) / len(scores)


EXPECTED = [
    mean_over_pairs(score_of, panels, theme_question(theme)) for panels, theme in zip(SETS, THEMES, strict=True)
]


def close(expected):
    return pytest.approx(expected, abs=1e-9)


@pytest.fixture
def judge():
    return FormulaJudge()


@pytest.fixture
def server():
    with JudgeServer(log_odds) as server:
        server.fault = lambda number: "400" if POISON in pictures_of(server.requests[number])[1] else None
        yield server


@pytest.fixture
def served_judge(server):
    judge = ServedJudge(server.url, "judge", timeout=30.0, time_budget=120.0)
    yield judge
    judge.close()


@pytest.fixture(params=["in process", "served"])
def any_judge(request, judge):
    return judge if request.param == "in process" else request.getfixturevalue("served_judge")


class TestConsistency:
    def test_symmetric(self, judge):
        there, back = (mean_over_pairs(score_of, order, theme_question(THEME)) for order in (SETS[1], SETS[1][::-1]))
        assert abs(there - back) > 1e-3
        assert call(ConsistencyReward(judge, symmetric=True), [SETS[1]], theme=[THEME]) == close([(there + back) / 2])

    def test_any_judge(self, any_judge):
        rewards = call(ConsistencyReward(any_judge))
        assert rewards == close(EXPECTED) and len({round(reward, 3) for reward in rewards}) == 3

    def test_criteria_are_averaged_within_and_over_dimensions(self, judge):
        panels = SETS[2]

        def score(text):
            return mean_over_pairs(score_of, panels, criterion_question(text))

        texts = {name: text for of_dimension in CRITERIA.values() for name, text in of_dimension.items()}
        face, fur, paint, hours = map(score, texts.values())
        by_hand = ((face + fur) / 2 + paint + (hours + fur) / 2) / 3
        assert abs(by_hand - (face + fur + paint + hours) / 4) > 1e-3  # the effect
        with_gaps = {**CRITERIA, "style": {"paint": "It is a woodcut", "other": None}, "none": {"a": None}}
        for criteria in (CRITERIA, criteria_list(CRITERIA), with_gaps):
            reward = ConsistencyReward(judge, question="criteria")
            assert call(reward, [panels], criteria=[criteria]) == close([by_hand])
        # The text that is there twice is asked once for each pair
        assert len(judge.asked) == 3 * 3 * 4

    @pytest.mark.parametrize("max_pairs", [0, -1, "3", 1.5])
    def test_a_set_is_scored_by_at_least_one_pair(self, max_pairs):
        with pytest.raises(ValueError, match="`max_pairs` is .*at least 1"):
            ConsistencyReward(SimpleNamespace(name="judge", score=None), max_pairs=max_pairs)
        assert ConsistencyReward(SimpleNamespace(name="judge", score=None), max_pairs=1).max_pairs == 1

    def test_select_pairs(self):
        everything = list(combinations(range(7), 2))
        assert select_pairs(7, None, 0, "a") == select_pairs(7, 21, 0, "a") == everything
        pairs = select_pairs(7, 8, 0, "a")
        assert pairs == select_pairs(7, 8, 0, "a") == sorted(set(pairs)) and len(pairs) == 8
        assert set(pairs) < set(everything)
        assert len({tuple(select_pairs(7, 8, seed, prompt)) for seed, prompt in product(range(5), "abc")}) == 15
        # The same in every version: a run that is resumed compares the same pairs
        assert select_pairs(4, 2, 0, "a") == [(0, 2), (2, 3)]

    def test_a_set_with_one_unanswered_pair_has_no_reward(self, any_judge):
        """The mean of the others would be that of other pairs than its siblings have."""
        reward = ConsistencyReward(any_judge, question="criteria")
        criteria = [{"style": {"a": "One", "b": text}} for text in ("Two", f"Two {POISON}", "Three")]
        rewards = call(reward, [SETS[1]] * 3, criteria=criteria)
        assert rewards[1] is None and 0 < rewards[0] < 1 and 0 < rewards[2] < 1
        # The effect: the first question of each pair was answered
        alone = call(reward, SETS[1:2], criteria=[{"style": {"a": "One"}}])
        assert None not in alone


def test_a_served_judge_makes_a_reward_asynchronous(server, judge, served_judge):
    by_url = ConsistencyReward(base_url=server.url, model="judge")
    assert len(server.requests) == 1  # it was checked
    for reward, is_async in (
        (by_url, True),
        (ConsistencyReward(served_judge), True),
        (ConsistencyReward(judge), False),
    ):
        rewards = Rewards(reward)
        assert rewards.is_async == [is_async] and rewards.names == ["consistency"]
    by_url.judge.close()


class TestEdit:
    SOURCES, EDITED = [plain(200), plain(20)], [plain(90), plain(60)]
    INSTRUCTIONS = ["Make it blue.", "Add a hat."]

    def call(self, reward, sources=SOURCES, **columns):
        return run(reward(self.INSTRUCTIONS, self.EDITED, image=sources, panel_images=[[], []], **columns))

    def test_is_the_square_root_of_the_product(self, any_judge):
        expected = [
            math.sqrt(
                score_of(source, edited, edit_consistency_question(text))
                * score_of(source, edited, edit_following_question(text))
            )
            for text, source, edited in zip(self.INSTRUCTIONS, self.SOURCES, self.EDITED, strict=True)
        ]
        rewards = self.call(EditReward(any_judge))
        assert rewards == close(expected) and abs(rewards[0] - rewards[1]) > 0.01

    def test_several_sources_are_averaged(self, any_judge):
        alone = [self.call(EditReward(any_judge)), self.call(EditReward(any_judge), self.SOURCES[::-1])]
        several = [self.SOURCES, self.SOURCES[:1]]
        rewards = run(EditReward(any_judge)(self.INSTRUCTIONS, self.EDITED, images=several))
        assert abs(alone[0][0] - alone[1][0]) > 0.01
        assert rewards == close([(alone[0][0] + alone[1][0]) / 2, alone[1][1]])

    def test_a_large_source_is_shrunk_for_the_judge(self, server, served_judge):
        large = Image.new("RGB", (4000, 1000), (200, 200, 200))
        self.call(EditReward(served_judge), [large, self.SOURCES[1]])
        sizes = sorted(pictures_of(body)[0][0].size for body in server.requests)
        # Then rounded to whole patches
        assert sizes[-1][0] * sizes[-1][1] == pytest.approx(2_097_152, rel=0.01)
        assert sizes[0][0] * sizes[0][1] < 10_000 and large.size == (4000, 1000)


class TestReference:
    REFERENCES = [[plain(250)], [plain(120), plain(15)], [plain(60), plain(180), plain(33)]]
    ROLES = [["style"], None, ["logic", None, "style"]]
    # By hand: what is asked about each reference
    ASKED = [["style"], ["identity"] * 2, ["logic", "identity", "style"]]

    def scores(self, panels_of_rows):
        return [
            [
                score_of(image, panel, reference_question(role))
                for image, role in zip(*row, strict=True)
                for panel in panels
            ]
            for *row, panels in zip(self.REFERENCES, self.ASKED, panels_of_rows, strict=True)
        ]

    def test_is_the_mean_over_pairs_of_reference_and_panel(self, any_judge):
        scores = self.scores(SETS)
        assert [len(row) for row in scores] == [2, 8, 9] and all(np.std(row) > 0.01 for row in scores)
        reward = ReferenceReward(any_judge)
        rewards = call(reward, references=self.REFERENCES, reference_roles=self.ROLES)
        assert rewards == close([np.mean(row) for row in scores])
        # Twins: without roles, and other references
        assert rewards != pytest.approx(call(reward, references=self.REFERENCES), abs=1e-3)
        assert rewards != pytest.approx(
            call(reward, references=[row[::-1] for row in self.REFERENCES[::-1]]), abs=1e-3
        )

    def test_of_an_edit_or_a_single_image_sees_the_output(self, judge):
        outputs = [plain(value) for value in (90, 60, 7)]
        rewards = ReferenceReward(judge)(PROMPTS, outputs, references=self.REFERENCES, reference_roles=self.ROLES)
        assert rewards == close([np.mean(row) for row in self.scores([[image] for image in outputs])])

    @pytest.mark.parametrize(
        ("columns", "key"),
        [
            ({}, "`references`"),
            ({"references": [[plain(1)], [], None]}, "image 1"),
            ({"references": [["a.png"], [plain(1)], [plain(1)]]}, "PIL"),
            ({"reference_roles": [["style"], ["style"], ["logic"]]}, "image 1.*2"),
            ({"reference_roles": [["style"], ["style", "pose"], None]}, "'pose'.*identity, style, logic"),
        ],
    )
    def test_bad_input(self, judge, columns, key):
        given = {"references": self.REFERENCES, **columns} if columns else {"theme": THEMES}
        with pytest.raises(ValueError, match=key):
            call(ReferenceReward(judge), **given)


def test_metrics_of_a_served_judge(server, served_judge):
    server.fault = {0: "400", 1: "neither", 2: "400"}.get
    logged = {}
    reward = ConsistencyReward(served_judge)
    call(reward, [SETS[1]] * 2, log_metric=logged.__setitem__, theme=[THEME] * 2)
    assert logged == {
        "consistency/unanswered": pytest.approx(3 / 12),
        "consistency/unanswered/refused": pytest.approx(2 / 12),
        "consistency/unanswered/undecided": pytest.approx(1 / 12),
        # Always there: the trainer averages over the calls that logged it
        "consistency/unanswered/unavailable": 0,
        "consistency/unanswered/unreadable": 0,
    }


def test_a_question_in_own_words_is_asked_of_each_pair(caplog):
    """As a judge was trained on it; it needs no column."""
    question = "Do the two images come from the same photograph?"
    reward = ConsistencyReward(judge := FormulaJudge(), question=question)
    expected = [np.mean([score_of(*pair, question) for pair in combinations(panels, 2)]) for panels in SETS]
    assert call(reward, other="column") == pytest.approx(expected)
    assert {asked for _, asked in judge.asked} == {question} and reward.needed_columns == ()
    caplog.clear()
    judge.question = question  # that of its training
    assert ConsistencyReward(judge).question == question and not caplog.records
    for make, remedy in (
        (lambda: ConsistencyReward(judge, question="theme"), "Leave `judge_question`"),
        (lambda: EditReward(judge), "Use a judge"),
    ):
        make()
        message = caplog.records.pop().message
        assert question in message and remedy in message
    for wrong in ("themes", "", " "):
        with pytest.raises(ValueError, match="`question` is .*own words"):
            ConsistencyReward(judge, question=wrong)


class TestUndecided:
    """A model that would begin with another word: what it would say of Yes and No alone is no reward."""

    @pytest.fixture(scope="class")
    @classmethod
    def thinking(cls, tiny_qwen):
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="float32")
        head, tokenizer = judge.model.get_output_embeddings(), judge.processor.tokenizer
        with torch.no_grad():  # along what raises both answers, see `build_tiny_qwen2_5_vl`
            head.weight[tokenizer.convert_tokens_to_ids("fox" if "fox" in tokenizer.get_vocab() else "as")] = (
                1.5 * head.weight[[judge.yes_id, judge.no_id]].mean(dim=0)
            )
        return judge

    @pytest.mark.parametrize("reward", [ConsistencyReward, EditReward, ReferenceReward])
    def test_is_excluded_with_the_reason(self, thinking, tiny_qwen, reward):
        images = [[plain(10), plain(200)]] * 2
        columns = {
            "theme": THEMES[:2],
            "image": [plain(1)] * 2,
            "references": [[plain(2)]] * 2,
            "panel_images": images,
        }
        metrics = {}
        rewards = reward(thinking)
        assert rewards(PROMPTS[:2], [plain(3)] * 2, log_metric=metrics.__setitem__, **columns) == [None, None]
        name = rewards.__name__
        assert metrics[f"{name}/unanswered/undecided"] == metrics[f"{name}/unanswered"] == 1.0
        assert "Yes and No have" in rewards.missing_score_reason
        args = SimpleNamespace(
            max_reward_failures=0.0, max_excluded_images=0.5, max_excluded_groups=0.5, num_generations=2
        )
        with pytest.raises(RewardError, match="Yes and No have .* half is required; the likeliest is '(fox|as)'"):
            missing, is_valid = torch.full((2, 1), torch.nan), torch.zeros(2, dtype=torch.bool)
            check_failures(Rewards(rewards), missing, is_valid, args, "round 0")
        # Twins: one that answers first, and the score itself
        answering = reward(PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="float32"))
        assert None not in answering(PROMPTS[:2], [plain(3)] * 2, **columns) and answering.missing_score_reason is None
        assert 0 < thinking.score([tuple(images[0])], "Alike?")[0] < 1

    def test_a_rating_says_so_too(self, tiny_qwen):
        reward = RubricReward(tiny_qwen, "consistency", device="cpu", dtype="float32")
        assert reward(PROMPTS[:1], [plain(3)]) == [None]
        assert (
            "The digits 0 to 5 have" in reward.missing_score_reason
            and "the likeliest is 'No'" in reward.missing_score_reason
        )

    def test_so_does_a_single_panel(self):
        assert panel_similarity_reward([""], [plain(1)], [[plain(1)]]) == [None]
        rewards = Rewards(panel_similarity_reward)
        with pytest.raises(RewardError, match="panel_similarity_reward 2; panel_similarity_reward: a single panel"):
            check_evaluation_scores(rewards, torch.full((2, 1), torch.nan), 0.5)
