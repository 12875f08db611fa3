# SPDX-License-Identifier: Apache-2.0
"""
Publishing a built dataset: what arrives on the Hub, what the card says, and what happens when something is wrong.

The Hub is a server of the tests. The clients are the real ones.
"""

import os
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from PIL import Image

from hub_server import TOKEN, HubServer
from paco_trl.data import check_pair_columns, check_ranking_columns, make_pair, theme_question
from paco_trl.data.rankings import ranking_features
from paco_trl.dataset_building import StageFolder
from paco_trl.dataset_building.pair_building import built_pair_features
from paco_trl.dataset_building.publish import publish_dataset


GENERATOR = "painters/flux"
REPORT = {
    "prompts": {"source": "someone/prompts", "selected": 6, "coverage": 0.91234567},
    "grids": {"seeds": [0, 1], "checkpoint": "/home/someone/weights/painter", "digest": "0" * 64},
    "ranking": {
        "by": ["people", "judge"], "judges": ["/home/someone/models/Judge-7B"],
        "kendalls_w": 0.8125, "pairwise_agreement": 0.875,
        "annotators": {
            "anna": {"ranked": 40, "skipped": 2, "agreement_with_others": 0.75},
            "Judge-7B": {"ranked": 48, "skipped": 0, "agreement_with_others": 0.75},
        },
    },
    "pairs": {"votes": {"ranked": 48, "ordered": 3}, "contradictions": 7, "splits": {"train": {"pairs": 99999}}},
    "reasons": {"model": "someone/vlm", "left out": {"/home/someone/a.png has no label": 4}, "seconds": None},
}  # fmt: skip


# ---- Planted data: in each prompt two seeds with two panels each, which are of one colour where the seed is the same ----


def write_panels(folder: Path) -> dict[tuple[int, int, int], str]:
    """Files by prompt, seed and position. As in a build, those of all prompts have the same names."""
    rng, paths = np.random.default_rng(0), {}
    for prompt in range(6):
        for seed in range(2):
            colour = rng.integers(0, 200, 3)
            for position in range(2):
                path = folder / f"p{prompt}" / f"{seed}-{position}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = rng.integers(0, 56, (24, 24, 3))
                Image.fromarray((colour + noise).astype(np.uint8)).save(path)
                paths[prompt, seed, position] = str(path)
    return paths


