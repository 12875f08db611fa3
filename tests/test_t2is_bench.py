# SPDX-License-Identifier: Apache-2.0
"""T2IS-Bench on planted images: flat panels, whose every score is known by hand."""

import json
import math
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from PIL import Image

from judge_server import JudgeServer
from paco_trl.data import join_grid
from paco_trl.evaluation import bootstrap_interval
from paco_trl.evaluation.judge_report import published_tables
from paco_trl.image_benchmarks import (
    System,
    find_image_sets,
    load_t2is_bench,
    score_aesthetics,
    score_alignment,
    score_consistency,
    score_duplicates,
    t2is_results,
)
from paco_trl.image_benchmarks.paired_results import compute_difference, mean_over_prompts
from paco_trl.image_benchmarks.score_store import open_scores
from paco_trl.image_benchmarks.system_images import ImageSet, SystemImages, find_generated_sets, write_panel_files
from paco_trl.image_benchmarks.t2is_bench import consistency_criteria, dimension_score, weighted_average
from paco_trl.rewards import ServedJudge


SIZE = 32
# Prompt id -> layout, criteria of each dimension
PROMPTS = {
    "0001": ((2, 2), {"Identity": ["one"], "Style": ["two", "three"], "Logic": ["one"], "Surroundings": ["stray"]}),
    "0002": ((1, 3), {"Style": ["one"], "Logic": ["two"]}),
    "0003": ((1, 2), {"Identity": ["three"], "Style": ["one"], "Logic": ["two"]}),
}
TEXTS = {"Entity": ["bright", "dark"], "Attribute": ["bright"], "Relation": ["dark"]}
BONUS = {"one": 0.01, "two": 0.02, "three": 0.03, "stray": 0.5}


def panel(value: int) -> Image.Image:
    return Image.new("RGB", (SIZE, SIZE), (value, 255 - value, value))


def pair_score(first: int, second: int, text: str) -> float:
    """Score of the planted judge for two panels: 0.9 for the same color, 0.1 for others, more by the criterion."""
    return (0.9 if first == second else 0.1) + BONUS[text]


class PlantedJudge:
    """Give [`pair_score`] from the pixels, and how bright an image is."""

    name = "planted"

    def __init__(self):
        self.pairs, self.calls, self.sizes, self.orders = 0, 0, set(), set()

    def score(self, images, prompts):
        self.calls += 1
        self.pairs += len(images)
        scores = []
        for (first, second), prompt in zip(images, prompts, strict=True):
            self.sizes |= {first.size, second.size}
            values = [image.getpixel((0, 0))[0] for image in (first, second)]
            self.orders.add(tuple(values))
            text = prompt.removeprefix("Do images meet the following criteria? ")
            text = text.removesuffix(" Please answer Yes or No.")
            scores.append(pair_score(*values, text))
        return scores

    def score_images(self, images, prompts=None):
        bright = [image.getpixel((0, 0))[0] / 255 for image in images]
        if prompts is None:
            return bright
        texts = [prompt.removeprefix('Does this figure show "').split('"')[0] for prompt in prompts]
        return [value if text == "bright" else 1 - value for value, text in zip(bright, texts, strict=True)]


