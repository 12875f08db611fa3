# SPDX-License-Identifier: Apache-2.0
"""VCReward-Bench, EditReward-Compass and MMRB2 in the layouts that their own scripts read, with planted judges."""

import json
import re

import pytest
import yaml
from PIL import Image

from chat_server import ChatServer
from judge_server import JudgeServer, pictures_of
from paco_trl.commands.main import main
from paco_trl.data.columns import typed_dataset
from paco_trl.evaluation import ComparingJudge, evaluate_rankings, load_rankings
from paco_trl.utils.chat import ChatEndpoint


def flat(green, size=(8, 8)):
    """An edit of a black image, whose green should have stayed."""
    return Image.new("RGB", size, (0, green, 0))


class Keeper:
    """Scores what stayed."""

    name = "keeper"

    def score(self, images, prompts):
        assert all("remain consistent" in prompt or "accurately follow" in prompt for prompt in prompts)
        return [1 - edit.getpixel((0, 0))[1] / 255 for _, edit in images]


class Changer(Keeper):
    name = "changer"

    def score(self, images, prompts):
        return [1 - score for score in super().score(images, prompts)]


# Instruction, green of A and of B, winner, task. The keeper is right in the first two, ties in the third, wrong in the last
PAIRS = [
    ("Add a hat.", (0, 100), "Image A", "subject_addition"),
    ("Add a hat.", (90, 20), "Image B", "subject_addition"),
    ("Paint it red.", (40, 40), "Image B", "color_alteration"),
    ("Paint it blue.", (200, 10), "Image A", "subject_addition"),
]


@pytest.fixture
def vc_reward(tmp_path):
    rows = [
        (f"{task}_pair_{number}", instruction, flat(0), list(map(flat, greens)), winner, task)
        for number, (instruction, greens, winner, task) in enumerate(PAIRS)
    ]
    types = {"key": "string", "instruction": "string", "source_image": "image", "edited_images": ["image"]}
    dataset = typed_dataset(rows, **types, winner="string", task="string")
    (tmp_path / "vc" / "data").mkdir(parents=True)
    dataset.to_parquet(tmp_path / "vc" / "data" / "train-00000-of-00001.parquet")
    return tmp_path / "vc"


# Dimension, green of winner and loser, label. Following is asked of the same green
COMPASS = [
    ("VC", (10, 100), "preference"),
    ("VC", (100, 10), "preference"),
    ("VC", (50, 50), "preference"),
    ("VC", (70, 70), "tie"),
    ("VC", (70, 71), "tie"),
    ("IA", (0, 1), "preference"),
    ("VQ", (255, 0), "preference"),
]


@pytest.fixture
def compass(tmp_path):
    """Writes the rows as JSON next to their images, some changed."""

    def write(**changes):
        folder = tmp_path / "compass"
        (folder / "images").mkdir(parents=True, exist_ok=True)
        rows = []
        for number, (dimension, greens, label) in enumerate(COMPASS):
            names = [f"images/{number}_{kind}.png" for kind in ("source", "winner", "loser")]
            for name, green in zip(names, (0, *greens), strict=True):
                flat(green).save(folder / name)
            images = dict(zip(("source_image", "winner", "loser"), names, strict=True))
            rows.append({"dimension": dimension, "prompt": f"Edit {number}.", "label": label, **images})
        rows[2] |= changes
        (folder / "reward_eval.json").write_text(json.dumps(rows))
        return folder / "reward_eval.json"

    return write


def consistency(results):
    return results["dimensions"]["consistency"]


def test_nothing_is_left(compass):
    path = compass()
    path.write_text(json.dumps([row for row in json.loads(path.read_text()) if row["dimension"] == "VQ"]))
    with pytest.raises(ValueError, match="is left. Leave fewer"):
        load_rankings("editreward_compass", path)


def test_vc_reward_counts_pairs_and_not_tasks(vc_reward, tmp_path):
    dataset = load_rankings("vc_reward", vc_reward)
    kept = evaluate_rankings(Keeper(), dataset, None, tmp_path / "scores.jsonl", benchmark="vc_reward")
    figures = consistency(kept)
    assert (figures["strict"]["mean"], figures["geq"]["mean"], figures["num_ties"]) == (0.5, 0.75, 1)
    # The mean over tasks would be (2 / 3 + 0) / 2
    assert figures["task_types"]["subject_addition"] == {"strict": 2 / 3, "geq": 2 / 3, "num_rows": 3}
    low, high = figures["strict"]["interval"]
    assert low < 0.5 < high and kept["num_groups"] == 3  # two pairs have one instruction
    assert list(kept["dimensions"]) == ["consistency"]
    # Its negative twin is right where the other is wrong
    changed = consistency(evaluate_rankings(Changer(), dataset, benchmark="vc_reward"))
    assert (changed["strict"]["mean"], changed["geq"]["mean"]) == (0.25, 0.5)


