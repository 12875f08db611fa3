# SPDX-License-Identifier: Apache-2.0
"""Evaluation of judges: metrics against direct counts and closed forms, runs that survive a kill, reports."""

import itertools
import json
import math
import multiprocessing
import signal
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, Image, List, Value, load_from_disk
from PIL import Image as PILImage
from PIL import ImageStat
from scipy.stats import kendalltau, spearmanr

from paco_trl.data import (
    criterion_question,
    edit_consistency_question,
    edit_following_question,
    plain_question,
    rankings_to_pairs,
    theme_question,
)
from paco_trl.data.columns import CRITERIA_TYPE, column_types, typed_dataset
from paco_trl.evaluation import (
    ComparingJudge,
    auroc,
    bootstrap_interval,
    calibration_bins,
    evaluate_rankings,
    expected_calibration_error,
    list_order_metrics,
    load_rankings,
    ranking_metrics,
    report_tables,
    save_report,
)
from paco_trl.evaluation.scoring import ScorerTraits, batches, read_traits
from paco_trl.utils.vision_language import load_image
from testing_utils import jsonl, noise, png, wait_until


NAN = float("nan")
METRICS = {"accuracy", "kendall_tau", "spearman_rho", "top1_bottom1"}
ORDERS = list(itertools.permutations(range(4)))


def scores_of_order(order):
    """Scores that put the items in this order."""
    scores = [0.0] * len(order)
    for place, item in enumerate(order):
        scores[item] = 1.0 - place / len(order)
    return scores


def tau_by_counting(order, other):
    """(concordant - discordant) / pairs, for orders without ties: a pair is concordant if both put the same first."""
    agree = [
        (order.index(a) < order.index(b)) == (other.index(a) < other.index(b))
        for a, b in itertools.combinations(range(len(order)), 2)
    ]
    return (2 * sum(agree) - len(agree)) / len(agree)


def rho_by_distances(order, other):
    """1 - 6 sum d^2 / (n (n^2 - 1)), d the differences of the ranks."""
    n = len(order)
    return 1 - 6 * sum((order.index(i) - other.index(i)) ** 2 for i in range(n)) / (n * (n**2 - 1))


def color_image(red, green=0, blue=0, size=(8, 8)):
    return PILImage.new("RGB", size, (red, green, blue))


class ColorScorer:
    """1 - the distance of the mean colors; counts what it is asked, and can fail after some pairs."""

    name = "color"

    def __init__(self, fail_after=None, delay=0.0):
        self.calls = []
        self.fail_after = fail_after
        self.delay = delay

    @property
    def pairs(self):
        return sum(len(images) for images, _ in self.calls)

    def score(self, images, prompts):
        if self.fail_after is not None and self.pairs + len(images) > self.fail_after:
            raise RuntimeError("the scorer broke")
        self.calls.append((images, prompts))
        time.sleep(self.delay)
        return [self.one(first, second, prompt) for (first, second), prompt in zip(images, prompts, strict=True)]

    def one(self, first, second, prompt):
        means = [ImageStat.Stat(image).mean for image in (first, second)]
        return 1 - sum(abs(a - b) for a, b in zip(*means, strict=True)) / (3 * 255)


RANKING_TYPES = {"reference": "image", "candidates": ["image"], "ranking": ["int64"], "criteria": CRITERIA_TYPE}
RANKING_FEATURES = column_types(**RANKING_TYPES, **dict.fromkeys(("prompt", "group", "id"), "string"))


def rankings(count=8, seed=0, **columns):
    """Rankings of 4 flat candidates of a red reference; people rank at random."""
    rng = np.random.default_rng(seed)
    texts = (("style", "ink", "Ink"), ("style", "line", "Lines"), ("identity", "fox", "One fox"))
    rows = [
        {
            "reference": color_image(200),
            "candidates": [color_image(int(red)) for red in rng.permutation([10, 60, 110, 160])],
            "ranking": rng.permutation(4).tolist(),
            "prompt": f"A fox, number {index // 2}.",
            "criteria": [
                {"dimension": kind, "name": name, "text": f"{text} in {index}."} for kind, name, text in texts
            ],
            "group": f"g{index // 2}",
            "id": f"row-{index}",
            **{name: values[index] for name, values in columns.items()},
        }
        for index in range(count)
    ]
    return Dataset.from_list(rows, features=RANKING_FEATURES)