def write_bench(folder, prompts=PROMPTS):
    rows = [
        {
            "id": name,
            "prompt": f"A {layout[0]}x{layout[1]} grid of a fox, number {name}.",
            "theme": "A fox.",
            "rows": layout[0],
            "cols": layout[1],
            "height": SIZE * layout[0],
            "width": SIZE * layout[1],
            "panels": [f"Place {place}" for place in range(math.prod(layout))],
            "criteria": {title: {f"c{n}": text for n, text in enumerate(texts)} for title, texts in criteria.items()},
            "category": "Story" if name == "0001" else "Process",
            "subcategory": name,
            "case_id": f"0009_{name}",
        }  # fmt: skip
        for name, (layout, criteria) in prompts.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {
        f"0009_{name}": {f"{place:04}": TEXTS for place in range(math.prod(layout))}
        for name, (layout, _) in prompts.items()
    }
    (folder / "prompt_alignment.json").write_text(json.dumps(cases))
    return folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = write_bench(tmp_path_factory.mktemp("bench"))
    return load_t2is_bench(folder / "bench.jsonl", alignment_file=folder / "prompt_alignment.json")


@pytest.fixture(scope="module")
def foreign(bench, tmp_path_factory):
    """Grids in which one panel is of another color than the rest."""
    return find_image_sets(write_grids(tmp_path_factory.mktemp("foreign") / "grids", FOREIGN), bench)


IDENTICAL = {"0001": [200] * 4, "0002": [100] * 3, "0003": [50] * 2}
FOREIGN = {"0001": [200, 200, 200, 10], "0002": [100, 100, 30], "0003": [50, 60]}


def write_grids(folder, values):
    folder.mkdir(parents=True)
    for name, of_set in values.items():
        join_grid([panel(value) for value in of_set], *PROMPTS[name][0]).save(folder / f"{name}.png")
    return folder


def write_panels(folder, values, start=0, leave_out=()):
    folder.mkdir(parents=True)
    for name, of_set in values.items():
        for number, value in enumerate(of_set):
            if (name, number) not in leave_out:
                panel(value).save(folder / f"{name}_{number + start:04}.png")
    return folder


def evaluate(bench, folder, found, judge=None, role="base"):
    judge = judge or PlantedJudge()
    for score in (score_consistency, score_alignment, score_aesthetics):
        score(judge, found, bench, folder)
    score_duplicates(found, bench, folder)
    return System(role, "planted system", found, folder)


def by_hand(values, name, dimension):
    """Consistency of a set by the definition: mean over criteria of the mean over pairs."""
    texts = PROMPTS[name][1].get(dimension)
    if not texts:
        return None
    pairs = list(combinations(values[name], 2))
    return fmean(fmean(pair_score(*pair, text) for pair in pairs) for text in texts)


def row(results, metric, table=0):
    return next(one for one in results["tables"][table]["rows"] if one["metric"] == metric)


def mean(results, metric, system=0):
    return row(results, metric)["cells"][system]["mean"]


class TestArithmetic:
    # The paper's Table 3, with the Qwen judge
    PAPER = [(row[1], row[2:5], row[5:8], row[8]) for row in published_tables("T2IS-Bench")[0].rows]

    @pytest.mark.parametrize("aesthetics, alignment, consistency, average", PAPER)
    def test_the_average_is_the_papers(self, aesthetics, alignment, consistency, average):
        names = ("aesthetics", "entity", "attribute", "relation", "identity", "style", "logic")
        dimensions = dict(zip(names, (aesthetics, *alignment, *consistency), strict=True))
        assert weighted_average(dimensions) == pytest.approx(average, abs=0.0006)

    def test_consistency_by_the_script_and_without_its_holes(self):
        for scores, ours, script in (
            ([[0.2, 0.4], [0.6, 0.8]], 0.5, 0.5),  # criteria, then their mean
            ([[0.2, 0.4, 0.6]], 0.6, 0.4),  # three pairs of two
            ([[0.0, 0.0]], 0.0, None),  # exactly 0
            ([[]], 0.0, None),  # one picture: no pairs
            ([], None, None),  # the prompt does not have the dimension
            ([[0.2, None], [0.6, 0.6]], None, 0.4),  # a question without an answer: no mean over fewer pairs
        ):
            for protocol, expected in (("default", ours), ("published", script)):
                assert dimension_score(scores, 2, protocol) == (expected and pytest.approx(expected)), scores


class TestStatistics:
    def test_a_cell_is_the_bootstrap_over_prompts(self):
        values = {(f"p{n}", seed): (n % 3) * 0.3 + seed * 0.1 for n in range(20) for seed in range(2)}
        one = mean_over_prompts([values])
        assert one["mean"] == pytest.approx(fmean(values.values())) and one["count"] == 40
        expected = bootstrap_interval(list(values.values()), [unit[0] for unit in values])
        assert one["interval"] == pytest.approx(expected)
        # Taken one by one the same values would seem to say more
        alone = bootstrap_interval(list(values.values()))
        assert expected[1] - expected[0] > 1.2 * (alone[1] - alone[0])

    def test_parts_share_their_resamples(self):
        rng = np.random.default_rng(0)
        first = {(n,): float(value) for n, value in enumerate(rng.random(30))}
        opposite = {unit: 1 - value for unit, value in first.items()}
        assert mean_over_prompts([first])["interval"][1] - mean_over_prompts([first])["interval"][0] > 0.1
        assert mean_over_prompts([first, opposite])["interval"] == pytest.approx([0.5, 0.5])

    def test_only_what_both_have_is_compared(self):
        before = {("a",): 0.0, ("b",): 0.5, ("c",): math.nan}
        after = {("a",): 1.0, ("b",): math.nan, ("c",): 1.0}
        assert compute_difference([before], [after])["mean"] == 1.0
        assert compute_difference([before], [after])["count"] == 1
        assert compute_difference([before], [after])["interval"] == [None, None]

    def test_no_interval_where_a_part_has_one_prompt(self):
        """How its prompts differ is not known, however many the other parts have."""
        many = {(n,): n / 30 for n in range(30)}
        for alone in ({(0,): 0.5}, {(0, "a"): 0.5, (0, "b"): 0.7}, {(0,): 0.5, (1,): math.nan}):
            for parts in ([many, alone], [alone, many]):
                assert mean_over_prompts(parts)["mean"] is not None and mean_over_prompts(parts)["interval"] == [
                    None,
                    None,
                ]
        assert None not in mean_over_prompts([many, {(0,): 0.5, (1,): 0.7}])["interval"]  # the twin

    def test_strata(self):
        values = {("a",): 0.0, ("b",): 0.0, ("c",): 0.0, ("d",): 1.0}
        strata = {("a",): "many", ("b",): "many", ("c",): "many", ("d",): "one"}
        assert mean_over_prompts([values])["mean"] == 0.25
        assert mean_over_prompts([values], strata=strata)["mean"] == 0.5


class TestLoading:
    def test_a_prompt_without_criteria(self, tmp_path):
        cases = {"0002": ((1, 2), {"Surroundings": ["stray"]}), "0001": ((1, 2), {"Style": {"Color": "Is it red?"}})}
        folder = write_bench(tmp_path, cases)
        with pytest.raises(ValueError, match="'0002' has a single panel, or no criterion"):
            load_t2is_bench(folder / "bench.jsonl")

    @pytest.mark.parametrize("name", ["demo", "p.txt"])
    def test_prompts_that_are_no_benchmark(self, tmp_path, name):
        (tmp_path / "p.txt").write_text("A fox.\n")
        with pytest.raises(ValueError, match="`paco-trl evaluate prompts`"):
            load_t2is_bench("demo" if name == "demo" else tmp_path / name)

    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda cases: cases.pop("0009_0002"), "lacks 1 of the 3 cases: 0009_0002"),
            (lambda cases: cases["0009_0001"].pop("0003"), "has 3 panels of the case '0009_0001'.* 4"),
        ],
    )
    def test_broken_alignment(self, tmp_path, change, message):
        folder = write_bench(tmp_path)
        cases = json.loads((folder / "prompt_alignment.json").read_text())
        change(cases)
        (folder / "prompt_alignment.json").write_text(json.dumps(cases))
        with pytest.raises(ValueError, match=message):
            load_t2is_bench(folder / "bench.jsonl", alignment_file=folder / "prompt_alignment.json")


