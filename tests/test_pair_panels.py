# SPDX-License-Identifier: Apache-2.0
"""Pairing: panels are cut once and named by what they show, and instances follow the combinatorial rule."""

import functools
import hashlib
import itertools
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from paco_trl.data import check_ranking_columns, rankings_to_pairs, split_grid
from paco_trl.dataset_building.panels import cut_panels, instances_to_rankings, make_instances, pixels_sha256
from paco_trl.plots.sample_sheet import grids_sheet
from paco_trl.utils.stage_folder import StageFolder


def save_grid(path: Path, rows: int, cols: int, number: int, mode: str = "RGB", side: int = 8) -> None:
    """A grid each of whose panels differs from all others."""
    pixels = np.random.default_rng(number).integers(0, 256, (rows * side, cols * side, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


def grid_rows(folder: Path, prompts: list[str], seeds: list[int], rows: int = 2, cols: int = 2) -> list[dict]:
    names = [(f"{name}/{seed}", name, seed) for name in prompts for seed in seeds]
    columns = ("id", "prompt_id", "seed", "rows", "cols", "image")
    files = folder / "drawn"
    return [dict(zip(columns, (*name, rows, cols, str(files / f"{name[0]}.png")), strict=True)) for name in names]


def to_dataset(rows: list[dict]) -> Dataset:
    return Dataset.from_list(rows).cast_column("image", ImageFeature())


def make_grids(folder: Path, prompts: list[str], seeds: list[int], rows: int = 2, cols: int = 2, **kwargs) -> Dataset:
    listed = grid_rows(folder, prompts, seeds, rows, cols)
    for number, row in enumerate(listed):
        save_grid(Path(row["image"]), rows, cols, number, **kwargs)
    return to_dataset(listed)


def make_panels(prompts: list[str], seeds: list[int], panels: int) -> Dataset:
    """Panels without files."""
    columns = ("id", "prompt_id", "seed", "position", "sha256", "image")
    places = list(itertools.product(prompts, seeds, range(panels)))
    rows = [("/".join(map(str, place)), *place, "".join(map(str, place)), "/panels/a.png") for place in places]
    return to_dataset([dict(zip(columns, row, strict=True)) for row in rows])


def paths(dataset: Dataset) -> list[str]:
    return [image["path"] for image in dataset.cast_column("image", ImageFeature(decode=False))["image"]]


class TestCutting:
    @pytest.mark.parametrize(("rows", "cols", "mode"), [(2, 2, "RGB"), (1, 2, "L"), (3, 2, "P")])
    def test_panels_are_those_of_the_grids(self, tmp_path, rows, cols, mode):
        grids = make_grids(tmp_path, ["b/1", "a"], [4, 2], rows, cols, mode=mode)
        panels = cut_panels(grids, StageFolder(tmp_path / "panels"))
        number = rows * cols
        expected = [f"{name}/{seed}/{place}" for name in ("b/1", "a") for seed in (4, 2) for place in range(number)]
        assert panels["id"] == expected
        assert panels["prompt_id"] == ["b/1"] * 2 * number + ["a"] * 2 * number
        assert panels["seed"] == ([4] * number + [2] * number) * 2
        assert panels["position"] == list(range(number)) * 4
        for row, grid in enumerate(grids["image"]):
            if mode == "P":
                grid = grid.convert("RGB")
            for place, panel in enumerate(split_grid(grid, rows, cols)):
                cut = panels[row * number + place]
                assert cut["image"].mode == panel.mode and cut["image"].tobytes() == panel.tobytes()
                head = f"8x8 {panel.mode}\n".encode()
                assert cut["sha256"] == hashlib.sha256(head + panel.tobytes()).hexdigest()

    def test_each_image_is_on_the_disk_once(self, tmp_path):
        folder = StageFolder(tmp_path / "panels")
        panels = cut_panels(make_grids(tmp_path, ["a", "b"], [0, 1]), folder)
        images = paths(panels)
        assert len(set(images)) == len(panels) == 16
        assert sorted(images) == sorted(map(str, folder.images.rglob("*.png")))
        assert folder.is_done and folder.load()["sha256"] == panels["sha256"]
        assert paths(folder.load()) == images
        assert folder.report["panels"] == 16 and folder.report["panels that are equal to an earlier one"] == 0


class TestResume:
    def test_what_is_cut_is_not_cut_again(self, tmp_path):
        grids = make_grids(tmp_path, ["a", "b", "c"], [0, 1])
        whole = cut_panels(grids, StageFolder(tmp_path / "whole"))
        folder = StageFolder(tmp_path / "panels")
        broken = Path(paths(grids)[3])
        content = broken.read_bytes()
        broken.write_bytes(content[:-100])  # its header is whole
        with pytest.raises(ValueError, match=r"'b/1' .*truncated"):
            cut_panels(grids, folder)
        assert not folder.is_done
        done = [record["grid"] for record in folder.journal("panels").records]
        assert done == ["a/0", "a/1", "b/0"]
        times = {path: path.stat().st_mtime_ns for path in folder.images.rglob("*.png")}
        assert len(times) >= 12
        broken.write_bytes(content)
        # The last record was torn, and a panel is gone
        journal = tmp_path / "panels" / "panels.jsonl"
        journal.write_bytes(journal.read_bytes()[:-20])
        next((folder.images / "a").glob("1-2.png")).unlink()
        panels = cut_panels(grids, folder)
        assert panels["id"] == whole["id"] and panels["sha256"] == whole["sha256"]
        assert [Path(path).read_bytes() for path in paths(panels)] == [
            Path(path).read_bytes() for path in paths(whole)
        ]
        again = {path for path, changed in times.items() if not path.exists() or path.stat().st_mtime_ns != changed}
        again = {(path.parent.name, path.name[0]) for path in again}
        assert {("a", "1"), ("b", "0")} <= again and ("a", "0") not in again
        assert StageFolder(tmp_path / "whole").report == folder.report

    def test_killed_while_it_cuts(self, tmp_path):
        # Large enough that it does not end before it is killed
        grids = make_grids(tmp_path, [f"p{number}" for number in range(10)], [0, 1], side=192)
        folder = tmp_path / "panels"
        target = functools.partial(cut_panels, grids, StageFolder(folder))
        process = multiprocessing.get_context("fork").Process(target=target)
        process.start()
        while not (folder / "panels.jsonl").exists() or len((folder / "panels.jsonl").read_bytes().splitlines()) < 3:
            assert process.is_alive()
            time.sleep(0.01)
        process.kill()
        process.join()
        assert 3 <= len(StageFolder(folder).journal("panels").records) < 20 and not StageFolder(folder).is_done
        panels = cut_panels(grids, StageFolder(folder))
        alone = cut_panels(grids, StageFolder(tmp_path / "alone"))
        assert panels["sha256"] == alone["sha256"] and panels["id"] == alone["id"]
        assert len(set(panels["sha256"])) == 80


class TestBadGrids:
    @pytest.mark.parametrize(
        ("spoil", "token"),
        [
            (lambda rows: Image.new("RGB", (16, 15)).save(rows[2]["image"]), "'b/0'.*15x16"),
            (lambda rows: Path(rows[1]["image"]).write_text("no image"), "'a/1' .*cannot identify"),
            (lambda rows: [row.update(image={"bytes": b"", "path": None}) for row in rows], "'a/0'"),
        ],
    )
    def test_grids_that_cannot_be_cut(self, tmp_path, spoil, token):
        make_grids(tmp_path, ["a", "b"], [0, 1])
        rows = grid_rows(tmp_path, ["a", "b"], [0, 1])
        spoil(rows)
        folder = StageFolder(tmp_path / "panels")
        with pytest.raises(ValueError, match=token):
            cut_panels(to_dataset(rows), folder)
        assert not folder.is_done


class TestInstances:
    @pytest.mark.parametrize("prompts, seeds, panels", [(708, 4, 4), (3, 3, 6)])
    def test_number_and_rule(self, prompts, seeds, panels):
        names = [f"p{number}" for number in range(prompts)]
        instances = make_instances(make_panels(names, list(range(seeds)), panels))
        assert len(instances) == prompts * seeds * panels * (panels - 1)
        assert len(set(instances["id"])) == len(instances)
        columns = instances.remove_columns("digest")[:]
        seen = set()
        for name, prompt, reference, candidates in zip(*columns.values(), strict=True):
            own, seed, position = reference.split("/")
            places = [candidate.split("/") for candidate in candidates]
            assert own == prompt and {place[0] for place in places} == {prompt}
            (other,) = {place[2] for place in places}
            assert other != position  # so the reference is none of them
            assert [place[1] for place in places] == [str(each) for each in range(seeds)]
            assert name == f"{prompt}/{seed}/{position}/{other}"
            seen.add((reference, other))
        assert len(seen) == len(instances)

    @pytest.mark.parametrize("role", ["reference", "candidates"])
    def test_the_digest_is_that_of_all_images(self, role):
        panels = make_panels(["p"], [0, 1], 2)
        before = make_instances(panels)
        changed = before[0]["reference"] if role == "reference" else before[0]["candidates"][1]
        columns = panels.remove_columns("image")[:]
        columns["sha256"][columns["id"].index(changed)] = "other"
        after = make_instances(Dataset.from_dict(columns))
        assert before[0]["digest"] != after[0]["digest"] and before[0]["id"] == after[0]["id"]
        uses = [changed in (row["reference"], *row["candidates"]) for row in before]
        assert [old != new for old, new in zip(before["digest"], after["digest"], strict=True)] == uses

    @pytest.mark.parametrize(
        ("left_out", "token"),
        [
            (lambda row: row["seed"] == 1, "'a'.* two seeds"),
            (lambda row: row["id"] == "b/1/3", r"'b' lacks the panels \[\(1, 3\)\]"),
            (lambda row: row["position"] > 0, "'a'.* panels per grid"),
        ],
    )
    def test_what_is_missing_is_named(self, left_out, token):
        rows = [*make_panels(["a", "b"], [0, 1], 4).cast_column("image", ImageFeature(decode=False))]
        with pytest.raises(ValueError, match=token):
            make_instances(Dataset.from_list([row for row in rows if not left_out(row)]))


class TestRankings:
    @pytest.fixture
    def built(self, tmp_path) -> tuple[Dataset, Dataset, Dataset]:
        panels = cut_panels(make_grids(tmp_path, ["a", "b"], [0, 1, 2]), StageFolder(tmp_path / "panels"))
        criteria = [{"dimension": "style", "name": "ink", "text": "One ink."}]
        prompts = Dataset.from_list(
            [
                {"id": "b", "prompt": "A boat.", "theme": "boats", "criteria": criteria},
                {"id": "a", "prompt": "A fox.", "theme": "foxes", "criteria": []},
            ]
        )
        return make_instances(panels), panels, prompts

    def test_format(self, built):
        instances, panels, prompts = built
        rankings = instances_to_rankings(*built, {"b/1/0/3": [2, 0, 1], "a/0/2/1": [1, 2, 0]})
        check_ranking_columns(rankings)
        assert rankings["id"] == ["a/0/2/1", "b/1/0/3"]  # as the instances, not as the rankings
        assert rankings["group"] == ["a", "b"]
        assert rankings["prompt"] == ["A fox.", "A boat."] and rankings["theme"] == ["foxes", "boats"]
        assert rankings["criteria"] == [[], prompts["criteria"][0]]
        assert rankings["ranking"] == [[1, 2, 0], [2, 0, 1]]
        show = dict(zip(panels["id"], panels["sha256"], strict=True))
        row = rankings[1]
        assert pixels_sha256(row["reference"]) == show["b/1/0"]
        assert [pixels_sha256(image) for image in row["candidates"]] == [show[f"b/{seed}/3"] for seed in range(3)]
        pairs = rankings_to_pairs(rankings)
        assert len(pairs) == 4 and pixels_sha256(pairs[2]["images"][1]) == show["b/2/3"]

    def test_no_image_is_copied(self, built):
        instances, panels, _ = built
        rankings = instances_to_rankings(*built, dict.fromkeys(instances["id"], [0, 1, 2]))
        assert len(rankings) == len(instances) == 72
        stored = rankings.with_format("arrow")[:]
        files = set(stored["reference"].combine_chunks().field("path").to_pylist())
        assert files == set(paths(panels))
        assert stored["reference"].combine_chunks().field("bytes").null_count == 72


class TestSheets:
    def test_they_show_what_is_there(self, tmp_path):
        """Colours of the grids and panels that should be seen, and of none that should not."""
        colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255)]
        rows = grid_rows(tmp_path, ["a", "b", "c"], [0, 1], 1, 2)
        for row, colour in zip(rows, colours, strict=True):
            image = Image.new("RGB", (64, 32), colour)
            image.paste(tuple(value // 2 for value in colour), (32, 0, 64, 32))
            Path(row["image"]).parent.mkdir(parents=True, exist_ok=True)
            image.save(row["image"])
        grids = to_dataset(rows)
        prompts = Dataset.from_list([{"id": name, "prompt": f"The prompt {name} costs $5 and $6"} for name in "abc"])
        grids_sheet(grids, prompts, tmp_path / "grids.png", max_prompts=2)
        assert seen(Image.open(tmp_path / "grids.png"), colours) == colours[:4]  # two of three prompts, from the first


def seen(sheet: Image.Image, colours: list[tuple]) -> list[tuple]:
    pixels = np.asarray(sheet)
    return [colour for colour in colours if np.all(pixels == colour, axis=-1).sum() > 500]