def test_editreward_compass_counts_ties_of_people(compass):
    dataset = load_rankings("editreward_compass", compass())
    assert len(dataset) == 6  # without VQ
    figures = evaluate_rankings(Keeper(), dataset, benchmark="editreward_compass")["dimensions"]
    # Right: 10 < 100 and the tie of 70 and 70
    assert figures["consistency"]["strict"]["mean"] == pytest.approx(2 / 5)
    assert figures["consistency"]["geq"]["mean"] == pytest.approx(3 / 5)
    by_label = figures["consistency"]["task_types"]
    assert by_label["preference"]["strict"] == pytest.approx(1 / 3) and by_label["tie"]["strict"] == 0.5
    assert figures["prompt_following"]["strict"]["mean"] == 1.0
    changed = evaluate_rankings(Changer(), dataset, benchmark="editreward_compass")["dimensions"]
    assert changed["consistency"]["strict"]["mean"] == pytest.approx(2 / 5)  # another preference, the same tie
    assert changed["prompt_following"]["strict"]["mean"] == 0.0


# Source, green of A and of B, chosen. The keeper is right in the first, wrong in the second, and ties in the third
MMRB2 = [("emu-edit", (0, 100), "A"), ("emu-edit", (0, 100), "B"), ("hq-edit", (40, 40), "B")]


@pytest.fixture
def mmrb2(tmp_path):
    """Writes the file that the benchmark builds, next to its images, one pair changed."""

    def write(**changes):
        pairs = []
        for number, (source, greens, chosen) in enumerate(MMRB2):
            names = [f"input_images/{number}.png", f"images/{number}_a.png", f"images/{number}_b.png"]
            for name, green in zip(names, (0, *greens), strict=True):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                flat(green).save(tmp_path / name)
            responses = {
                f"response_{side}": {"model": side, "response_content": [["text", "Here."], ["image", name]]}
                for side, name in zip("ab", names[1:], strict=True)
            }
            prompt = [["text", "Look:"], ["image", names[0]], ["text", f"Edit {number}."]]
            pairs.append({"prompt_content": prompt, "prompt_source": source, "chosen": chosen, **responses})
        pairs[0] |= changes
        (tmp_path / "edit.json").write_text(json.dumps({"pairs": pairs}))
        return tmp_path / "edit.json"

    return write


def test_mmrb2_compares_with_experts(mmrb2, caplog):
    dataset = load_rankings("mmrb2", mmrb2())
    assert dataset["prompt"][:] == [f"Look: Edit {number}." for number in range(3)] and not caplog.text
    assert dataset["ranking"][:] == [[0, 1], [1, 0], [1, 0]]  # as chosen
    figures = evaluate_rankings(Keeper(), dataset, benchmark="mmrb2")["dimensions"]["overall"]
    assert (figures["strict"]["mean"], figures["geq"]["mean"], figures["num_ties"]) == (1 / 3, 2 / 3, 1)
    assert figures["task_types"]["hq-edit"] == {"strict": 0.0, "geq": 1.0, "num_rows": 1}
    changed = evaluate_rankings(Changer(), dataset, benchmark="mmrb2")["dimensions"]["overall"]
    assert changed["strict"]["mean"] == 1 / 3  # the other pair of the first two
    several = [["image", "input_images/0.png"]] * 2
    assert len(load_rankings("mmrb2", mmrb2(prompt_content=several))) == 2
    assert "1 of 3 pairs" in caplog.text and "several images" in caplog.text


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"chosen": "C"}, "`chosen` of pair 0 .* is 'C', not A or B"),
        ({"prompt_content": [["image", "../elsewhere.png"]]}, "elsewhere"),
    ],
)
def test_a_broken_pair_of_mmrb2(mmrb2, change, token, tmp_path):
    with pytest.raises(ValueError, match=token):
        load_rankings("mmrb2", mmrb2(**change))
    with pytest.raises(FileNotFoundError, match="Build MMRB2"):
        load_rankings("mmrb2", tmp_path / "missing.json")
    (tmp_path / "edit.json").write_text(json.dumps({"pairs": [{"id": "a", "chosen": "A"}]}))  # without prompts
    with pytest.raises(ValueError, match="no pairs of MMRB2 with their prompts"):
        load_rankings("mmrb2", tmp_path / "edit.json")


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"label": "Tie"}, "preference or tie"),
        ({"dimension": "Vc"}, "Vc"),
        ({"loser": "../elsewhere.png"}, "elsewhere"),
    ],
)
def test_a_broken_row_or_another_benchmark_is_named(compass, vc_reward, change, token):
    for benchmark, column in (("editreward_compass", "label"), ("edit_reward", "input_image"), ("edits", "reference")):
        with pytest.raises(ValueError, match=rf"no columns .*'{column}'.* only"):
            load_rankings(benchmark, vc_reward)
    with pytest.raises(ValueError, match="'vc'.* vc_reward, .* mmrb2"):
        load_rankings("vc", vc_reward)
    with pytest.raises(ValueError, match=token):
        evaluate_rankings(Keeper(), load_rankings("editreward_compass", compass(**change)))