def test_the_benchmarks_own_files_are_those_of_the_copy_in_the_code_of_paco_rl(tmp_path):
    raw, cases, all_criteria = [], {}, {}
    for number, (layout, prompt) in enumerate(
        [
            ("1x2", "TWO-PANEL Images with a 1x2 grid layout of a fox. [LEFT]:It sits. [RIGHT]:It runs."),
            ("1x3", "THREE-PANEL Images with a 1x3 grid layout. PANEL-1:Sit. PANEL-2:Run. PANEL-3:Eat."),
        ]
    ):
        name, cols = f"0011_{number:04}", int(layout[2])
        criteria = {"Style": {"a": "Same ink.", "b": "Same paper."}, "Identity": {"c": f"Same fox {number}."}}
        row = {"idx": f"{number:04}", "prompt": prompt, "layout": layout, "height": 512, "width": 512 * cols}
        raw.append(row | {"criteria": criteria, "original_idx": name})
        case = {"task_name_case_id": f"movie_shot_{number:04}", "instruction": "Generate images of a fox."}
        cases[name] = case | {"prompt": prompt, "output_image_count": cols}
        all_criteria[name] = {dimension: [texts] for dimension, texts in criteria.items()}
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in raw))
    copy, folder = load_t2is_bench(tmp_path / "copy.jsonl"), tmp_path / "own"
    folder.mkdir()
    (folder / "T2IS-Bench.json").write_text(json.dumps(cases))
    (folder / "prompt_consistency.json").write_text(json.dumps(all_criteria))
    own = load_t2is_bench(folder)
    names = ["prompt", "theme", "rows", "cols", "panels", "criteria", "height", "width", "case_id"]
    assert own.select_columns(names).to_list() == copy.select_columns(names).to_list()
    assert own["id"][:] == ["0011_0000", "0011_0001"] and own["subcategory"][:] == ["movie_shot"] * 2
    assert consistency_criteria(own[1]) == {"identity": ["Same fox 1."], "style": ["Same ink.", "Same paper."]}
    for path in (folder / "T2IS-Bench.json", str(folder)):
        assert load_t2is_bench(path).to_list() == own.to_list()