class TestRankingMetrics:
    def test_by_counting_and_the_lists_against_scipy(self):
        taus, num_others = set(), 0
        for predicted, human in itertools.product(ORDERS, ORDERS[::4]):
            scores = scores_of_order(predicted)
            ranks, lists = ranking_metrics(scores, list(human)), list_order_metrics(scores, list(human))
            assert ranks["kendall_tau"] == pytest.approx(tau_by_counting(predicted, human))
            assert ranks["spearman_rho"] == pytest.approx(rho_by_distances(predicted, human))
            assert lists["kendall_tau"] == pytest.approx(kendalltau(predicted, human).statistic)
            assert lists["spearman_rho"] == pytest.approx(spearmanr(predicted, human).statistic)
            # Two places hold the same item in both orders exactly if that item has the same rank in both
            accuracy = sum(a == b for a, b in zip(predicted, human, strict=True)) / 4
            ends = ((predicted[0] == human[0]) + (predicted[3] == human[3])) / 2
            for metrics in (ranks, lists):
                assert metrics.keys() == METRICS
                assert (metrics["accuracy"], metrics["top1_bottom1"]) == (accuracy, ends)
            taus.add(round(ranks["kendall_tau"], 3))
            num_others += lists["kendall_tau"] != pytest.approx(ranks["kendall_tau"])
        assert len(taus) == 7  # 0 to 6 concordant pairs
        assert 0.4 < num_others / 24 / 6 < 0.65
        assert ranking_metrics([0.1, 0.5, 0.9], [2, 1, 0]) == pytest.approx(dict.fromkeys(METRICS, 1.0))
        worst = {"accuracy": 0.0, "kendall_tau": -1.0, "spearman_rho": -1.0, "top1_bottom1": 0.0}
        assert ranking_metrics([0.1, 0.9], [0, 1]) == pytest.approx(worst)

    def test_a_tie_never_counts_as_a_hit(self):
        middle = ranking_metrics([0.9, 0.5, 0.5, 0.1], [0, 1, 2, 3])
        assert (middle["accuracy"], middle["top1_bottom1"]) == (0.5, 1.0)
        assert middle["kendall_tau"] == pytest.approx(5 / math.sqrt(5 * 6))  # tau-b, 5 concordant pairs and a tie
        # Three items that share ranks 2 to 4 have rank 3 each, which is the human rank of one of them
        three = ranking_metrics([0.9, 0.5, 0.5, 0.5], [0, 1, 2, 3])
        assert (three["accuracy"], three["top1_bottom1"]) == (0.25, 0.5)

    def test_equal_scores_have_no_correlation_and_no_hit(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            metrics = ranking_metrics([0.5] * 3, [0, 1, 2])
        assert math.isnan(metrics["kendall_tau"]) and math.isnan(metrics["spearman_rho"])
        assert metrics["accuracy"] == metrics["top1_bottom1"] == 0.0
        assert not math.isnan(ranking_metrics([0.5, 0.5, 0.6], [0, 1, 2])["kendall_tau"])

    @pytest.mark.parametrize("metrics", [ranking_metrics, list_order_metrics])
    def test_wrong_input(self, metrics):
        for scores, ranking in (([0.1, NAN], [0, 1]), ([0.1, None], [0, 1]), ([0.1, 0.2], [0, 0]), ([0.1], [0])):
            with pytest.raises(ValueError, match="scores|human_ranking"):
                metrics(scores, ranking)

    def test_lists_break_ties_by_the_index_the_later_first(self):
        tied = list_order_metrics([0.5, 0.5, 0.5], [2, 1, 0])
        assert tied == pytest.approx(dict.fromkeys(METRICS, 1.0))
        assert list_order_metrics([0.5, 0.5, 0.5], [0, 1, 2])["kendall_tau"] == pytest.approx(-1.0)


class TestBootstrap:
    def test_of_a_share_is_near_the_normal_interval(self):
        values = [1.0] * 120 + [0.0] * 280
        half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
        assert bootstrap_interval(values, n_resamples=5000) == pytest.approx((0.3 - half, 0.3 + half), abs=0.006)
        low, high = bootstrap_interval(values, confidence_level=0.5, n_resamples=5000)
        assert (low, high) == pytest.approx((0.3 - half * 0.6745 / 1.96, 0.3 + half * 0.6745 / 1.96), abs=0.006)

    def test_of_groups_is_wider_when_a_group_agrees_with_itself(self):
        # 40 groups of 10 equal values: no more is known than from 40 values
        values = [float(group % 2) for group in range(40) for _ in range(10)]
        groups = [f"prompt {group}" for group in range(40) for _ in range(10)]
        half = 1.96 * math.sqrt(0.25 / 40)
        alone = bootstrap_interval(values)
        assert alone == pytest.approx((0.5 - half / math.sqrt(10), 0.5 + half / math.sqrt(10)), abs=0.01)
        assert bootstrap_interval(values, groups) == pytest.approx((0.5 - half, 0.5 + half), abs=0.03)
        # Groups that all have the same mean say that nothing is uncertain
        same = bootstrap_interval([0.0, 1.0] * 40, [group for group in range(40) for _ in range(2)])
        assert same == (0.5, 0.5)

    def test_every_value_counts_the_same_whatever_the_size_of_its_group(self):
        values, groups = [1.0] * 30 + [0.0] * 10, [0] * 30 + list(range(1, 11))
        low, high = bootstrap_interval(values, groups, n_resamples=500)
        # The mean of a draw in which group 0 is there k times is 30 k / (30 k + 11 - k)
        possible = [30 * k / (30 * k + 11 - k) for k in range(12)]
        assert min(abs(high - value) for value in possible) < 1e-9
        assert low == 0.0  # group 0 is not drawn with probability (10 / 11)^11 = 0.35

    def test_labels_of_groups_do_not_matter_but_the_seed_does(self):
        values, groups = np.random.default_rng(0).random(60), np.repeat(np.arange(12), 5)
        interval = bootstrap_interval(values, groups)
        assert interval == bootstrap_interval(list(values), [f"g{group}" for group in groups], seed=0)
        assert interval != bootstrap_interval(values, groups, seed=1)
        assert interval == pytest.approx(bootstrap_interval(values, groups, seed=1), abs=0.02)

    def test_undefined_values_are_left_out_and_one_group_has_no_interval(self):
        values = [0.0, 1.0] * 20
        assert bootstrap_interval([*values, NAN, None]) == bootstrap_interval(values)
        assert bootstrap_interval([NAN, *values], ["x", *range(40)]) == bootstrap_interval(values, list(range(40)))
        with pytest.raises(ValueError, match="None of the 2 `values` is a number"):
            bootstrap_interval([NAN, NAN])
        for values, groups in (([0.1, 0.9], ["a", "a"]), ([0.5], None), ([0.1, NAN], ["a", "b"])):
            interval = bootstrap_interval(values, groups)
            assert len(interval) == 2 and all(math.isnan(end) for end in interval)

    def test_strata_give_the_interval_of_the_mean_of_means(self):
        # A large task of 200 rows at 0.9, and a small one of 50 rows at 0.5
        values = [1.0] * 180 + [0.0] * 20 + [1.0] * 25 + [0.0] * 25
        strata = ["large"] * 200 + ["small"] * 50
        half = 1.96 * math.sqrt(0.9 * 0.1 / 200 + 0.5 * 0.5 / 50) / 2
        assert bootstrap_interval(values, strata=strata) == pytest.approx((0.7 - half, 0.7 + half), abs=0.015)
        assert np.mean(bootstrap_interval(values)) == pytest.approx(0.82, abs=0.01)
        # A draw without a stratum: the mean of those that are there
        assert bootstrap_interval([1.0, 0.0], ["a", "b"], strata=["x", "y"]) == (0.0, 1.0)


class TestBinary:
    def test_auroc_is_the_share_of_pairs_in_order(self):
        rng = np.random.default_rng(0)
        for ties in (1, 2, 10):
            scores = np.round(rng.random(60), ties)
            labels = rng.integers(0, 2, 60)
            pairs = itertools.product(scores[labels == 1], scores[labels == 0])
            wins = [1.0 if yes > no else 0.5 if yes == no else 0.0 for yes, no in pairs]
            assert (0.5 in wins) == (ties < 10)
            assert auroc(scores, labels) == pytest.approx(np.mean(wins))
            assert auroc(1 - scores, labels) == pytest.approx(1 - np.mean(wins))
        assert auroc([0.1, 0.2, 0.3], [0, 1, True]) == 1.0
        assert auroc([0.5, 0.5], [0, 1]) == 0.5

    def test_auroc_of_one_class_does_not_exist(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(math.isnan(auroc(scores, labels)) for scores, labels in (([0.1, 0.2], [1, 1]), ([], [])))

    def test_bins(self):
        bins = calibration_bins([0.0, 0.05, 0.1, 0.3, 0.95, 1.0], [0, 1, 0, 1, 1, 1])
        assert bins["count"] == [2, 1, 0, 1, 0, 0, 0, 0, 0, 2]  # 0.1 and 0.3 are in the bin that they open
        assert bins["mean_score"][::9] == pytest.approx([0.025, 0.975])
        assert bins["share_consistent"][:2] == [0.5, 0.0]
        assert math.isnan(bins["mean_score"][2]) and math.isnan(bins["share_consistent"][2])

    def test_expected_calibration_error_has_its_closed_forms(self):
        # 0.9 of the pairs scored 0.9 are consistent, 0.1 of those scored 0.1: calibrated
        scores = [0.9] * 10 + [0.1] * 10
        assert expected_calibration_error(scores, [1] * 9 + [0] + [1] + [0] * 9) == pytest.approx(0.0)
        # All of them are: off by 0.1 and by 0.9
        assert expected_calibration_error(scores, [1] * 20) == pytest.approx(0.5)
        # Bins count by their number of pairs: 30 off by 0.1, 10 off by 0.9
        assert expected_calibration_error([0.9] * 30 + [0.1] * 10, [1] * 40) == pytest.approx(0.3)
        # One bin sees only that the mean is right
        assert expected_calibration_error([0.0, 1.0], [1, 0], num_bins=1) == pytest.approx(0.0)
        assert expected_calibration_error([0.0, 1.0], [1, 0]) == pytest.approx(1.0)
        assert math.isnan(expected_calibration_error([], []))


class QuestionScorer(ColorScorer):
    """Scores that depend on the question and the color of the second image."""

    name = "question"

    def __init__(self, of_question):
        super().__init__()
        self.one = lambda first, second, prompt: of_question(prompt, second.getpixel((0, 0)))


class TestEvaluateRankings:
    def test_means_and_intervals_are_those_of_the_rows(self, tmp_path):
        dataset = rankings()
        scorer = ColorScorer()
        results = evaluate_rankings(scorer, dataset, output_path=tmp_path / "scores.jsonl")
        scores, expected = [], []
        for row in dataset:
            scores.append([scorer.one(row["reference"], candidate, "") for candidate in row["candidates"]])
            expected.append(ranking_metrics(scores[-1], row["ranking"]))
        assert results["metrics"].keys() == METRICS
        for name in METRICS:
            values = [metrics[name] for metrics in expected]
            assert results["metrics"][name]["mean"] == pytest.approx(np.mean(values))
            assert results["metrics"][name]["interval"] == list(bootstrap_interval(values, dataset["group"]))
        low, high = results["metrics"]["accuracy"]["interval"]
        assert low < results["metrics"]["accuracy"]["mean"] < high
        assert (results["num_instances"], results["num_groups"], results["num_undefined_correlations"]) == (8, 4, 0)

        header, *records = jsonl(tmp_path / "scores.jsonl")
        settings = {"scorer": "color", "template": "theme", "dataset_size": 8, "protocol": "default"}
        assert header == results["settings"] == header | settings
        for name, values in (("id", dataset["id"]), ("scores", scores), ("ranking", dataset["ranking"])):
            assert [record[name] for record in records] == values
        assert [record["metrics"] for record in records] == expected

    def test_questions_of_the_templates(self):
        set_prompt = (
            "TWO-PANEL Images with a 1x2 grid layout a fox travels. All in ink. [LEFT]:It leaves. [RIGHT]:It arrives."
        )
        dataset = rankings(3, prompt=[set_prompt, "A fox.", "A dog."]).add_column("theme", [None, None, "Ink."])
        asked = {}
        for template in ("theme", "plain", "criteria"):
            scorer = ColorScorer()
            evaluate_rankings(scorer, dataset, template=template)
            asked[template] = [prompt for _, prompts in scorer.calls for prompt in prompts]
        theme = "TWO-PANEL Images with a 1x2 grid layout a fox travels. All in ink."
        assert asked["theme"] == [theme_question(text) for text in (theme, "A fox.", "Ink.") for _ in range(4)]
        assert [pair["prompt"][0]["content"] for pair in rankings_to_pairs(dataset)][::2] == asked["theme"][::4]
        assert asked["plain"] == [plain_question()] * 12
        texts = [[f"Ink in {index}.", f"Lines in {index}.", f"One fox in {index}."] for index in range(3)]
        assert asked["criteria"] == [criterion_question(text) for of_row in texts for _ in range(4) for text in of_row]

    def test_rows_that_are_no_ranking(self):
        scorer = ColorScorer()
        with pytest.raises(ValueError, match="`ranking` of row 1 "):
            evaluate_rankings(scorer, rankings(2, ranking=[[0, 1, 2, 3], [0, 0, 1, 2]]))
        assert scorer.calls == []

    def test_criteria_count_within_their_dimension_and_dimensions_alike(self, tmp_path):
        def of_question(prompt, color):
            if "Ink" in prompt:
                return 1.0
            return 0.5 if "Lines" in prompt else color[0] / 1000

        evaluate_rankings(QuestionScorer(of_question), rankings(2), "criteria", tmp_path / "scores.jsonl")
        for record, row in zip(jsonl(tmp_path / "scores.jsonl")[1:], rankings(2), strict=True):
            reds = [image.getpixel((0, 0))[0] for image in row["candidates"]]
            assert record["scores"] == pytest.approx([((1.0 + 0.5) / 2 + red / 1000) / 2 for red in reds])

    @pytest.mark.parametrize(
        ("batch_size", "template", "calls"), [(11, "theme", [8, 8, 4]), (2, "theme", [4] * 5), (24, "criteria", [24, 24, 12])]
    )  # fmt: skip
    def test_calls_have_full_rows_and_one_reference_object_per_row(self, batch_size, template, calls):
        scorer = ColorScorer()
        evaluate_rankings(scorer, rankings(5), template=template, batch_size=batch_size)
        assert [len(images) for images, _ in scorer.calls] == calls
        pairs = [pair for images, _ in scorer.calls for pair in images]
        per_row = len(pairs) // 5
        references = [{id(first) for first, _ in pairs[row * per_row : (row + 1) * per_row]} for row in range(5)]
        assert [len(objects) for objects in references] == [1] * 5
        assert len(set.union(*references)) == 5
        assert len({id(second) for _, second in pairs}) == 20  # one object per candidate too
        assert list(batches([5, 1, 1, 1, 3], int, 2)) == [[5], [1, 1], [1], [3]]

    def test_the_published_protocol_has_one_question(self):
        with pytest.raises(ValueError, match="`template` is 'theme'.*published"):
            evaluate_rankings(ColorScorer(), rankings(), protocol="published", template="theme")

    def test_two_equal_scores_are_a_tie(self):
        scorer = QuestionScorer(lambda prompt, color: min(color[0], 110) / 255)  # of the candidates two have 110
        results = evaluate_rankings(scorer, rankings())
        assert (results["num_ties"], results["num_undefined_correlations"]) == (8, 0)

    def test_equal_scores_are_counted_and_not_part_of_the_means(self, tmp_path):
        always = evaluate_rankings(QuestionScorer(lambda prompt, color: 0.5), rankings())
        assert always["num_undefined_correlations"] == always["num_ties"] == 8
        rho = always["metrics"]["spearman_rho"]
        assert all(map(math.isnan, [rho["mean"], *rho["interval"]]))
        assert always["metrics"]["accuracy"] == {"mean": 0.0, "interval": [0.0, 0.0]}

        scorer = QuestionScorer(lambda prompt, color: 0.5 if "number 0" in prompt else color[0] / 255)
        path = tmp_path / "scores.jsonl"
        some = evaluate_rankings(scorer, rankings(), output_path=path)
        assert some["num_undefined_correlations"] == 2
        records = [record["metrics"] for record in jsonl(path)[1:]]
        taus = [metrics["kendall_tau"] for metrics in records]
        assert taus[:2] == [None, None]
        assert some["metrics"]["kendall_tau"]["mean"] == pytest.approx(np.mean(taus[2:]))
        assert some["metrics"]["accuracy"]["mean"] == np.mean([metrics["accuracy"] for metrics in records])
        # Read back from the file the numbers are the same
        assert evaluate_rankings(QuestionScorer(None), rankings(), output_path=path) == some

    @pytest.mark.parametrize("rest", [[None], [NAN], []])
    def test_wrong_scores_stop_the_run_and_what_is_finished_is_kept(self, tmp_path, rest):
        class Wrong(ColorScorer):
            def score(self, images, prompts):
                scores = super().score(images, prompts)
                return [*scores[:-1], *rest] if len(self.calls) == 2 else scores

        path = tmp_path / "scores.jsonl"
        with pytest.raises(ValueError, match="The scorer 'color' gave (no finite|7 scores)"):
            evaluate_rankings(Wrong(), rankings(), output_path=path, batch_size=8)
        assert len(jsonl(path)) == 1 + 2


# Edits of a black image. Their red is how well they follow, their green what should have stayed and did not
EDITS = {"a": (200, 0), "b": (100, 0), "c": (50, 100), "d": (100, 200), "e": (250, 50), "f": (10, 0), "g": (10, 0)}
EDIT_ROWS = [
    (("a", "b"), "color", "prompt_following"),  # 200 > 100
    (("c", "a"), "color", "prompt_following"),  # 50 < 200
    (("e", "f"), "text", "prompt_following"),  # 250 > 10
    (("b", "d"), "color", "consistency"),  # 1 > 1 - 200 / 255
    (("a", "b"), "color", "consistency"),  # 1 = 1
    (("e", "f"), "text", "consistency"),  # 1 - 50 / 255 < 1
    (("b", "d"), "color", "overall"),  # sqrt(100 * 255) > sqrt(100 * 55)
    (("f", "e"), "text", "overall"),  # sqrt(10 * 255) = 50.5 < sqrt(250 * 205) = 226.4
    (("e", "f"), "text", "overall"),
    (("f", "g"), "text", "overall"),  # the same
]


def edits(rows=EDIT_ROWS, size=(16, 4), **columns):
    """Pairs of edits of which people prefer the first, as those of EditReward-Bench."""
    texts = {"color": "Turn it red.", "text": "Write red."}
    values = [
        (
            keys,
            color_image(0),
            [color_image(*EDITS[key[0]], size=size) for key in keys],
            [0, 1],
            texts[kind],
            kind,
            dimension,
        )
        for keys, kind, dimension in rows
    ]
    types = dict.fromkeys(("prompt", "task_type", "dimension"), "string")
    images = {"reference": "image", "candidates": ["image"]}
    dataset = typed_dataset(values, candidate_ids=["string"], **images, ranking=["int64"], **types)
    for name, column in columns.items():
        dataset = (dataset.remove_columns(name) if name in dataset.column_names else dataset).add_column(name, column)
    return dataset


def as_edit_reward(dataset, folder):
    """Load edits from a file in the layout of EditReward-Bench."""
    names = {
        "candidate_ids": "key",
        "prompt": "instruction",
        "reference": "input_image",
        "candidates": "output_images",
    }
    dataset.remove_columns("ranking").rename_columns(names).to_parquet(folder / "train.parquet")
    return load_rankings("edit_reward", folder / "train.parquet")


def evaluate_edits(scorer, dataset, **options):
    return evaluate_rankings(scorer, dataset, benchmark="edit_reward", **options)


class EditScorer(ColorScorer):
    """Red is following, green is what did not stay."""

    name = "edit"

    def one(self, first, second, prompt):
        red, green, _ = second.getpixel((0, 0))
        return red / 255 if "accurately follow" in prompt else 1 - green / 255

    def test_a_name_and_scores_are_enough(self):
        class Scorer:
            name = "plain"

            def score(self, images, prompts):
                return [0.5] * len(images)

        assert read_traits(Scorer()) == ScorerTraits() and read_traits(ComparingJudge).judges_edits
        for dataset in (rankings(1), edits(EDIT_ROWS[:1])):
            assert evaluate_rankings(Scorer(), dataset)["num_unanswered"] == 0

    def test_the_question_that_a_judge_was_trained_on(self, caplog):
        def questions_of(question, template=None):
            scorer = ColorScorer()
            scorer.question = question
            results = evaluate_rankings(scorer, rankings(1), template)
            assert results["settings"]["template"] == (template or question or "theme")
            return {text for _, prompts in scorer.calls for text in prompts}

        assert questions_of("One character?") == {"One character?"}
        themes = questions_of(None)
        assert len(themes) == 1 and "One character?" not in themes and not caplog.messages
        assert questions_of("One character?", "theme") == themes
        (warning,) = caplog.messages
        assert "'One character?'" in warning and "'theme'" in warning
        scorer = EditScorer()
        scorer.question = "One character?"
        assert "template" not in evaluate_rankings(scorer, edits(EDIT_ROWS[:1]))["settings"]
        assert "about edits" in caplog.messages[1]

    def test_a_row_without_a_group_is_its_own(self):
        dataset = rankings(4).remove_columns("group").add_column("group", [None, "a", "a", None])
        assert evaluate_rankings(ColorScorer(), dataset)["num_groups"] == 3


class TestEvaluateEdits:
    def test_accuracies_are_those_counted_by_hand(self):
        results = evaluate_edits(EditScorer(), edits())
        dimensions = results["dimensions"]
        assert list(dimensions) == ["prompt_following", "consistency", "overall"]
        # Averaged over the task types: color 1 of 2, text 1 of 1
        following = dimensions["prompt_following"]
        assert following["task_types"] == {
            "color": {"strict": 0.5, "geq": 0.5, "num_rows": 2},
            "text": {"strict": 1.0, "geq": 1.0, "num_rows": 1},
        }
        assert following["num_rows"] == 3
        means = {name: [values[kind]["mean"] for kind in ("strict", "geq")] for name, values in dimensions.items()}
        assert means["prompt_following"] == [0.75, 0.75]
        assert means["consistency"] == [0.25, 0.5]  # color 1 of 2 and a tie, text 0 of 1
        assert means["overall"] == pytest.approx(
            [(1 + 1 / 3) / 2, (1 + 2 / 3) / 2]
        )  # color 1 of 1, text 1 of 3 and a tie
        assert (results["num_instances"], results["num_keys"]) == (10, 7)
        assert results["settings"]["scorer"] == "edit"

        swapped = [((second, first), *rest) for (first, second), *rest in EDIT_ROWS]
        reverse = evaluate_edits(EditScorer(), edits(swapped))["dimensions"]
        assert reverse["prompt_following"]["strict"]["mean"] == 0.25
        assert reverse["consistency"]["geq"]["mean"] == 0.75

    def test_overall_is_the_geometric_mean(self, tmp_path):
        # The arithmetic mean puts e first: (250 + 5) / 2 > (100 + 100) / 2, but sqrt(250 * 5) < sqrt(100 * 100)
        rows = [(("a", "e"), "color", "overall")]
        scorer = QuestionScorer(
            lambda prompt, color: color[0] / 255 if "accurately follow" in prompt else color[1] / 255
        )
        dataset = edits(rows)
        row = dataset[0] | {"candidates": [color_image(100, 100), color_image(250, 5)]}
        dataset = Dataset.from_list([row], features=dataset.features)
        assert evaluate_edits(scorer, dataset)["dimensions"]["overall"]["strict"]["mean"] == 1.0
        assert list(evaluate_edits(scorer, dataset)["dimensions"]) == ["overall"]
        cosine = QuestionScorer(lambda prompt, color: -0.1)
        with pytest.raises(ValueError, match="'consistency': -0.1}, but a geometric mean requires scores >= 0"):
            evaluate_edits(cosine, dataset)
        assert evaluate_edits(cosine, edits(EDIT_ROWS[:3]))["num_keys"] == 5

    def test_a_key_is_scored_once_per_question_that_a_row_needs(self):
        scorer = EditScorer()
        dataset = edits(size=(16, 4))
        assert dataset[0]["candidates"][0].size != dataset[0]["reference"].size
        evaluate_edits(scorer, dataset)
        pairs = [pair for images, _ in scorer.calls for pair in images]
        prompts = [prompt for _, prompts in scorer.calls for prompt in prompts]
        asked = [(second.getpixel((0, 0))[:2], prompt) for (_, second), prompt in zip(pairs, prompts, strict=True)]
        expected = [
            (EDITS[key], question("Turn it red." if key in "abcd" else "Write red."))
            for key in "abcefdg"
            for question in (edit_following_question, edit_consistency_question)
            if key != "c" or question is edit_following_question
        ]
        assert asked == expected
        assert max(len(images) for images, _ in scorer.calls) <= 16
        assert {(first.size, second.size) for first, second in pairs} == {((8, 8), (8, 8))}  # resized to the input

    def test_intervals_draw_rows_that_share_an_image_together(self, tmp_path):
        # Every third copy with the rows the other way round, so that the copies differ
        many = [
            (tuple(f"{key}{copy}" for key in (keys[::-1] if copy % 3 == 0 else keys)), *rest)
            for copy in range(12)
            for keys, *rest in EDIT_ROWS
        ]
        dataset = as_edit_reward(edits(many), tmp_path)
        results = evaluate_edits(EditScorer(), dataset)
        # In each copy: a, b, c, d are connected, and e, f, g
        assert results["num_groups"] == 24
        strict = [hit if copy % 3 else 1 - hit for copy in range(12) for hit in (1.0, 0.0, 1.0)]
        groups = [f"{name}{copy}" for copy in range(12) for name in ("abcd", "abcd", "efg")]
        strata = ["color", "color", "text"] * 12
        following = results["dimensions"]["prompt_following"]["strict"]
        assert following["mean"] == pytest.approx((1 / 2 + 8 / 12) / 2)
        assert following["interval"] == list(bootstrap_interval(strict, groups, strata=strata))
        assert following["interval"] != list(bootstrap_interval(strict, groups))
        assert following["interval"] != list(bootstrap_interval(strict, strata=strata))
        assert evaluate_edits(EditScorer(), dataset.select(range(0, 120, 10)))["num_groups"] == 12
        # Without a group each row is one
        assert evaluate_edits(EditScorer(), dataset.remove_columns("group"))["num_groups"] == 120

    def test_edits_of_ones_own(self, tmp_path):
        """Averaged over rows; the second may be preferred, and what has no name is scored by itself."""
        rows = [EDIT_ROWS[0], EDIT_ROWS[1], EDIT_ROWS[2]]
        following = evaluate_rankings(EditScorer(), edits(rows))["dimensions"]["prompt_following"]
        assert following["strict"]["mean"] == 2 / 3  # over task types 3 / 4
        turned = edits(rows, ranking=[[0, 1], [1, 0], [0, 1]])
        following = evaluate_rankings(EditScorer(), turned)["dimensions"]["prompt_following"]
        assert following["strict"]["mean"] == 1.0 and following["task_types"]["color"]["num_rows"] == 2
        few = turned.remove_columns(["candidate_ids", "task_type"]).add_column("group", ["x", "y", "x"])
        results = evaluate_rankings(EditScorer(), few, output_path=tmp_path / "scores.jsonl")
        assert results["dimensions"]["prompt_following"]["strict"]["mean"] == 1.0
        assert (results["num_keys"], results["num_groups"]) == (6, 2)  # with names five
        assert [record["key"] for record in jsonl(tmp_path / "scores.jsonl")[1:3]] == ["0/0", "0/1"]
        ((title, _, _),) = report_tables(save_report(results, tmp_path))
        assert title.startswith("Pairs of edits") and results["settings"]["benchmark"] == "edits"

    def test_a_tie_of_people(self):
        rows = [EDIT_ROWS[0], EDIT_ROWS[4]]  # 200 > 100, and 1 = 1
        for is_tie, means in ((False, [1.0, 0.0]), (True, [0.0, 1.0]), (None, [1.0, 0.0])):
            figures = evaluate_rankings(EditScorer(), edits(rows, is_tie=[is_tie] * 2))["dimensions"]
            assert [figures[name]["strict"]["mean"] for name in ("prompt_following", "consistency")] == means

    @pytest.mark.parametrize(
        "rows",
        [
            [EDIT_ROWS[0], (("a", "b"), "color", "quality")],
            [(("a", "a"), "color", "overall")],
            [EDIT_ROWS[0], (("a", "b"), "text", "overall")],  # another instruction
        ],
    )
    def test_wrong_datasets(self, rows):
        scorer = EditScorer()
        with pytest.raises(ValueError, match=f"ow {len(rows) - 1}"):
            evaluate_edits(scorer, edits(rows))
        assert scorer.calls == []

    @pytest.mark.parametrize(
        ("columns", "token"),
        [
            ({"task_type": [None]}, "`task_type` of row 0 .* None.* text"),
            ({"is_tie": ["no"]}, "`is_tie` of row 0 .* 'no'.* true or false"),
            ({"candidate_ids": [["a"]]}, r"`candidate_ids` of row 0 .* \['a'\].* two"),
            ({"candidate_ids": ["ab"]}, "`candidate_ids` of row 0 .* 'ab'"),
            ({"ranking": [[1, 1]]}, "`ranking` of row 0"),
            ({"dimension": [None]}, "`dimension` of row 0"),
        ],
    )
    def test_wrong_columns(self, columns, token):
        scorer = EditScorer()
        evaluate_rankings(scorer, edits(EDIT_ROWS[:1]))
        asked = len(scorer.calls)
        with pytest.raises(ValueError, match=token):
            evaluate_rankings(scorer, edits(EDIT_ROWS[:1], **columns))
        assert len(scorer.calls) == asked > 0

    def test_arguments_of_another_kind(self, tmp_path):
        class Judge(EditScorer):
            rates, template = True, "words"

        scorer = Judge()
        with pytest.raises(ValueError, match="'edit' judges edits.* `dimension`"):
            evaluate_rankings(scorer, rankings())
        with pytest.raises(ValueError, match="`template` is 'plain'"):
            evaluate_rankings(scorer, edits(), "plain")
        with pytest.raises(ValueError, match="`benchmark` is 'rankings'.* a column `dimension` must be edits or"):
            evaluate_rankings(scorer, edits(), benchmark="rankings")
        with pytest.raises(ValueError, match="`benchmark` is 'mmrb2'.* no column `dimension` must be rankings"):
            evaluate_rankings(ColorScorer(), rankings(), benchmark="mmrb2")
        with pytest.raises(ValueError, match="`ranking` of row 0 .* two edits"):
            evaluate_rankings(scorer, rankings(2).add_column("dimension", ["overall"] * 2))
        with pytest.raises(ValueError, match="`key` of row 0"):
            as_edit_reward(edits(EDIT_ROWS[:1], candidate_ids=[["a"]]), tmp_path)
        with pytest.raises(ValueError, match="column `winner`.* the benchmark 'edits'"):
            as_edit_reward(edits(EDIT_ROWS[:1], winner=[1]), tmp_path)
        edits().to_parquet(tmp_path / "edits.parquet")
        assert len(load_rankings("edits", tmp_path / "edits.parquet")) == 10
        with pytest.raises(ValueError, match="benchmark 'edits'"):
            load_rankings("rankings", tmp_path / "edits.parquet")
        assert scorer.calls == []


def with_image(image, row=2, place=None):
    """Edits with one of the images replaced: the input of a row, or one of its outputs."""
    rows, features = list(edits(EDIT_ROWS[:3])), edits(EDIT_ROWS[:3]).features
    if place is None:
        rows[row]["reference"] = image
    else:
        rows[row]["candidates"][place] = image
    return Dataset.from_list(rows, features=features)


class TestImagesOfRows:
    def test_one_that_cannot_be_read_is_named(self, tmp_path):
        file = tmp_path / "an image.png"
        file.write_bytes(png(noise(0))[:-100])
        for row, place, name, image in (
            (0, None, "reference", {"bytes": None, "path": str(file)}),
            (2, 1, r"candidates\[1\]", {"bytes": b"<html>", "path": "an image.png"}),
        ):
            path, scorer = tmp_path / f"{row}.jsonl", EditScorer()
            with pytest.raises(ValueError, match=rf"^`{name}` of row {row} \(.*an image.png\).*Error"):
                evaluate_edits(scorer, with_image(image, row, place), output_path=path, batch_size=4)
            # What came before is kept
            assert (path.read_bytes().count(b"\n") > 1) == (len(scorer.calls) > 0) == (row > 0)

    def test_pixels_are_those_that_the_judge_sees(self, tmp_path):
        turned = PILImage.fromarray(np.random.default_rng(1).integers(0, 2**16, (56, 56), dtype=np.uint16))
        exif = turned.getexif()
        exif[0x0112] = 6  # turned by a quarter
        turned.save(tmp_path / "turned.png", exif=exif)
        transparent = png(noise(1, mode="RGBA"))
        for image in ({"bytes": transparent, "path": None}, {"bytes": None, "path": str(tmp_path / "turned.png")}):
            scorer = EditScorer()
            evaluate_edits(scorer, with_image(image))
            seen = scorer.calls[-1][0][-1][0]
            # 56 x 56 pixels are full patches: the judge does not resize them
            expected = load_image(image, 14, "The image")
            assert seen.mode == "RGB" and np.array_equal(np.asarray(seen), np.asarray(expected))
            assert not np.array_equal(np.asarray(Image().decode_example(image).convert("RGB")), np.asarray(expected))


# A copy of this process, which has imported everything already
FORK = multiprocessing.get_context("fork")


class TestResume:
    def test_the_address_of_a_server_is_in_the_file_alone(self, tmp_path):
        """Two servers are two runs, but the results are for others."""

        class Served(ColorScorer):
            name, model_name = "judge at http://10.0.0.1:8000/v1", "judge"

        path = tmp_path / "scores.jsonl"
        results = evaluate_rankings(Served(), rankings(2), output_path=path)
        assert json.loads(path.read_text().splitlines()[0])["scorer"] == Served.name
        assert results["settings"]["scorer"] == "judge" and "10.0.0.1" not in json.dumps(results)
        again = Served()
        assert evaluate_rankings(again, rankings(2), output_path=path) == results and again.calls == []
        with pytest.raises(ValueError, match="results of another run: .*scorer: 'judge at http://10"):
            evaluate_rankings(ColorScorer(), rankings(2), output_path=path)

    @pytest.mark.parametrize("evaluate, data", [(evaluate_rankings, "rankings"), (evaluate_edits, "edits")])
    def test_a_judge_that_was_trained_again_is_asked_again(self, tmp_path, evaluate, data):
        class Judge(ColorScorer if data == "rankings" else EditScorer):
            fingerprint = "before"

        dataset, path = (rankings(3) if data == "rankings" else edits(EDIT_ROWS[:3])), tmp_path / "scores.jsonl"
        results = evaluate(Judge(), dataset, output_path=path)
        trained, moved = Judge(), Judge()
        trained.fingerprint = "after"
        moved.name = str(tmp_path / Judge.name)  # in another directory, of which only the last part is its name
        Path(moved.name).mkdir()
        with pytest.raises(ValueError, match="judge/fingerprint: 'before', now 'after'"):
            evaluate(trained, dataset, output_path=path)
        assert evaluate(moved, dataset, output_path=path) == results
        assert trained.calls == moved.calls == []

    def test_a_module_tells_without_a_fingerprint(self, tmp_path):
        class Judge(ColorScorer):
            def __init__(self, scale):
                super().__init__()
                self.head, self.count = torch.nn.Linear(2, 2), 0
                torch.nn.init.constant_(self.head.weight, scale)
                torch.nn.init.zeros_(self.head.bias)

            def score(self, images, prompts):
                self.count += 1
                return super().score(images, prompts)

        path, judge = tmp_path / "scores.jsonl", Judge(1.0)
        results = evaluate_rankings(judge, rankings(2), output_path=path)
        assert evaluate_rankings(judge, rankings(2), output_path=path) == results and judge.count == 1
        with pytest.raises(ValueError, match="judge/head"):
            evaluate_rankings(Judge(1.1), rankings(2), output_path=path)

    def test_after_a_kill(self, tmp_path):
        dataset = rankings(40)
        path = tmp_path / "scores.jsonl"
        process = FORK.Process(target=evaluate_rankings, args=(ColorScorer(delay=0.2), dataset, None, path, 8))
        process.start()
        wait_until(
            lambda: path.exists() and path.read_bytes().count(b"\n") >= 5 or not process.is_alive(), seconds=300
        )
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        rows = path.read_bytes().count(b"\n") - 1
        assert 4 <= rows < 40

        scorer = ColorScorer()
        resumed = evaluate_rankings(scorer, dataset, output_path=path, batch_size=8)
        assert scorer.pairs == 4 * (40 - rows)
        uninterrupted = evaluate_rankings(ColorScorer(), dataset, output_path=tmp_path / "other.jsonl", batch_size=8)
        assert resumed == uninterrupted
        assert path.read_bytes() == (tmp_path / "other.jsonl").read_bytes()

    def test_a_file_of_another_run_is_refused(self, tmp_path):
        path = tmp_path / "full.jsonl"
        full = evaluate_rankings(ColorScorer(), rankings(), output_path=path)
        content = path.read_bytes()

        class Other(ColorScorer):
            name = "other"

        scorer = ColorScorer()
        with pytest.raises(ValueError, match="scorer: 'color', now 'other'"):
            evaluate_rankings(Other(), rankings(), output_path=path)
        moved = rankings().select([0, 2, 1, 3, 4, 5, 6, 7])
        prompts = rankings(prompt=["A dog."] * 8)
        images = rankings(reference=[color_image(199)] * 8)
        last = rankings(reference=[*rankings()["reference"][:7], color_image(199)])
        for dataset in (rankings(6), moved, prompts, images, last):
            with pytest.raises(ValueError, match="dataset_fingerprint: "):
                evaluate_rankings(scorer, dataset, output_path=path)
        with pytest.raises(ValueError, match="not a result file of this benchmark"):
            evaluate_edits(EditScorer(), edits(), output_path=path)
        assert scorer.calls == [] and path.read_bytes() == content
        # The same rows from elsewhere, with columns that are not read, are the same dataset
        same = rankings().add_column("image", [0] * 8).cast_column("ranking", List(Value("int32")))
        same.save_to_disk(tmp_path / "saved")
        assert evaluate_rankings(scorer, load_from_disk(tmp_path / "saved"), output_path=path) == full

    def test_of_edit_reward(self, tmp_path):
        paths = [tmp_path / "full.jsonl", tmp_path / "resumed.jsonl"]
        full = evaluate_edits(EditScorer(), edits(), output_path=paths[0], batch_size=4)
        with pytest.raises(RuntimeError, match="the scorer broke"):
            evaluate_edits(EditScorer(fail_after=6), edits(), output_path=paths[1], batch_size=4)
        lines = paths[0].read_bytes().splitlines(keepends=True)
        killed = b"".join(lines[:2]) + lines[2][:5]  # between the two images of a row
        for content, num_pairs in ((paths[1].read_bytes(), 13 - 5), (killed, 13 - 2), (paths[0].read_bytes(), 0)):
            paths[1].write_bytes(content)
            scorer = EditScorer()
            assert evaluate_edits(scorer, edits(), output_path=paths[1], batch_size=4) == full
            assert scorer.pairs == num_pairs
            assert paths[0].read_bytes() == paths[1].read_bytes()


class TestReport:
    def test_scorers_are_rows_and_the_same_scorer_replaces_its_row(self, tmp_path):
        color = evaluate_rankings(ColorScorer(), rankings())
        constant = evaluate_rankings(QuestionScorer(lambda prompt, color: 0.5), rankings())
        changed = color | {"settings": color["settings"] | {"dataset": "My rankings", "device": "cuda"}}
        plain = evaluate_rankings(ColorScorer(), rankings(), "plain")
        counts = [len(save_report(results, tmp_path)) for results in (color, constant, changed, plain)]
        assert counts == [1, 2, 2, 3]
        saved = json.loads((tmp_path / "results.json").read_text())
        assert saved[0]["settings"]["dataset"] == "My rankings" and saved[0]["metrics"] == color["metrics"]
        assert saved[0]["versions"]["torch"] == version("torch")
        assert saved[1]["metrics"]["kendall_tau"] == {"mean": None, "interval": [None, None]}
        # Undefined numbers are not numbers
        for entry in (constant, saved[1]):
            ((_, columns, (row,)),) = report_tables([entry])
            cells = dict(zip(columns, row, strict=True))
            assert cells["Kendall tau"] == cells["Spearman rho"] == "undefined"
            assert cells["rows"] == "8 (8 without tau and rho)" and cells["rows with ties"] == "8"
            assert cells["accuracy"] == "0.000 [0.000, 0.000]"
            assert f"| {' | '.join(row)} |" in (tmp_path / "results.md").read_text()

    def test_what_has_one_name_and_another_setting_is_another_row(self, tmp_path):
        results = evaluate_rankings(ColorScorer(), rankings(2))

        def save(**settings):
            entry = results | {"settings": results["settings"] | settings}
            ((_, columns, rows),) = report_tables(save_report(entry, tmp_path))
            return [row[columns.index("scorer")] for row in rows]

        assert save(dtype="bfloat16") == ["color"]
        assert save(dtype="bfloat16", quantization="nf4") == ["color", "color (quantization: nf4)"]
        assert len(save(dtype="bfloat16")) == 2  # in place of the first
        rows = save(dtype="bfloat16", judge={"fingerprint": "after"})
        assert len({*rows}) == 3 and "fingerprint: after" in rows[2]

    def test_edit_reward_has_its_own_table(self, tmp_path):
        save_report(evaluate_rankings(ColorScorer(), rankings()), tmp_path)
        results = evaluate_edits(EditScorer(), edits(EDIT_ROWS[:6]))
        tables = report_tables(save_report(results, tmp_path))
        assert [title.partition(",")[0] for title, _, _ in tables] == ["Human rankings", "EditReward-Bench"]
        _, columns, (row,) = tables[1]
        cells = dict(zip(columns, row, strict=True))
        for column, mean in (("prompt following", 0.75), ("consistency", 0.25), ("consistency, ties count", 0.5)):
            assert cells[column].startswith(f"{mean:.3f} [")
        assert cells["overall"] == cells["overall, ties count"] == ""
        assert cells["rows with ties"] == "1"