def greens_of(body):
    return [image.getpixel((0, 0))[1] for image in pictures_of(body)[0]]


@pytest.mark.parametrize(
    "text", ["prompt_id: a\nversion: b\nuser_prompt: []\n", "- system_prompt\n", "system_prompt\n"]
)
def test_a_template_of_another_kind(text, tmp_path):
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(ValueError, match="`system_prompt`|`prompt_id`"):
        ComparingJudge(ChatEndpoint("http://127.0.0.1:1/v1", "pvc"), tmp_path / "other.yaml")


@pytest.mark.parametrize("is_fair", [True, False])
def test_judges_in_one_table(vc_reward, tmp_path, is_fair):
    """One that answers Yes or No about each edit, and one that is shown both, by two runs of the command."""
    template = tmp_path / "v1.yaml"
    blocks = [{"text": "Keep the rest.\nInstruction: {{ instruction }}\n"}, {"image": {"source": "input_image"}}]
    for index, name in enumerate("AB"):
        blocks += [{"text": f"{name}:\n"}, {"image": {"source": "edited_images", "index": index}}]
    prompt = {"prompt_id": "pairwise", "version": "v1", "system_prompt": "Look closely.", "user_prompt": blocks}
    template.write_text(yaml.safe_dump(prompt))

    def say(body):
        source, first, second = greens_of(body)
        assert source == 0 and "{{" not in json.dumps(body["messages"][-1]["content"][0])
        if first == second:  # a tie is wrong where people prefer one
            return '```json\n{"winner": "Tie"}\n```'
        if first == 200:
            return "I cannot tell."  # never readable, so it is wrong, and counted
        return json.dumps({"winner": "Image A" if (first < second) == is_fair else "Image B"})

    common = ["evaluate", "judge", "--benchmark", "vc_reward", "--dataset_name", str(vc_reward)]
    common += ["--output_dir", str(tmp_path / "results")]
    with ChatServer(say, models=["pvc"]) as server:
        options = ["--judge_url", server.url, "--judge_model", "pvc", "--template", str(template)]
        assert not main([*common, *options])
        assert len(server.requests) == 4 + 3  # the unreadable one four times
        temperatures = [body["temperature"] for body in server.requests if greens_of(body)[1] == 200]
        assert sorted(temperatures) == [0.0, 0.7, 0.7, 0.7]
        assert not main([*common, *options])  # nothing is asked again
        assert len(server.requests) == 4 + 3
    with JudgeServer(lambda first, second, question: (100 - second.getpixel((0, 0))[1]) / 100) as server:
        assert not main([*common, "--judge_url", server.url, "--judge_model", "judge"])
    compared, alone = json.loads((tmp_path / "results" / "results.json").read_text())
    expected = {True: (0.5, 0.75), False: (0.0, 0.25)}[is_fair]
    assert (consistency(compared)["strict"]["mean"], consistency(compared)["geq"]["mean"]) == expected
    assert compared["num_unanswered"] == 1 and consistency(alone)["strict"]["mean"] == 0.5
    rows = re.findall(r"^\| (pvc|judge) \| ([^|]+) \|", (tmp_path / "results" / "results.md").read_text(), re.M)
    assert [name for name, _ in rows] == ["pvc", "judge"] and rows[0][1].startswith("pairwise v1 (")