class TestFolders:
    def test_grids_and_panels_are_the_same_images(self, bench, foreign, tmp_path):
        grids = foreign
        for start in (0, 1):
            panels = find_image_sets(write_panels(tmp_path / f"panels{start}", FOREIGN, start), bench)
            assert list(panels.sets) == list(grids.sets) == ["0001/0", "0002/0", "0003/0"]
            for key in grids.sets:
                for one, other in zip(grids.sets[key].panels(), panels.sets[key].panels(), strict=True):
                    assert np.array_equal(one, other)
            assert [len(found.sets["0001/0"].files) for found in (panels, grids)] == [4, 1]

    def test_names_by_case_id(self, bench, foreign, tmp_path):
        files = write_panel_files(foreign, bench, tmp_path / "official")
        assert sorted(file.name for file in files)[:2] == ["0009_0001_0000.png", "0009_0001_0001.png"]
        again = find_image_sets(tmp_path / "official", bench)
        assert again.missing == {} and len(again.sets["0001/0"].files) == 4
        assert np.array_equal(again.sets["0001/0"].panels()[3], panel(10))

    @pytest.mark.parametrize("name", ["../../x", "{}/x", "..", "a\0b", "兔" * 200])
    def test_names_stay_in_their_directory(self, tmp_path, name):
        root = tmp_path / "a" / "b"
        name = name.format(tmp_path / "elsewhere")
        bench = load_t2is_bench(write_bench(tmp_path / "bench", {name: ((1, 2), {"Style": ["one"]})}) / "bench.jsonl")
        bench = bench.remove_columns("case_id")
        grid = root / "grid.png"
        root.mkdir(parents=True)
        join_grid([panel(1), panel(2)], 1, 2).save(grid)
        found = SystemImages({f"{name}/0": ImageSet(f"{name}/0", name, 0, 1, 2, (grid,))})
        files = write_panel_files(found, bench, root / "official")
        assert {file.parent for file in files} == {root / "official"} and not (tmp_path / "elsewhere").exists()
        assert set(files) == set((root / "official").iterdir()) and len(files) == 2
        (again,) = find_image_sets(root / "official", bench).sets.values()
        assert [image.getpixel((0, 0))[0] for image in again.panels()] == [1, 2]

    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda f: panel(1).save(f / "0003_0002.png"), "0003_0002.png is no image of '0003', .* has 2 panels"),
            (lambda f: panel(1).save(f / "0003_0001.jpg"), "0003_0001.jpg and 0003_0001.png .* in two formats"),
            (lambda f: panel(1).save(f / "0003.png"), "0003.png is no image of '0003', which is one grid"),
            (lambda f: (f / "0003_0001.png").write_bytes(b"GIF"), "0003_0001.png cannot be read"),
        ],
    )
    def test_wrong_files(self, bench, tmp_path, change, message):
        folder = write_panels(tmp_path / "panels", FOREIGN)
        find_image_sets(folder, bench)  # right before
        change(folder)
        with pytest.raises(ValueError, match=message):
            find_image_sets(folder, bench)

    def test_a_grid_of_another_shape(self, bench, tmp_path):
        folder = write_grids(tmp_path / "grids", FOREIGN)
        Image.new("RGB", (2 * SIZE, 2 * SIZE + 1)).save(folder / "0001.png")
        with pytest.raises(ValueError, match="0001.png: .* does not divide into a 2x2 grid"):
            find_image_sets(folder, bench)
        Image.new("RGB", (4 * SIZE, SIZE)).save(folder / "0001.png")  # divides, but is no square
        with pytest.raises(ValueError, match="32x128 pixels, another shape than the 64x64"):
            find_image_sets(folder, bench)
        Image.new("RGB", (6 * SIZE, 6 * SIZE)).save(folder / "0001.png")  # larger is no other shape
        find_image_sets(folder, bench)

    def test_which_number_is_the_first(self, bench, tmp_path):
        # The first panel of each is missing, in a folder that is numbered from 0
        left_out = {(name, 0) for name in FOREIGN}
        folder = write_panels(tmp_path / "panels", FOREIGN, leave_out=left_out)
        with pytest.raises(ValueError, match="neither from 0"):
            find_image_sets(folder, bench)
        found = find_image_sets(write_panels(tmp_path / "one", FOREIGN, start=1, leave_out=left_out), bench)
        assert found.missing == {"0001/0": [0], "0002/0": [0], "0003/0": [0]}