def make_pairs(paths: dict, prompts: range, with_reasons: bool = True):
    rows = []
    for prompt in prompts:
        question = theme_question(f"A walk of fox {prompt}.")
        for other, decision, reasons in ((0, "Yes", "Both have one colour."), (1, "No", "The colours differ.")):
            pair = make_pair(
                paths[prompt, 0, 0], paths[prompt, other, 1], question, decision, reasons if with_reasons else None
            )
            panels = [f"p{prompt}/0/0", f"p{prompt}/{other}/1"]
            pair |= {"id": "~".join(panels), "sha256": ["0", "1"], "group": f"p{prompt}", "panels": panels}
            pair |= {"category": ("multi-pose", "movie shot")[prompt % 2], "dimensions": ["identity"]}
            rows.append(pair | {"votes": {"yes": 2 - other, "no": other}})
    features = built_pair_features()
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def make_rankings(paths: dict, prompts: range):
    features = Features({**ranking_features(), "theme": Value("string")})
    rows = [
        {
            "id": f"p{prompt}/0/0/1", "group": f"p{prompt}", "prompt": f"A walk of fox {prompt}. It rests.",
            "theme": f"A walk of fox {prompt}.", "criteria": [], "reference": paths[prompt, 0, 0],
            "candidates": [paths[prompt, 1, 1], paths[prompt, 0, 1]], "ranking": [1, 0],
        }
        for prompt in prompts
    ]  # fmt: skip
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def plain(value):
    """A row with the bytes in the place of images."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Image.Image):
        return value.convert("RGB").tobytes()
    return [plain(each) for each in value] if isinstance(value, list) else value


# ---- What the clients do ----


def publish(
    folder: str, repo_id: str, train=(0, 4), test=(4, 6), ranked=(4, 6), broken=None, with_reasons=True, report=REPORT,
    **kwargs,
) -> str:  # fmt: skip
    """Builds the dataset in a folder as the stages before would, and publishes it."""
    paths = write_panels(Path(folder) / "images")
    pairs = DatasetDict(train=make_pairs(paths, range(*train), with_reasons))
    if test is not None:
        pairs["test"] = make_pairs(paths, range(*test), with_reasons)
    stage = StageFolder(f"{folder}/pairs")
    stage.finish(pairs, {})
    rankings = make_rankings(paths, range(*ranked)) if ranked is not None else None
    last = Path(paths[3, 1, 1])
    if broken == "text":
        last.write_text("no image")
    elif broken == "copied":
        last.write_bytes(Path(paths[5, 0, 0]).read_bytes())
    kwargs = {"token": TOKEN, "generator": GENERATOR, "max_shard_size": "6KB"} | kwargs
    pairs = stage.load()
    if broken == "no groups":
        pairs = pairs.remove_columns("group")
    elif broken == "empty":
        pairs["test"] = pairs["test"].select([])
    return publish_dataset(pairs, rankings, repo_id, report, **kwargs)


def load(repo_id: str, name: str | None = None) -> dict[str, list]:
    """What comes back from the Hub: for each split its rows."""
    splits = load_dataset(repo_id, name, token=TOKEN)
    for split in splits.values():
        (check_ranking_columns if name == "rankings" else check_pair_columns)(split)
    return {split: [plain(row) for row in data] for split, data in splits.items()}


@pytest.fixture(scope="module")
def hub():
    with HubServer({TOKEN: "tester"}) as server:
        card = "---\nlicense: other\nlicense_name: flux-dev\nlicense_link: LICENSE.md\n---\n"
        server.add_repo(GENERATOR, {"README.md": card.encode()})
        yield server


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    """Calls a function as a client of the Hub; no token may be in what it prints, logs and raises."""
    folder = tmp_path_factory.mktemp("client")

    def call(function, **arguments):
        outcome = hub.call(folder, function, **arguments)
        if "error" in outcome:
            raise outcome["raised"]
        return outcome["result"]

    return call


@pytest.fixture(autouse=True)
def healthy(hub):
    hub.fault = lambda method, path: None
    hub.requests.clear()
    hub.uploads.clear()


@pytest.fixture(scope="module")
def published(hub, client, tmp_path_factory):
    """Folder of a build that was published as `tester/foxes`."""
    folder = tmp_path_factory.mktemp("build")
    assert client(publish, folder=str(folder), repo_id="foxes") == f"{hub.url}/datasets/tester/foxes"
    return folder


def readme(hub: HubServer, repo_id: str) -> tuple[dict, str]:
    _, metadata, text = hub.files(repo_id)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_loads_back(client, published, tmp_path):
    paths = write_panels(tmp_path)
    built = {"train": make_pairs(paths, range(4)), "test": make_pairs(paths, range(4, 6))}
    loaded = client(load, repo_id="tester/foxes")  # the default configuration
    assert loaded == {split: [plain(row) for row in data] for split, data in built.items()}
    assert {len(rows) for rows in loaded.values()} == {8, 4}
    rankings = client(load, repo_id="tester/foxes", name="rankings")
    assert rankings == {"test": [plain(row) for row in make_rankings(paths, range(4, 6))]}


def test_files(hub, client, published, tmp_path):
    assert hub.repos["dataset", "tester/foxes"].private
    files = hub.files("tester/foxes")
    shards = {path: content for path, content in files.items() if path.endswith(".parquet")}
    assert sum(path.startswith("pairs/train-") for path in shards) > 1
    assert {path.split("-")[0] for path in shards} == {"pairs/train", "pairs/test", "rankings/test"}
    sheets = {f"assets/{name}.png" for name in ("pairs", "rankings")}
    assert set(files) - set(shards) == {".gitattributes", "README.md", *sheets}
    for name in sheets:
        with Image.open(BytesIO(files[name])) as picture:
            assert len(picture.convert("RGB").getcolors(10**6)) > 500  # of the noise in the panels
        assert f"]({name})".encode() in files["README.md"]
    read = [row for content in shards.values() for row in pq.read_table(BytesIO(content)).to_pylist()]
    images = [image for row in read for image in row.get("images") or [row["reference"], *row["candidates"]]]
    written = {path.read_bytes() for path in (published / "images").rglob("*.png")}
    assert {image["bytes"] for image in images} < written
    assert len({image["bytes"] for image in images}) == 6 * 3  # the pairs have three of the four panels of each prompt
    for path, content in files.items():
        for secret in (str(published.parent), os.path.expanduser("~/"), TOKEN, "paco-trl-pub"):
            assert secret.encode() not in content, (path, secret)


def test_card(hub, published):
    metadata, text = readme(hub, "tester/foxes")
    assert metadata["license"] == "other" and metadata["license_name"] == "flux-dev"
    assert metadata["license_link"] == f"{hub.url}/{GENERATOR}/blob/main/LICENSE.md"
    assert {"paco-rl", "consistency"} <= set(metadata["tags"]) and metadata["pretty_name"] == "foxes"
    # What `push_to_hub` wrote is still there
    configs = {config["config_name"]: config for config in metadata["configs"]}
    assert configs["pairs"]["default"] is True and set(configs) == {"pairs", "rankings"}
    sizes = {
        info["config_name"]: {split["name"]: split["num_examples"] for split in info["splits"]}
        for info in metadata["dataset_info"]
    }
    assert sizes == {"pairs": {"train": 8, "test": 4}, "rankings": {"test": 2}}

    for line in (
        "| train | 8 | 4 (50.0 %) | 4 (50.0 %) | 4 | 12 | 8 |",
        "| test | 4 | 2 (50.0 %) | 2 (50.0 %) | 2 | 6 | 4 |",
        "| test | 2 | 2 | 2 | 6 |",  # rankings
        "| movie shot | 4 | 2 |",
        "- coverage: 0.9123",
        "- checkpoint: painter",
        "- votes: ranked 48, ordered 3",
        "- contradictions: 7",
        "- left out: a.png has no label 4",
        "87.5 %",
        "Written by someone/vlm",
        "They come from someone/prompts.",
        f"Generated by [{GENERATOR}](https://huggingface.co/{GENERATOR})",
        'load_dataset("tester/foxes", "rankings", split="test")',
    ):
        assert line in text, line
    for absent in ("None", " nan", "/home", "someone/weights", "anna", "99999", "00000", "seconds", str(published)):
        assert absent not in text, absent
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4 and all(compile(block, "card", "exec") for block in blocks)
    assert "\n\n\n" not in text and "{{" not in text.replace("= {{PaCo", "") and "{%" not in text


def test_second_run_sends_no_data(hub, client, published):
    before = hub.files("tester/foxes")
    client(publish, folder=str(published), repo_id="foxes")
    assert hub.uploads == []
    assert hub.files("tester/foxes") == before


def test_other_data_take_the_place_of_the_first(hub, client, tmp_path):
    arguments = {"folder": str(tmp_path), "repo_id": "tester/changed"}
    client(publish, **arguments)
    assert "| train | 8 |" in readme(hub, "tester/changed")[1]
    # Interrupted before the new card is there, the old one does not tell of other data
    hub.fault = lambda method, path: "503" if method == "PUT" else None
    with pytest.raises(ConnectionError):
        client(publish, train=[1, 4], **arguments)
    metadata, text = readme(hub, "tester/changed")
    assert text.strip() == "" and [config["config_name"] for config in metadata["configs"]] == ["pairs", "rankings"]
    hub.fault = lambda method, path: None
    client(publish, train=[1, 4], **arguments)
    assert "| train | 6 |" in readme(hub, "tester/changed")[1]
    assert len(client(load, repo_id="tester/changed")["train"]) == 6


def test_without_what_is_not_known(hub, client, tmp_path):
    client(publish, folder=str(tmp_path), repo_id="tester/few", test=None, ranked=None, with_reasons=False,
        report={"ranking": {"by": ["automatic"]}}, license="mit", generator=None,
        private=False, broken="no groups",  # by which only held-out splits are compared
    )  # fmt: skip
    metadata, text = readme(hub, "tester/few")
    assert metadata["license"] == "mit" and "license_name" not in metadata
    assert not hub.repos["dataset", "tester/few"].private
    assert "first_token_weight" not in text and "not human judgments" in text
    for absent in ("None", "rankings", "## Agreement", "reasons", "**Prompts.**", "**Pairs.**", "Generated by"):
        assert absent not in text.replace("no rankings that are held out", ""), absent


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"broken": "text"}, ValueError, "row 7 .*UnidentifiedImageError"),
        ({"broken": "copied"}, ValueError, "1 images are both"),
        ({"ranked": [3, 6]}, ValueError, "1 prompts are both .*'p3'"),
        ({"broken": "empty"}, ValueError, "no rows"),
        ({"generator": "nobody/nothing"}, ValueError, "'nobody/nothing'"),
        ({"generator": None}, ValueError, "`license`"),
        ({"license": "flux-1-dev"}, ValueError, '"license" must'),
        ({"repo_id": "tester/other"}, ValueError, "'data.csv'"),
        ({"repo_id": "tester/public"}, ValueError, "public"),
    ],
)  # fmt: skip
def test_nothing_is_sent_when_something_is_wrong(hub, client, tmp_path, arguments, kind, message):
    hub.add_repo("tester/other", {"data.csv": b"a,b"}, "dataset", private=True)
    hub.add_repo("tester/public", {"README.md": b""}, "dataset")
    before = {name: len(repo.commits) for name, repo in hub.repos.items()}
    with pytest.raises(kind, match=message):
        client(publish, **{"folder": str(tmp_path), "repo_id": "tester/wrong", **arguments})
    assert hub.uploads == [] and {name: len(repo.commits) for name, repo in hub.repos.items()} == before


def test_upload_that_is_cut_between_pairs_and_rankings(hub, client, published, tmp_path):
    """The pairs can be loaded, without a card; the next run sends the rankings alone."""
    count = sum(name.startswith("pairs/") for name in hub.files("tester/foxes"))
    hub.fault = lambda method, path: "503" if method == "PUT" and len(hub.uploads) == count else None
    with pytest.raises(ConnectionError):
        client(publish, folder=str(tmp_path), repo_id="tester/half")
    metadata, text = readme(hub, "tester/half")
    assert [config["config_name"] for config in metadata["configs"]] == ["pairs"] and text.strip() == ""
    assert len(client(load, repo_id="tester/half")["train"]) == 8

    hub.fault = lambda method, path: None
    client(publish, folder=str(tmp_path), repo_id="tester/half")
    assert hub.files("tester/half").keys() == hub.files("tester/foxes").keys()
    assert len(hub.uploads) == len(set(hub.uploads)) and "| train | 8 |" in readme(hub, "tester/half")[1]
    assert len(client(load, repo_id="tester/half", name="rankings")["test"]) == 2


def test_upload_that_is_cut(hub, client, tmp_path):
    """The third file never arrives. The next run sends it and the others, and not the first two again."""
    hub.fault = lambda method, path: "cut" if method == "PUT" and len(hub.uploads) == 2 else None
    with pytest.raises(ConnectionError, match=f"{hub.url}.*Rerun the stage"):
        client(publish, folder=str(tmp_path), repo_id="tester/cut")
    assert sum(method == "PUT" for method, _ in hub.requests) == 2 + 6  # the client's own tries
    arrived = list(hub.uploads)
    assert len(arrived) == 2 and set(hub.files("tester/cut")) == {".gitattributes"}

    hub.fault = lambda method, path: None
    client(publish, folder=str(tmp_path), repo_id="tester/cut")
    assert hub.uploads[:2] == arrived and len(set(hub.uploads)) == len(hub.uploads) > 4
    assert len(client(load, repo_id="tester/cut")["train"]) == 8
    assert hub.unknown == []
    assert "| train | 8 |" in readme(hub, "tester/cut")[1]
