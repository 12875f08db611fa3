# SPDX-License-Identifier: Apache-2.0
"""From ranking instances to pairs: annotations, votes, agreement, the split; with a world whose truth is known."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Image, List, load_from_disk
from PIL import Image as PILImage

from paco_trl.data import check_pair_columns, check_ranking_columns, theme_question, validate_pairs
from paco_trl.dataset_building import (
    Annotation,
    StageFolder,
    agreement_report,
    annotation_files,
    annotator_kinds,
    append_annotation,
    build_pairs,
    judge_annotator_name,
    rank_automatically,
    rank_with_judge,
    ranks_of_ranking,
    read_annotations,
)
from paco_trl.dataset_building.annotations import check_annotator, count_agreement, kendalls_w, majority_vote
from paco_trl.dataset_building.pair_building import connected_prompts, decide_pairs, split_prompts, vote_on_instances
from paco_trl.rewards import JudgeUnavailableError
from paco_trl.utils import stage_folder
from paco_trl.utils.files import digest, file_name, write_atomically
from paco_trl.utils.journals import append_lines, read_lines
from planted_world import PlantedWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> PlantedWorld:
    return PlantedWorld(tmp_path_factory.mktemp("world"))


@pytest.fixture
def automatic(world, tmp_path) -> list[Annotation]:
    rank_automatically(world.instances, world.panels, tmp_path)
    return read_annotations(annotation_files(tmp_path), world.instances)


def tasks(counts: dict[str, int], digest: str = "old") -> Dataset:
    """Instances with so many candidates each."""
    rows = [{"id": name, "candidates": ["p"] * count, "digest": digest} for name, count in counts.items()]
    return Dataset.from_list(rows)


def looking_alike(panels: Dataset, names: tuple[str, ...]) -> Dataset:
    """The panels, those of these names with one digest."""
    return panels.map(lambda row: {"sha256": "black" if row["id"] in names else row["sha256"]})


class TestStageFolder:
    def test_two_processes_may_begin_it_at_the_same_time(self, tmp_path, monkeypatch):
        """One writes the settings between what the other reads."""
        read, others = stage_folder.read_record, []

        def read_and_let_the_other_begin(path):
            record = read(path)
            if not others:
                others.append(None)
                others.append(StageFolder(tmp_path / "stage", {"size": 1}))
            return record

        monkeypatch.setattr(stage_folder, "read_record", read_and_let_the_other_begin)
        assert StageFolder(tmp_path / "stage", {"size": 1}).settings == {"size": 1} and len(others) == 2
        (tmp_path / "foreign").mkdir()
        (tmp_path / "foreign" / "settings.json").write_text("{}")
        with pytest.raises(ValueError, match="Move it away"):
            StageFolder(tmp_path / "foreign", {"size": 1})

    def test_settings_are_kept(self, tmp_path):
        StageFolder(tmp_path / "stage", {"seeds": (0, 1), "size": 1})
        # Nothing came of it: it may begin with other ones
        folder = StageFolder(tmp_path / "stage", {"seeds": (0, 1), "size": 2})
        assert folder.settings == {"seeds": [0, 1], "size": 2}
        folder.journal("done").append({"id": 1})
        StageFolder(tmp_path / "stage", {"seeds": [0, 1], "size": 2})
        with pytest.raises(ValueError, match=r"begun with other settings: size: 2, now 3\. "):
            StageFolder(tmp_path / "stage", {"seeds": [0, 1], "size": 3})
        with pytest.raises(ValueError, match=r"size: 2, now None"):
            StageFolder(tmp_path / "stage", {"seeds": [0, 1]})
        StageFolder(tmp_path / "stage")  # what is done anew each time has none

    def test_a_result_replaces_the_earlier_one(self, tmp_path):
        folder = StageFolder(tmp_path / "stage")
        assert not folder.is_done
        with pytest.raises(FileNotFoundError, match="'stage' is not finished"):
            folder.load()
        for number in (1, 2):
            folder.finish(Dataset.from_dict({"number": [number]}), {"count": number})
            assert folder.is_done
            assert (folder.load()["number"][:], folder.report) == ([number], {"count": number})
        assert sorted(path.name for path in folder.path.iterdir()) == ["dataset", "report.json"]

    def test_killed_between_the_renames(self, tmp_path):
        folder = StageFolder(tmp_path)
        folder.finish(Dataset.from_dict({"number": [1]}), {})
        (tmp_path / "dataset").rename(tmp_path / "dataset.replaced")
        assert not folder.is_done
        assert StageFolder(tmp_path).load()["number"][:] == [1]

    def test_torn_lines(self, tmp_path, caplog):
        path = tmp_path / "done.jsonl"
        append_lines(path, [{"id": "ü\u2028"}])
        with open(path, "ab") as file:
            file.write(b'{"id": "half')
        assert [record for _, record in read_lines(path)] == [{"id": "ü\u2028"}]
        assert "was not written to its end" in caplog.text
        append_lines(path, [{"id": 2}])
        assert [record["id"] for _, record in read_lines(path)] == ["ü\u2028", 2]
        # The twin: a whole line that lacks its end is kept
        path.write_bytes(b'{"id": 1}')
        append_lines(path, [{"id": 2}])
        assert [record["id"] for _, record in read_lines(path)] == [1, 2]
        path.write_bytes(b'{"id": \n{"id": 2}\n')
        with pytest.raises(ValueError, match=r"done\.jsonl, line 1 is not valid JSON"):
            read_lines(path)
        with pytest.raises(ValueError, match="JSON"):
            append_lines(path, [{"id": float("nan")}])

    def test_files_are_complete_or_missing(self, tmp_path):
        write_atomically(tmp_path / "new" / "a.txt", "one")
        with pytest.raises(TypeError):
            write_atomically(tmp_path / "new" / "a.txt", 3)
        assert [(path.name, path.read_text()) for path in (tmp_path / "new").iterdir()] == [("a.txt", "one")]
        assert (tmp_path / "new" / "a.txt").stat().st_mode & 0o777 == 0o644  # others may read it

    def test_names_and_digests(self):
        assert all(file_name(name) == name for name in ("0001_0003", "x.png", "v1.0-b", "ä-b", "兔子", "A"))
        long = "兔" * 100
        names = ["a b", "a/b", "a%2Fb", "..", ".a", "a\0b", "../../x", "a\nb", long, long + "子", "b" * 300]
        written = [file_name(name) for name in names]
        assert len(set(written)) == len(names)
        assert not any(set(name) & {"/", "\0"} or name[0] == "." or len(name.encode()) > 200 for name in written)
        with pytest.raises(ValueError, match="empty"):
            file_name("")
        assert digest({"a": 1, "b": [2]}) == digest({"b": (2,), "a": 1}) != digest({"a": 1, "b": [3]})


class TestAnnotations:
    def test_the_last_one_counts(self, tmp_path):
        instances = tasks({"x": 3, "y": 2})
        append_annotation(tmp_path, {"annotator": "anna", "instance": "y", "ranking": [0, 1], "seconds": 3})
        append_annotation(tmp_path, {"annotator": "anna", "instance": "x", "ranking": [1, 2, 0]})
        append_annotation(tmp_path, {"annotator": "anna", "instance": "y", "ranking": [1, 0]})
        append_annotation(tmp_path, {"annotator": "ben", "instance": "x", "ranks": [1, 2, 2]})
        append_annotation(tmp_path, {"annotator": "ben", "instance": "y", "skipped": True})
        assert read_annotations(annotation_files(tmp_path), instances) == [
            Annotation("anna", "x", (3, 1, 2)),
            Annotation("anna", "y", (2, 1)),
            Annotation("ben", "x", (1, 2, 2)),
            Annotation("ben", "y", None),
        ]
        assert [a.annotator for a in read_annotations(annotation_files(tmp_path, ["ben"]), instances)] == ["ben"] * 2

    @pytest.mark.parametrize(
        ("record", "token"),
        [
            ({"instance": "z", "ranking": [0, 1, 2]}, "no instance 'z'"),
            ({"ranking": [0, 1]}, "2 candidates"),
            ({"ranking": [True, 0, 2]}, "exactly once"),
            ({"ranks": [1, 2]}, "2 candidates"),
            ({"ranks": [0, 1, 2]}, "integers from 1"),
            ({}, "`ranks` must be"),
            ({"ranking": [0, 1, 2], "annotator": "../a"}, "'../a'"),
            ({"ranking": [0, 1, 2], "annotator": ".hidden"}, "'.hidden'"),
            ({"ranking": [0, 1, 2], "annotator": "x" * 41}, "name"),
            ({"ranking": [0, 1, 2], "digest": "new"}, "have changed"),
        ],
    )
    def test_broken_ones_are_named(self, tmp_path, record, token):
        instances, path = tasks({"x": 3}), tmp_path / "all.jsonl"
        good = {"annotator": "Anna_2.b-c", "instance": "x", "ranking": [2, 0, 1], "digest": "old"}
        path.write_text(json.dumps(good) + "\n")
        assert len(read_annotations([path], instances)) == 1
        path.write_text(json.dumps(good) + "\n" + json.dumps({"annotator": "anna", "instance": "x", **record}) + "\n")
        with pytest.raises(ValueError, match=rf"all\.jsonl, line 2.*{token}"):
            read_annotations([path], instances)

    def test_a_digest_is_that_of_the_images_in_their_order(self, world, tmp_path):
        digests = dict(zip(world.panels["id"], world.panels["sha256"], strict=True))
        row = world.instances[3]
        own = [digests[name] for name in (row["reference"], *row["candidates"])]
        assert row["digest"] == digest(own)[:16] != digest(own[::-1])[:16]
        assert len(set(world.instances["digest"])) == len(world.instances)
        # All who annotate write it
        rank_automatically(world.instances, world.panels, tmp_path)
        rank_with_judge(*world.data, ColorJudge(), "judge", tmp_path)
        for name in ("automatic", "judge"):
            lines = {line["instance"]: line for _, line in read_lines(tmp_path / f"{name}.jsonl")}
            assert lines[row["id"]]["digest"] == row["digest"]

    def test_names_that_are_taken(self, world, tmp_path):
        append_annotation(tmp_path, {"annotator": "anna", "instance": "p000/0/0/1", "ranking": [0, 1, 2, 3]})
        rank_with_judge(*world.data, ColorJudge(), "judge", tmp_path)
        other = ColorJudge()
        other.name = "other/colour-judge"
        for name, owner in (("anna", "a person"), ("judge", "user/colour-judge")):
            with pytest.raises(ValueError, match=f"'{owner}' already"):
                rank_with_judge(*world.data, other, name, tmp_path)
        trained = ColorJudge()
        trained.fingerprint = "after"
        with pytest.raises(ValueError, match="'user/colour-judge' with other weights"):
            rank_with_judge(*world.data, trained, "judge", tmp_path)
        rank_automatically(world.instances, world.panels, tmp_path)
        kinds = annotator_kinds(read_annotations(annotation_files(tmp_path), world.instances))
        assert kinds == {"anna": "people", "automatic": "automatic", "judge": "judge"}
        for folder, names in ((tmp_path / "nobody", None), (tmp_path, ["ben"])):
            with pytest.raises(FileNotFoundError, match="no annotations"):
                annotation_files(folder, names)


class TestVoting:
    @pytest.mark.parametrize(
        ("ranks", "ranking", "best", "worst"),
        [
            ([[1, 2, 3, 4], [1, 3, 2, 4], [2, 1, 3, 4]], [0, 1, 2, 3], 0, [3]),
            ([[1, 2, 3], [1, 3, 2]], None, 0, [1, 2]),
            ([[1, 2, 3], [3, 1, 2], [2, 3, 1]], None, None, []),  # a circle has no order
            ([[1, 1], [1, 1], [1, 2]], [0, 1], 0, [1]),  # who ties does not vote
            ([[1, 1], [1, 1]], None, None, []),
        ],
    )
    def test_the_majority(self, ranks, ranking, best, worst):
        assert majority_vote(ranks)[2:] == (ranking, best, worst)

    def test_against_every_order(self):
        """With one annotator, each order comes back."""
        for order in itertools.permutations(range(5)):
            vote = majority_vote([ranks_of_ranking(order)])
            assert (vote.ranking, vote.best, vote.worst) == (list(order), order[0], [order[-1]])


class TestAgreement:
    def test_at_the_ends(self):
        assert kendalls_w([[1, 2, 3, 4]] * 3) == pytest.approx(1)
        assert kendalls_w([[1, 2, 3, 4], [4, 3, 2, 1]]) == pytest.approx(0, abs=1e-12)
        # W = 12 * sum of squares of the rank sums' deviations / (m^2 (n^3 - n)): sums 2, 5, 5, with mean 4
        assert kendalls_w([[1, 2, 3], [1, 3, 2]]) == pytest.approx(12 * (4 + 1 + 1) / (4 * 24))
        assert math.isnan(kendalls_w([[1, 2, 3]])) and math.isnan(kendalls_w([[1, 1, 1]] * 2))
        assert math.isnan(kendalls_w([[1, 2], [2, 1]]))
        assert count_agreement([1, 2, 3, 4], [4, 3, 2, 1]) == (0, 6)
        assert count_agreement([1, 2, 2, 4], [1, 2, 3, 3]) == (4, 4)

    def test_report(self):
        rng = np.random.default_rng(1)
        annotations = []
        for number in range(40):
            truth = ranks_of_ranking(rng.permutation(4).tolist())
            random = ranks_of_ranking(rng.permutation(4).tolist())
            annotations += [
                Annotation("anna", f"i{number}", truth),
                Annotation("ben", f"i{number}", truth),
                Annotation("carl", f"i{number}", random if number else None),
            ]
        report = agreement_report(annotations)
        assert (report["instances"], report["instances_of_several"]) == (40, 40)
        assert report["annotators"]["carl"]["ranked"] == 39
        assert report["annotators"]["carl"]["skipped"] == 1
        assert 0.3 < report["annotators"]["carl"]["agreement_with_others"] < 0.7
        # A majority of one to one is a tie: where they put the same two in the same order, anna and ben agree
        assert report["annotators"]["anna"]["agreement_with_others"] == 1
        assert 0.55 < report["pairwise_agreement"] < 0.8  # (1 + 0.5 + 0.5) / 3
        assert 0.4 < report["kendalls_w"] < 0.8

    def test_one_alone_agrees_with_nobody(self):
        report = agreement_report([Annotation("anna", "x", (1, 2))])
        assert (report["kendalls_w"], report["pairwise_agreement"]) == (None, None)
        assert [*report["annotators"]["anna"].values()] == [1, 0, None]


class TestSplit:
    def test_what_belongs_together(self):
        texts = {"a": "One  text", "b": "two", "c": "one text", "d": "three", "e": "four"}
        images = {"b": {"1", "2"}, "d": {"2"}, "a": {"3"}, "e": {"4"}}
        assert connected_prompts(texts, images) == [["a", "c"], ["b", "d"], ["e"]]

    def test_shares(self):
        groups = [[f"p{index}"] for index in range(50)]
        chosen = split_prompts(groups, 0.2, seed=0)
        assert len(chosen) == 10
        assert chosen == split_prompts(groups[::-1], 0.2, seed=0) != split_prompts(groups, 0.2, seed=1)
        assert split_prompts(groups, 0, seed=0) == set()
        # Groups are taken whole, and some are left to train on
        assert split_prompts([["a", "b"], ["c"]], 0.4, seed=0) == {"c"}
        for some, size in (([["a", "b"]], 0.4), ([["a"]], 0.9), (groups, -0.1), (groups, 1)):
            with pytest.raises(ValueError, match="`test_size`"):
                split_prompts(some, size, seed=0)


class TestDecisions:
    """Two panels of one prompt, as reference and candidate, in both directions."""

    ROWS = [
        {"id": "x", "prompt_id": "p", "reference": "a", "candidates": ["b", "c", "d"]},
        {"id": "y", "prompt_id": "p", "reference": "b", "candidates": ["a", "c", "d"]},
    ]

    def decide(self, *ranks: tuple[str, list[int]], **kwargs) -> dict:
        annotations = [Annotation(f"n{number}", name, tuple(order)) for number, (name, order) in enumerate(ranks)]
        decisions = decide_pairs(self.ROWS, vote_on_instances(annotations), **kwargs)
        return {pair.first + pair.second: (pair.yes, pair.no) for pair in decisions}

    @pytest.mark.parametrize(
        ("ranks", "decisions"),
        [
            ([("x", [1, 2, 3]), ("x", [1, 3, 2]), ("x", [1, 2, 3])], {"ab": (3, 0), "ad": (0, 2)}),
            ([("x", [1, 2, 3]), ("x", [1, 1, 1])], {"ab": (1, 0), "ad": (0, 1)}),  # who ties says nothing
            ([("x", [1, 2, 3]), ("y", [1, 2, 3])], {"ab": (2, 0), "ad": (0, 1), "bd": (0, 1)}),  # both instances vote
            # In one instance b is the best for a, in the other a is the worst for b
            ([("x", [1, 2, 3]), ("y", [3, 2, 1])], {"ab": (1, 1), "ad": (0, 1), "bd": (1, 0)}),
            ([("x", [1, 1, 2]), ("x", [1, 2, 3])], {"ab": (1, 0), "ad": (0, 2)}),  # tied at the top for one
            ([("x", [1, 1, 1])], {}),
        ],
    )
    def test_votes(self, ranks, decisions):
        assert self.decide(*ranks) == decisions

    def test_tied_at_the_bottom(self):
        ranks = ("x", [1, 2, 2])
        assert self.decide(ranks, num_negatives=2) == {"ab": (1, 0), "ac": (0, 1), "ad": (0, 1)}
        assert {tuple(self.decide(ranks, seed=seed)) for seed in range(20)} == {("ab", "ac"), ("ab", "ad")}


class TestAutomatic:
    def test_pairs_are_true(self, world, automatic):
        pairs, rankings, report = build_pairs(*world.data, automatic, test_size=0.34)
        assert rankings is None  # the others are tied
        assert report["votes"] == {"ranked": 288, "ordered": 0}
        assert report["contradictions"] == 0
        for split in pairs.values():
            for row in split.remove_columns("images"):
                assert world.is_consistent(*row["panels"]) == (row["completion"][0]["content"] == "Yes")
        # 4 grids with 6 pairs of panels each, and none twice
        assert report["splits"]["train"]["consistent"] == 4 * 24
        assert report["splits"]["test"]["consistent"] == 2 * 24
        assert report["splits"]["train"]["pairs"] == len(pairs["train"])
        assert report["splits"]["test"]["prompts"] == 2
        keys = [frozenset(names) for split in pairs.values() for names in split["panels"]]
        assert len(keys) == len(set(keys))

    def test_the_format_is_that_of_the_trainer(self, world, automatic, tmp_path):
        pairs, _, _ = build_pairs(*world.data, automatic)
        StageFolder(tmp_path / "pairs").finish(pairs, {})
        train = load_from_disk(tmp_path / "pairs" / "dataset")["train"]
        assert train.features == pairs["train"].features
        check_pair_columns(train)
        assert len(validate_pairs(train)) == len(train)
        row = train[0]
        theme = dict(zip(world.prompts["id"], world.prompts["theme"], strict=True))[row["group"]]
        assert row["prompt"] == [{"role": "user", "content": theme_question(theme)}]
        first, second = (world.panels[world.panels["id"][:].index(name)]["image"] for name in row["panels"])
        assert [image.tobytes() for image in row["images"]] == [first.tobytes(), second.tobytes()]
        # Each image is on the disk once: the pairs have its path, where `save_to_disk` would have a copy in each
        stored = train.cast_column("images", List(Image(decode=False)))["images"][:]
        assert all(image["bytes"] is None and Path(image["path"]).is_file() for pair in stored for image in pair)
        assert len({image["path"] for pair in stored for image in pair}) == 5 * 16

    def test_prompts_that_share_an_image_stay_together(self, world, automatic):
        """The twin of the split: with the images of another prompt, a prompt goes where that one goes."""
        panels = looking_alike(world.panels, ("p000/0/0", "p001/0/0"))
        separated = set()
        for seed in range(4):
            for data, is_shared in ((panels, True), (world.panels, False)):
                pairs, _, _ = build_pairs(world.instances, data, world.prompts, automatic, test_size=0.5, seed=seed)
                if len({"p000", "p001"} & set(pairs["test"]["group"])) == 1:
                    separated.add(is_shared)
        assert separated == {False}

    def test_contradictions_are_dropped(self, world):
        """The first panel of a grid is the best for the second, and the second the worst for the first."""
        both = {"p000/0/0/1": (1, 2, 3, 4), "p000/0/1/0": (4, 3, 2, 1)}
        pair = {"p000/0/0", "p000/0/1"}

        def build(annotations):
            pairs, _, report = build_pairs(*world.data, annotations, test_size=0)
            return [row for row in pairs["train"].remove_columns("images") if set(row["panels"]) == pair], report

        annotations = [Annotation("anna", name, ranks) for name, ranks in both.items()]
        found, report = build(annotations)
        assert (found, report["contradictions"], report["splits"]["train"]["pairs"]) == ([], 1, 2)
        for name, label in (("p000/0/0/1", "Yes"), ("p000/0/1/0", "No")):  # the twin: one more vote
            (row,), report = build([*annotations, Annotation("ben", name, both[name])])
            assert row["completion"][0]["content"] == label
            assert sorted(row["votes"].values()) == [1, 2]
            assert report["contradictions"] == 0

    def test_the_same_image_twice_is_not_a_pair(self, world, automatic):
        """Grids that came out flat: all their panels are equal, and neither answer about two of them teaches anything."""
        flat = {name for name in world.panels["id"] if name.startswith(("p000/0/", "p000/1/"))}
        panels = looking_alike(world.panels, tuple(flat))

        def pairs_of_flat(panels):
            pairs, _, report = build_pairs(world.instances, panels, world.prompts, automatic, test_size=0)
            return [names for names in pairs["train"]["panels"] if set(names) <= flat], report["same_image_twice"]

        before, none = pairs_of_flat(world.panels)
        after, dropped = pairs_of_flat(panels)
        assert len(before) >= 12 and none == 0
        assert after == [] and dropped == len(before)

    def test_nothing_comes_out(self, world):
        skipped = [Annotation("anna", name, None) for name in world.instances["id"]]
        with pytest.raises(ValueError, match="288 annotations give no pair"):
            build_pairs(*world.data, skipped)


class ColorJudge:
    """A real function of the pixels: the closer the mean colours, the more consistent."""

    name = "user/colour-judge"

    def __init__(self):
        self.calls, self.pairs = 0, 0
        self.stop_after = None
        self.unanswered = set()

    def score(self, images, prompts):
        if self.stop_after is not None and self.calls >= self.stop_after:
            raise JudgeUnavailableError("the judge at http://127.0.0.1:9/v1 is down")
        self.calls += 1
        self.pairs += len(images)
        assert len(images) == len(prompts)
        assert all("A journey of figure number" in prompt for prompt in prompts)
        scores = []
        for first, second in images:
            means = [np.asarray(PILImage.open(path), float).mean((0, 1)) for path in (first, second)]
            hue = [mean - mean.mean() for mean in means]
            scores.append(float(np.exp(-np.abs(hue[0] - hue[1]).sum() / 50)))
            if str(second).endswith(tuple(self.unanswered)):
                scores[-1] = None
        return scores


class TestJudge:
    @pytest.mark.parametrize("question", [None, "A journey of figure number 1?"])
    def test_the_question_that_a_judge_was_trained_on(self, world, tmp_path, question):
        class Asked(ColorJudge):
            def score(self, images, prompts):
                asked.update(prompts)
                return super().score(images, prompts)

        asked = set()
        judge = Asked()
        judge.question = question
        rank_with_judge(*world.data, judge, "judge", tmp_path)
        assert asked == {question} if question else len(asked) == len(world.prompts) > 1

    def test_annotator_names(self):
        assert judge_annotator_name("X-GenGroup/PaCo-Reward-7B") == "PaCo-Reward-7B"
        assert check_annotator(judge_annotator_name("/some folder/.x y/")) == "x-y"

    def test_it_ranks(self, world, tmp_path):
        judge = ColorJudge()
        arguments = (*world.data, judge, "judge", tmp_path)
        assert rank_with_judge(*arguments) == {"ranked": 288, "found": 0, "unanswered": 0}
        assert (judge.calls, judge.pairs) == (6, 288 * 4)  # a call for each prompt
        for _, record in read_lines(tmp_path / "judge.jsonl"):
            scores = record["scores"]
            assert record["ranks"] == [1 + sorted(scores, reverse=True).index(score) for score in scores]
        annotations = read_annotations(annotation_files(tmp_path), world.instances)
        pairs, rankings, report = build_pairs(*world.data, annotations, test_size=0.34, max_rankings=50)
        rows = [row for split in pairs.values() for row in split.remove_columns("images")]
        answers = [row["completion"][0]["content"] == "Yes" for row in rows]
        assert np.mean([world.is_consistent(*row["panels"]) for row in rows] == np.array(answers)) > 0.9
        check_ranking_columns(rankings)
        assert len(rankings) == report["held_out_rankings"] == 50
        assert set(rankings["group"]) <= set(pairs["test"]["group"])
        themes = dict(zip(world.prompts["id"], world.prompts["theme"], strict=True))
        assert rankings["theme"][:] == [themes[name] for name in rankings["group"]]
        assert rank_with_judge(*arguments)["found"] == 288
        assert judge.calls == 6  # nothing is asked twice

    def test_a_judge_that_goes_down(self, world, tmp_path):
        judge = ColorJudge()
        judge.stop_after = 2
        with pytest.raises(JudgeUnavailableError, match=r"http://127\.0\.0\.1:9/v1"):
            rank_with_judge(*world.data, judge, "judge", tmp_path / "a")
        assert len(read_annotations(annotation_files(tmp_path / "a"), world.instances)) == 96
        judge.stop_after = None
        counts = rank_with_judge(*world.data, judge, "judge", tmp_path / "a")
        assert counts == {"ranked": 192, "found": 96, "unanswered": 0}
        rank_with_judge(*world.data, ColorJudge(), "judge", tmp_path / "b")
        assert (tmp_path / "a/judge.jsonl").read_bytes() == (tmp_path / "b/judge.jsonl").read_bytes()

    def test_without_a_score_there_is_no_rank(self, world, tmp_path, caplog):
        judge = ColorJudge()
        judge.unanswered = {"p002/0-1.png"}
        counts = rank_with_judge(*world.data, judge, "judge", tmp_path)
        assert counts == {"ranked": 276, "found": 0, "unanswered": 12}  # the candidates at position 1 of p002
        assert "did not score 12 of 288 instances" in caplog.text
        judge.unanswered = set()
        counts = rank_with_judge(*world.data, judge, "judge", tmp_path)
        assert counts == {"ranked": 12, "found": 276, "unanswered": 0}