class TestPlantedSets:
    def test_every_figure_by_hand(self, bench, foreign, tmp_path):
        judge = PlantedJudge()
        system = evaluate(bench, tmp_path, foreign, judge)
        results = t2is_results(bench, [system])
        assert judge.sizes == {(504, 504)}  # 512 as the benchmark's script rounds it
        assert (200, 10) in judge.orders and (10, 200) not in judge.orders
        assert judge.pairs == 6 * 4 + 3 * 2 + 1 * 3  # pairs x criteria, the stray dimension is not asked about
        expected = {}
        for metric, dimension in (("identity", "Identity"), ("style", "Style"), ("logic", "Logic")):
            scores = [by_hand(FOREIGN, name, dimension) for name in PROMPTS]
            expected[metric] = fmean(score for score in scores if score is not None)
            assert mean(results, metric) == pytest.approx(expected[metric])
        assert row(results, "identity")["cells"][0]["count"] == 2 and row(results, "style")["cells"][0]["count"] == 3
        bright = [value / 255 for values in FOREIGN.values() for value in values]
        assert mean(results, "entity") == pytest.approx(0.5)  # bright and dark of each panel
        assert mean(results, "attribute") == pytest.approx(fmean(bright))
        assert mean(results, "relation") == pytest.approx(1 - fmean(bright))
        assert mean(results, "aesthetics") == pytest.approx(fmean(bright))
        assert mean(results, "alignment") == pytest.approx(0.5)
        assert mean(results, "consistency") == pytest.approx(fmean(expected.values()))
        average = 0.2 * fmean(bright) + 0.3 * 0.5 + 0.5 * fmean(expected.values())
        assert mean(results, "average") == pytest.approx(average)
        # No images are missing, each case has its dimensions above 0: the script's arithmetic says the same
        published = t2is_results(bench, [system], protocol="published")
        assert (results["protocol"], published["protocol"]) == ("default", "published")
        for ours, theirs in zip(results["tables"][0]["rows"], published["tables"][0]["rows"], strict=True):
            assert theirs["cells"][0]["mean"] == pytest.approx(ours["cells"][0]["mean"])
        json.dumps(results, allow_nan=False)

    def test_a_missing_panel(self, bench, tmp_path):
        left_out = {("0001", 3), ("0003", 0)}
        found = find_image_sets(write_panels(tmp_path / "panels", IDENTICAL, leave_out=left_out), bench)
        assert found.missing == {"0001/0": [3], "0003/0": [0]}
        system = evaluate(bench, tmp_path / "scores", found)
        with pytest.raises(ValueError, match="0001/0, 0003/0"):
            t2is_results(bench, [system])
        results = t2is_results(bench, [system], missing="zero")
        # Three of six pairs are there; of the set of two panels none
        assert mean(results, "identity") == pytest.approx(fmean([3 * 0.91 / 6, 0.0]))
        assert mean(results, "aesthetics") == pytest.approx((3 * 200 + 3 * 100 + 50) / 255 / 9)
        assert mean(results, "entity") < 0.5
        assert results["systems"][0]["counts"]["missing panels"] == 2
        (alert,) = results["alerts"]
        assert "2 panels of 'planted system' are missing and count 0" in alert and "0001/0, 0003/0" in alert
        published = t2is_results(bench, [system], missing="zero", protocol="published")
        # Scored on what is there, the other dropped
        assert mean(published, "identity") == pytest.approx(0.91)
        assert mean(published, "aesthetics") == pytest.approx((3 * 200 + 3 * 100 + 50) / 255 / 7)
        assert mean(published, "entity") == pytest.approx(0.5)
        low, high = row(published, "style")["cells"][0]["interval"]
        assert low < mean(published, "style") < high
        assert "2 panels of 'planted system' are missing and left out, as by the" in published["alerts"][0]

    def test_a_gain_of_copies_is_seen(self, bench, foreign, tmp_path):
        copies = find_image_sets(write_grids(tmp_path / "copies", IDENTICAL), bench)
        base = evaluate(bench, tmp_path / "base", foreign)
        results = t2is_results(bench, [base, evaluate(bench, tmp_path / "tuned", copies, role="tuned")])
        gain = row(results, "consistency")["difference"]
        assert gain["mean"] == pytest.approx(mean(results, "consistency", 1) - mean(results, "consistency", 0))
        assert gain["interval"][0] > 0
        duplicates = row(results, "duplicates")
        assert duplicates["difference"]["mean"] > 0 and not duplicates["higher_is_better"]
        (by_category,) = [one for one in results["breakdowns"] if one["title"].startswith("By category: visual")]
        categories = {one["label"]: one for one in by_category["rows"]}
        story = categories["Story"]["difference"]
        assert story["mean"] == pytest.approx(0.4) and story["interval"] == [None, None]  # one prompt
        assert categories["Process"]["cells"][0]["count"] == 1  # the only one with identity
        (before, after) = next(one["scores"] for one in results["sets"] if one["key"] == "0001/0")
        assert after["consistency"] - before["consistency"] == pytest.approx(0.4)

    def test_without_alignment_and_aesthetics_there_is_no_average(self, bench, foreign, tmp_path):
        score_consistency(PlantedJudge(), foreign, bench, tmp_path)
        results = t2is_results(bench, [System("base", "it", foreign, tmp_path)])
        assert [one["metric"] for one in results["tables"][0]["rows"]] == ["identity", "style", "logic", "consistency"]
        assert sum("not scored, so the weighted average is not computed" in note for note in results["notes"]) == 2
        assert any("independent one" in note for note in results["notes"])

    def test_systems_that_cannot_be_compared(self, bench, foreign, tmp_path):
        systems = [evaluate(bench, tmp_path / name, foreign) for name in ("a", "b")]
        t2is_results(bench, systems)

        class Other(PlantedJudge):
            name = "other"

        score_consistency(Other(), foreign, bench, tmp_path / "a")
        with pytest.raises(ValueError, match="consistency-other"):
            t2is_results(bench, systems)

    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda scores: [*scores, 0.5], "34 scores for 33 questions"),
            (lambda scores: [87.0, *scores[1:]], "gave 87.0, which is not a probability"),
            (lambda scores: [math.inf, *scores[1:]], "gave inf"),
        ],
    )
    def test_a_judge_that_gives_something_else(self, bench, foreign, tmp_path, change, message):
        class Other(PlantedJudge):
            def score(self, images, prompts):
                return change(super().score(images, prompts))

        with pytest.raises(ValueError, match=message):
            score_consistency(Other(), foreign, bench, tmp_path)
        assert len(score_consistency(PlantedJudge(), foreign, bench, tmp_path)) == 3  # nothing of it was kept

    def test_a_judge_that_gives_no_answer(self, bench, foreign, tmp_path, caplog):
        class Silent(PlantedJudge):
            answers = False

            def score(self, images, prompts):
                scores = super().score(images, prompts)
                return [
                    score if self.answers or "three" not in prompt else math.nan if len(prompt) % 2 else None
                    for score, prompt in zip(scores, prompts, strict=True)
                ]

        judge, system = Silent(), System("base", "it", foreign, tmp_path)
        score_consistency(judge, foreign, bench, tmp_path)
        assert "planted gave no score for 2 of 3 sets" in caplog.text
        results = t2is_results(bench, [system])
        assert results["systems"][0]["counts"]["sets without an answer (consistency-planted)"] == 2
        # Not a mean over fewer criteria or pairs
        assert mean(results, "style") == pytest.approx(fmean(by_hand(FOREIGN, n, "Style") for n in ("0002", "0003")))
        # A set without an answer has no consistency, not that of the dimensions that are left: it would top the galleries
        by_key = {one["key"]: one["scores"][0] for one in results["sets"]}
        assert by_key["0001/0"]["style"] is None and by_key["0001/0"]["logic"] is not None
        assert by_key["0001/0"]["consistency"] is None and by_key["0003/0"]["consistency"] is None
        assert by_key["0002/0"]["consistency"] is not None  # it has no identity, and was not asked about it
        (alert,) = results["alerts"]
        assert "2 sets of 'it' have an unanswered question (consistency-planted)" in alert and "/0, 0003/0" in alert
        # The next run asks about these two again, and no other
        judge.answers, judge.pairs = True, 0
        score_consistency(judge, foreign, bench, tmp_path)
        assert judge.pairs == 6 * 4 + 1 * 3
        results = t2is_results(bench, [system])
        assert mean(results, "style") == pytest.approx(fmean(by_hand(FOREIGN, name, "Style") for name in PROMPTS))
        assert results["systems"][0]["counts"]["sets without an answer (consistency-planted)"] == 0


