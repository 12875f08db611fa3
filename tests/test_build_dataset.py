# SPDX-License-Identifier: Apache-2.0
"""The script that builds a dataset, stage by stage, with a tiny pipeline, a judge on a server and a server of reasons."""

import contextlib
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import DatasetDict, load_from_disk

from chat_server import ChatServer
from hub_server import HubServer
from judge_server import JudgeServer
from paco_trl.commands import build as script
from paco_trl.commands import build_arguments, reward
from paco_trl.data import check_image_set_columns, check_pair_columns, check_ranking_columns, validate_pairs
from paco_trl.dataset_building import append_annotation
from paco_trl.rewards import JudgeUnavailableError
from paco_trl.utils.stage_folder import StageFolder
from planted_world import PlantedWorld


ROOT = Path(__file__).parent.parent


def run(stage: str, **options) -> None:
    """Run a stage in the working directory: `run("panels", num_workers=1)`."""
    words = [stage]
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    build_arguments.main(words)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Runs a stage in a folder of its own, and gives the folder of the dataset."""
    monkeypatch.chdir(tmp_path)

    def build(stage: str, **options) -> Path:
        run(stage, **options)
        return tmp_path / "build"

    return build


def write_prompts_file(path: Path, count: int) -> Path:
    """Prompts as a user has them: without ids."""
    row = {"rows": 2, "cols": 2, "panels": ["Spring", "Summer", "Autumn", "Winter"]}
    foxes = [f"fox number {number}" for number in range(count)]
    rows = [{"prompt": f"A 2x2 grid layout of {fox}. It travels.", "theme": f"The journey of {fox}."} for fox in foxes]
    path.write_text("".join(json.dumps(each | row) + "\n" for each in rows))
    return path


@pytest.fixture(scope="module")
def generated_once(tiny_flux, tmp_path_factory) -> Path:
    """Prompts, grids and panels, made once for the file."""
    folder = tmp_path_factory.mktemp("generated")
    with contextlib.chdir(folder):
        run("prompts", dataset_name=write_prompts_file(folder / "prompts.jsonl", 5))
        options = {"model_name_or_path": tiny_flux, "dtype": "float32", "seeds": [0, 1, 2], "height": 32, "width": 32}
        run("grids", **options, batch_size=3, num_inference_steps=1)
        run("panels")
    return folder


@pytest.fixture
def generated(build, generated_once, tmp_path):
    """Runs a stage after those three, in a copy; the copied datasets name the images of the original."""
    shutil.copytree(generated_once, tmp_path, dirs_exist_ok=True)
    return build


@pytest.fixture(scope="module")
def planted_once(tmp_path_factory) -> tuple[Path, PlantedWorld]:
    """The same, with grids of the planted world in the place of generated ones."""
    folder = tmp_path_factory.mktemp("planted")
    world = PlantedWorld(folder / "world", 5)
    generated_with = {"model": "a-model", "prompts": script.digest_of_prompts(world.prompts)}
    script.StageFolder(folder / "build/prompts").finish(world.prompts, {})
    script.StageFolder(folder / "build/grids", generated_with).finish(world.grids, {})
    with contextlib.chdir(folder):
        run("panels")
    return folder, world


@pytest.fixture
def planted(build, planted_once, tmp_path):
    folder, build.world = planted_once
    shutil.copytree(folder / "build", tmp_path / "build")
    return build


def loaded(folder: Path):
    return load_from_disk(folder / "dataset")


def annotate(folder: Path, records: list[dict]) -> None:
    for record in records:
        append_annotation(folder / "build/annotations", record)


def same_ranking(world: PlantedWorld) -> list[dict]:
    return [{"annotator": "anna", "instance": name, "ranking": [0, 1, 2, 3]} for name in world.instances["id"]]


class TestStages:
    def test_from_prompts_to_pairs(self, generated, tmp_path, capsys):
        folder = tmp_path / "build"
        assert loaded(folder / "prompts")["id"][:] == ["000000", "000001", "000002", "000003", "000004"]
        assert len(loaded(folder / "grids")) == 15
        assert len(loaded(folder / "panels")) == 60
        assert len(loaded(folder / "instances")) == 5 * 3 * 4 * 3
        generated("rank")
        generated("pairs", test_size=0.4)
        pairs = loaded(folder / "pairs")
        assert {name: len(set(split["group"])) for name, split in pairs.items()} == {"train": 3, "test": 2}
        for split in pairs.values():
            check_pair_columns(split)
            assert len(validate_pairs(split)) == len(split) > 0
        for name in ("grids", "pairs"):
            assert (folder / name / "sample.png").stat().st_size > 1000
        report = json.loads((folder / "pairs" / "report.json").read_text())
        assert report["pairs"]["splits"]["train"]["consistent"] == 3 * 3 * 6
        assert report["ranking"]["annotators"]["automatic"]["ranked"] == 180
        assert "consistent" in capsys.readouterr().out
        with pytest.raises(ValueError, match=r"other settings: test_size: 0.4, now 0.2"):
            generated("pairs", test_size=0.2)  # a judge may have been trained on what it would hold out
        # As the script that trains a judge loads it; the copy names the images of the original
        generated("panels")
        generated("pairs", test_size=0.4)
        pairs = loaded(folder / "pairs")
        training = SimpleNamespace(process_index=0, dataset_num_proc=None)
        arguments = reward.JudgeScriptArguments(dataset_name=str(folder / "pairs/dataset"))
        assert reward.load_pairs(arguments, training, "test", None)["id"][:] == pairs["test"]["id"][:]

    def test_other_themes_under_the_same_ids(self, generated, tmp_path):
        """All that follows asks about the themes: they must be those of the images."""
        file = tmp_path / "prompts.jsonl"
        generated("prompts", dataset_name=file)  # the same again
        file.write_text(file.read_text().replace("The journey", "The dinner"))
        with pytest.raises(ValueError, match="prompts has other prompts, from prompts.jsonl. Delete the directory"):
            generated("prompts", dataset_name=file)
        shutil.rmtree(tmp_path / "build/prompts")
        generated("prompts", dataset_name=file)
        generated("rank")  # asks about nothing
        for stage in ("panels", "pairs"):
            with pytest.raises(ValueError, match="The prompts in build are not those that the grids"):
                generated(stage)
        file.write_text(file.read_text().replace("The dinner", "The journey"))
        shutil.rmtree(tmp_path / "build/prompts")
        generated("prompts", dataset_name=file)
        generated("pairs", test_size=0.4)

    def test_grids_are_begun_with_other_seeds(self, generated, tiny_flux):
        options = {"model_name_or_path": tiny_flux, "dtype": "float32", "height": 32, "width": 32}
        with pytest.raises(ValueError, match=r"seeds: \[0, 1, 2\], now \[0, 1\]"):
            generated("grids", **options, num_inference_steps=1, seeds=[0, 1], batch_size=3)

    def test_grids_are_begun_with_other_weights(self, generated, tiny_flux, tmp_path):
        options = {"model_name_or_path": tiny_flux, "dtype": "float32", "height": 32, "width": 32}
        options |= {"num_inference_steps": 1, "seeds": [0, 1, 2], "batch_size": 3}
        generated("grids", **options)
        file = tmp_path / "build/grids/settings.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"model_files": settings["model_files"][::-1]}))
        with pytest.raises(ValueError, match="model_files: "):
            generated("grids", **options)

    def test_prompts_that_are_left_out(self, generated, tmp_path):
        assert len(set(loaded(tmp_path / "build/instances")["prompt_id"])) == 5
        generated("panels", exclude_prompts=["000001", "000004"])
        assert sorted(set(loaded(tmp_path / "build/instances")["prompt_id"])) == ["000000", "000002", "000003"]
        with pytest.raises(ValueError, match="`--exclude_prompts` has '7', which is not the id of a prompt"):
            generated("panels", exclude_prompts=["7"])

    def test_what_is_refused(self, build, tmp_path, capsys):
        build_arguments.main(["--help"])
        assert "\n  prompts " in capsys.readouterr().out
        for stage, options, error, token in [
            ("pair", {}, ValueError, "'pair'.*prompts, grids"),
            ("pairs", {"no_such_option": 1}, ValueError, "no_such_option"),
            ("prompts", {}, ValueError, "`--base_url` is None"),
            ("grids", {"dtype": "float8"}, ValueError, "float8"),
            ("publish", {}, ValueError, "--hub_model_id"),
            ("grids", {}, FileNotFoundError, "'prompts' is not finished"),
            ("reasons", {"base_url": "http://a/v1", "model": "m"}, FileNotFoundError, "'pairs' is not finished"),
            ("reasons", {"model": "m"}, ValueError, "`--base_url` is None"),
        ]:
            with pytest.raises(error, match=token):
                build(stage, **options)
        row = {"id": "alone", "prompt": "A fox.", "rows": 1, "cols": 1, "panels": ["A fox."]}
        (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match="'alone' has only one panel"):
            build("prompts", dataset_name=tmp_path / "prompts.jsonl")
        file = write_prompts_file(tmp_path / "prompts.jsonl", 2)
        for options, unused in (
            ({"dataset_name": file, "num_written": 2000, "layouts": ["9x9"]}, "`--num_written`, `--layouts`"),
            ({"dataset_name": file, "max_concurrency": 3, "api_key_variable": "K"}, "`--api_key_variable`, `--max_c"),
            ({"dataset_name": file, "duplicate_threshold": 0.95}, "--duplicate_threshold"),
            ({"dataset_split": "train"}, "--dataset_split"),
        ):
            with pytest.raises(ValueError, match=f"{unused}.* would do nothing"):
                build("prompts", **options)
        build("prompts", dataset_name=file)
        with pytest.raises(FileNotFoundError, match="'grids' is not finished"):
            build("panels")


class TestRankings:
    def test_construction_is_not_a_vote_along_with_people(self, planted, tmp_path):
        with pytest.raises(ValueError, match="`--judge_url` would do nothing without `--judge_model`"):
            planted("rank", judge_url="http://127.0.0.1:1/v1")
        with pytest.raises(ValueError, match="`--dtype` would do nothing with `--judge_url`"):
            planted("rank", judge_url="http://127.0.0.1:1/v1", judge_model="a", dtype="auto")
        planted("rank")
        annotate(tmp_path, same_ranking(planted.world))
        rankings = tmp_path / "build/rankings/dataset"
        for annotators, kinds, has_rankings in (
            (["automatic", "anna"], ["automatic", "people"], True),
            (None, ["people"], True),
            # Rankings of a vote that is not counted any more would be published with other pairs
            (["automatic"], ["automatic"], False),
        ):
            options = {} if annotators is None else {"annotators": annotators}
            planted("pairs", test_size=0.2, max_rankings=20, **options)
            report = json.loads((tmp_path / "build/pairs/report.json").read_text())
            assert report["ranking"]["by"] == kinds and rankings.exists() == has_rankings
            if kinds == ["people"]:
                held_out = load_from_disk(rankings)
                check_ranking_columns(held_out)
                assert held_out["ranking"][:] == [[0, 1, 2, 3]] * 20 and list(report["ranking"]["annotators"]) == [
                    "anna"
                ]

    @pytest.mark.slow
    def test_a_served_judge(self, planted, tmp_path):
        with JudgeServer(lambda first, second, question: second.getpixel((0, 0))[0] / 99) as server:
            planted("rank", judge_model="judge", judge_url=server.url, annotator="other")
            assert len(server.requests) == 4 * len(planted.world.instances) + 1
        planted("pairs", test_size=0.2)
        report = json.loads((tmp_path / "build/pairs/report.json").read_text())
        assert (report["ranking"]["by"], report["ranking"]["judges"]) == (["judge"], ["other"])
        with pytest.raises(JudgeUnavailableError, match=re.escape(server.url)):
            planted("rank", judge_model="judge", judge_url=server.url)


class TestWritten:
    """Prompts and reasons by models on a server, which here are functions."""

    def test_prompts(self, build, tmp_path):
        numbers = itertools.count(1)

        def write(body):
            names = [f"{next(numbers)}-{index}" for index in range(10)]
            panels = {name: [f"It is at place {place} of {name}." for place in range(4)] for name in names}
            prompts = [{"theme": f"Fox {name} travels far.", "panels": texts} for name, texts in panels.items()]
            return json.dumps({"prompts": prompts})

        options = {"model": "writer", "categories": ["movie shot", "multi-pose"]}
        with ChatServer(write) as server:
            build("prompts", base_url=server.url, num_written=8, **options)
        prompts = loaded(tmp_path / "build/prompts")
        assert sorted(set(prompts["category"])) == ["movie shot", "multi-pose"]
        assert len(prompts) == len(set(prompts["id"])) == len(set(prompts["prompt"])) == 8
        check_image_set_columns(prompts)
        # The server is gone, and is not needed again
        build("prompts", base_url=server.url, num_written=8, **options)
        with pytest.raises(ValueError, match="num_written: 8, now 9"):
            build("prompts", base_url=server.url, num_written=9, **options)
        with pytest.raises(ValueError, match="`--layouts`"):
            build("prompts", base_url=server.url, model="writer", layouts=["2by2"])

    def test_reasons(self, planted, tmp_path):
        planted("rank")
        pairs = loaded(planted("pairs", test_size=0.2) / "pairs")
        few = DatasetDict(train=pairs["train"].select([0, 1]), test=pairs["test"].select([0]))
        StageFolder(tmp_path / "build/pairs").finish(few, {})
        question = few["test"][0]["prompt"][-1]["content"]
        for silent, names in ((False, ["train", "test"]), (True, ["train"])):
            # A split of which nothing can be used is left out
            shutil.rmtree(tmp_path / "build/reasons", ignore_errors=True)

            def explain(body):
                text = body["messages"][-1]["content"][-1]["text"]
                label = text.partition("decided: ")[2].partition(" ")[0]
                is_known = not (silent and question in text)  # noqa: B023
                return f"{label}. " + "Both have a bright colour and one shape. " * 3 if is_known else "I cannot say."

            with ChatServer(explain) as server:
                for _ in range(2):  # the second time nothing is asked
                    planted("reasons", base_url=server.url, model="writer")
                    assert len(server.requests) == (5 if silent else 3)
            written = loaded(tmp_path / "build/reasons")
            assert list(written) == names
            for name, split in written.items():
                check_pair_columns(split)
                assert split["id"][:] == few[name]["id"][:]
                for before, after in zip(few[name]["completion"], split["completion"], strict=True):
                    assert after[0]["content"].startswith(before[0]["content"] + ". Both have")
        # Other pairs have no reasons: what is published would not fit together
        shutil.rmtree(tmp_path / "build" / "pairs")
        planted("pairs", test_size=0.4, seed=1)
        for stage, options in (("publish", {"hub_model_id": "user/name"}), ("reasons", {"base_url": server.url})):
            with pytest.raises(ValueError, match="other pairs|pairs: "):
                planted(stage, **options, **({"model": "writer"} if stage == "reasons" else {}))


class TestPublish:
    def test_what_is_published_is_what_was_built(self, planted, tmp_path):
        planted("rank")
        annotate(tmp_path, same_ranking(planted.world))
        planted("pairs", test_size=0.2, annotators=["anna", "automatic"])
        count = len(loaded(tmp_path / "build/pairs")["train"])
        with HubServer({"hf_a": "tester"}) as hub, hub.connected(tmp_path.parent / "cache", "hf_a"):
            hub.add_repo("tester/figures", {"README.md": b""}, "dataset")
            with pytest.raises(ValueError, match="license"):  # nobody knows that of a model that is on no Hub
                planted("publish", hub_model_id="tester/figures", private=False)
            with pytest.raises(ValueError, match="public"):
                planted("publish", hub_model_id="tester/figures", license="apache-2.0")
            assert not [path for _, path in hub.requests if "create" in path or "commit" in path]
            planted("publish", hub_model_id="tester/figures", license="apache-2.0", private=False)
            files = hub.files("tester/figures")
        card = files["README.md"].decode()
        for text in (f"| train | {count} |", "apache-2.0", "a-model", "Kendall's W"):
            assert text in card
        for text in ("anna", str(tmp_path), "None"):
            assert text not in card
        shards = {name.split("-")[0] for name in files if name.endswith(".parquet")}
        assert shards == {"pairs/train", "pairs/test", "rankings/test"}