class TestResume:
    def test_a_stopped_run_goes_on(self, bench, foreign, tmp_path):
        whole = PlantedJudge()
        expected = score_consistency(whole, foreign, bench, tmp_path / "whole", batch_size=1)

        stopped = PlantedJudge()
        answer = stopped.score

        def stop(images, prompts):
            if stopped.calls == 2:
                raise KeyboardInterrupt
            return answer(images, prompts)

        stopped.score = stop
        with pytest.raises(KeyboardInterrupt):
            score_consistency(stopped, foreign, bench, tmp_path, batch_size=1)
        system = System("base", "it", foreign, tmp_path)
        with pytest.raises(ValueError, match="1 of 3 images have no scores 'consistency-planted'.*: 0003/0"):
            t2is_results(bench, [system])
        # A line that was being written
        (part,) = (tmp_path / "scores").glob("*.jsonl")
        part.write_bytes(part.read_bytes() + b'{"key": "0003/0", "dig')
        rest = PlantedJudge()
        assert score_consistency(rest, foreign, bench, tmp_path, batch_size=1) == expected
        assert (rest.calls, whole.calls) == (1, 3)
        t2is_results(bench, [system])

    def test_a_changed_image(self, bench, tmp_path):
        folder = write_grids(tmp_path / "grids", FOREIGN)

        def score():
            judge, found = PlantedJudge(), find_image_sets(folder, bench)
            score_consistency(judge, found, bench, tmp_path / "scores")
            return judge.pairs, t2is_results(bench, [System("base", "it", found, tmp_path / "scores")])

        _, expected = score()
        before = (folder / "0002.png").read_bytes()
        join_grid([panel(7)] * 3, 1, 3).save(folder / "0002.png")
        with pytest.raises(ValueError, match="1 of 3 images .* have changed since: 0002/0"):
            t2is_results(bench, [System("base", "it", find_image_sets(folder, bench), tmp_path / "scores")])
        # It is scored anew, it alone
        pairs, results = score()
        assert pairs == 3 * 2 and mean(results, "style") > mean(expected, "style")
        assert mean(results, "identity") == mean(expected, "identity")
        # The earlier image has its scores still
        (folder / "0002.png").write_bytes(before)
        assert score() == (0, expected)

    def test_other_weights_under_the_same_name(self, bench, foreign, tmp_path):
        def trained():
            judge = PlantedJudge()
            judge.fingerprint = "after"
            return judge

        systems = [System(name, name, foreign, tmp_path / name) for name in ("base", "tuned")]
        score_consistency(PlantedJudge(), foreign, bench, systems[0].folder)
        with pytest.raises(ValueError, match="judge/fingerprint: None, now 'after'"):
            score_consistency(trained(), foreign, bench, systems[0].folder)
        score_consistency(trained(), foreign, bench, systems[1].folder)
        with pytest.raises(ValueError, match="judge/fingerprint: None, now 'after'"):
            t2is_results(bench, systems)
        with pytest.raises(ValueError, match="Choose two different ones"):
            t2is_results(bench, systems[:1] * 2)

    def test_scores_of_another_benchmark(self, bench, foreign, tmp_path):
        system = evaluate(bench, tmp_path, foreign)
        t2is_results(bench, [system])
        changed = bench.map(lambda one: {"criteria": [{**c, "text": "two"} for c in one["criteria"]]})
        with pytest.raises(ValueError, match="another criteria"):
            t2is_results(changed, [system])
        with pytest.raises(ValueError, match="alignment of"):
            t2is_results(bench.remove_columns("alignment"), [system])

    def test_parts_of_several_processes_are_one(self, tmp_path):
        digests = {key: key for key in "abcd"}
        with open_scores(tmp_path, "it", {}, digests) as store:
            store.append({"key": "a", "incomplete": False})
        part = tmp_path / "scores" / "it.0.jsonl"
        header = part.read_text().splitlines()[0]
        other = json.dumps({"key": "c", "digest": "c", "incomplete": False})
        (tmp_path / "scores" / "it.1.jsonl").write_text(f"{header}\n{other}\n")
        with open_scores(tmp_path, "it", {}, digests) as store:
            assert store.pending == ["b", "d"]

    def test_a_part_without_a_header_is_left_to_its_process(self, tmp_path):
        part = tmp_path / "scores" / "it.1.jsonl"  # of a run that was killed as it began
        part.parent.mkdir()
        part.write_text('{"scor')
        with open_scores(tmp_path, "it", {}, {"a": "a"}) as store:
            assert store.pending == ["a"] and part.read_text() == '{"scor'


def test_figures_of_a_served_judge_follow_from_the_pixels(bench, foreign, tmp_path):
    def log_odds(*images_and_question):
        first, is_alone = images_and_question[0], len(images_and_question) == 2
        return first.getpixel((0, 0))[0] / 100 if is_alone else 0.0

    with JudgeServer(log_odds) as server:
        judge = ServedJudge(server.url, "judge")
        score_consistency(judge, foreign, bench, tmp_path)
        score_alignment(judge, foreign, bench, tmp_path)
        assert len(server.requests) == (6 * 4 + 3 * 2 + 1 * 3) + 9 * 4
    results = t2is_results(bench, [System("base", "it", foreign, tmp_path)])
    values = [value for of_set in FOREIGN.values() for value in of_set]
    assert mean(results, "entity") == pytest.approx(fmean(1 / (1 + math.exp(-value / 100)) for value in values))
    assert results["scorers"]["consistency"] == ["judge"]  # never the address


def test_generated_sets_of_all_seeds(bench, tmp_path):
    for name, values in FOREIGN.items():
        for seed in (3, 8):
            (tmp_path / name).mkdir(exist_ok=True)
            join_grid([panel(value) for value in values], *PROMPTS[name][0]).save(tmp_path / name / f"{seed}.png")
    found = find_generated_sets(tmp_path, bench, [3, 8])
    assert list(found.sets) == ["0001/3", "0001/8", "0002/3", "0002/8", "0003/3", "0003/8"] and not found.missing
    missing = {"0001/9": [0, 1, 2, 3], "0002/9": [0, 1, 2], "0003/9": [0, 1]}
    assert find_generated_sets(tmp_path, bench, [3, 9]).missing == missing
    with pytest.raises(ValueError, match="seeds"):
        write_panel_files(found, bench, tmp_path / "panels")
