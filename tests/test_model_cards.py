# SPDX-License-Identifier: Apache-2.0
"""Files of a trained model, and its card: metadata, what it says and leaves out, and the code in it."""

import ast
import dataclasses
import json
import os
import re
import runpy
import shlex
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, hf_hub_download
from peft import LoraConfig
from PIL import Image
from transformers import TrainerCallback

from hub_server import HubServer
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.commands.merge import MergeArguments, merge
from paco_trl.commands.parser import CommandParser
from paco_trl.commands.serve import ServeArguments
from paco_trl.data import split_grid
from paco_trl.hub import licenses
from paco_trl.hub.card_data import (
    EvaluationRow,
    ImageModelCardData,
    JudgeCardData,
    LoRA,
    RewardRow,
    load_card_data,
    save_card_data,
)
from paco_trl.hub.cards import metadata, render_card, replace_repo_id
from paco_trl.hub.files import PIPELINE_ADAPTER
from paco_trl.hub.licenses import License, base_license, read_license
from paco_trl.rewards import ClipTReward, ConsistencyReward, ServedJudge, redness_reward
from paco_trl.rollout import FluxFamily
from paco_trl.trainer.model_cards import cached_commit, latest_pictures, reward_rows, training_seconds
from paco_trl.utils.model_files import CARD_DATA_FILE
from test_paco_reward_trainer import colours
from testing_utils import SMALL_RUN


ROOT = Path(__file__).resolve().parent.parent
ZOO = {
    "PaCo-FLUX.1-dev": "paco-flux.1-dev",
    "PaCo-FLUX.1-Kontext-dev": "paco-flux.1-kontext-dev",
    "PaCo-QwenImage-Edit": "paco-qwen-image-edit",
    "PaCo-Reward-7B": "paco-reward-7b",
    "PaCo-Reward-7B-Lora": "paco-reward-7b-lora",
}
TOKEN = "hf_this_must_not_be_seen"
FLUX, QWEN = "black-forest-labs/FLUX.1-dev", "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.fixture(scope="module")
def trained(tiny_flux, tiny_clip, prompts, tmp_path_factory):
    """A trainer after two rounds, with an average of the weights, two rewards, an evaluation and its pictures."""
    folder = tmp_path_factory.mktemp("cards") / "foxes"
    trainer = PaCoGRPOTrainer(
        model=str(tiny_flux),
        reward_funcs=[ClipTReward(tiny_clip), redness_reward],
        args=PaCoGRPOConfig(**SMALL_RUN | {
            "output_dir": str(folder), "num_inference_steps_eval": 2, "max_steps": 4, "learning_rate": 0.1,
            "epsilon": 0.1, "ema_decay": 0.5, "reward_weights": [1.0, 0.25], "save_strategy": "steps", "save_steps": 4,
            "hub_token": TOKEN, "eval_strategy": "steps", "eval_steps": 2, "log_completions": True,
            "plot_curves": True,
        }),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(3)),
        peft_config=LoraConfig(r=4, lora_alpha=32, init_lora_weights="gaussian"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture(scope="module")
def judge(tiny_qwen, tmp_path_factory):
    """A trainer of a judge after two steps, with an evaluation."""
    trainer = make_judge(tiny_qwen, tmp_path_factory.mktemp("cards") / "judge", eval_dataset=colours(8, 0))
    trainer.train()
    trainer.save_model()
    return trainer


def make_judge(model: Path, folder: Path, eval_dataset=None, **kwargs) -> PaCoRewardTrainer:
    args = PaCoRewardConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1, max_steps=2,
        per_device_train_batch_size=4, disable_tqdm=True, hub_token=TOKEN, **kwargs,
    )  # fmt: skip
    return PaCoRewardTrainer(str(model), args, colours(8, 0), eval_dataset)


def card_of(trainer, *args, **kwargs) -> ModelCard:
    return render_card(trainer._model_card(*args, **kwargs))


def text_of(trainer) -> str:
    return (Path(trainer.args.output_dir) / "README.md").read_text(encoding="utf-8")


def code_of(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


class TestMetadata:
    @pytest.mark.slow
    def test_of_an_adapter_through_the_hubs_own_client(self, trained):
        card = ModelCard.load(Path(trained.args.output_dir) / "README.md")
        data = card.data
        assert (data.library_name, data.pipeline_tag) == ("diffusers", "text-to-image")
        assert {"lora", "paco-trl", "paco-grpo"} <= set(data.tags) and data.tags == sorted(data.tags)
        logged = next(e for e in reversed(trained.state.log_history) if "eval_reward" in e)
        values = {result.metric_type: result.metric_value for result in data.eval_results}
        # To the last digit
        assert values == {name: logged[f"eval_rewards/{name}/mean"] for name in ("clip_t", "redness_reward")}
        assert data.model_name == "foxes" == card.data.to_dict()["model-index"][0]["name"]
        # A folder of this machine is no base model, and its licence is not known
        assert data.base_model is None and data.get("base_model_relation") is None and data.license is None
        assert data.datasets is None
        # What is read back is what was written
        assert ModelCard(str(card)).data.to_dict() == data.to_dict()

    def test_of_a_judge(self, judge):
        data = ModelCard.load(Path(judge.args.output_dir) / "README.md").data
        assert (data.library_name, data.pipeline_tag) == ("peft", "image-text-to-text")
        values = {result.metric_type: result.metric_value for result in data.eval_results}
        evaluation = judge.evaluations["eval"]
        assert values == {
            "accuracy": evaluation["decision_accuracy"], "roc_auc": evaluation["auroc"], "ece": evaluation["ece"]
        }  # fmt: skip

    def test_of_a_continued_adapter(self, trained, make_trainer, tiny_flux):
        folder = Path(trained.args.output_dir)
        trainer = make_trainer(peft_config=str(folder))
        trainer.create_model_card()
        card = load_card_data(trainer.args.output_dir)
        assert card.base_model == tiny_flux.name != folder.name and card.lora.continued_from == folder.name

    def test_of_a_base_model_of_the_hub(self, make_trainer, tmp_path):
        trainer = make_trainer(hub_model_id="foxes")
        assert card_of(trainer).data.license is None
        trainer.pipeline.register_to_config(_name_or_path=FLUX)
        trainer.hub_model_id = "user/foxes"  # as Trainer sets it when the repository is there
        card = card_of(trainer, license=None, tags="mine", dataset_name="user/prompts")
        data = card.data
        assert (data.base_model, data.get("base_model_relation")) == (FLUX, "adapter")
        assert (data.license, data.license_name) == ("other", "flux-1-dev-non-commercial-license")
        assert data.license_link == f"https://huggingface.co/{FLUX}/blob/main/LICENSE.md"
        assert data.datasets == ["user/prompts"] and "mine" in data.tags
        assert "[user/prompts](https://huggingface.co/datasets/user/prompts)" in card.text
        assert f'from_pretrained("{FLUX}"' in card.text and 'load_lora_weights("user/foxes")' in card.text
        assert f"]({data.license_link})" in card.text and "@misc{flux2024" in card.text
        # A file of this machine is told of by its name, and is no dataset of the Hub
        other = card_of(trainer, license="cc-by-nc-4.0", dataset_name="/home/me/prompts.jsonl")
        assert other.data.license == "cc-by-nc-4.0" and other.data.license_name is None
        assert other.data.datasets is None and "\n- prompts.jsonl\n" in other.text and "/home/me" not in str(other)

    @pytest.mark.parametrize(
        ("card", "library", "relation"),
        [
            (ImageModelCardData("a", "u/a", FLUX), "diffusers", "adapter"),
            (
                ImageModelCardData("a", "u/a", FLUX, weights="transformer", transformer_class="X"),
                "diffusers",
                "finetune",
            ),
            (JudgeCardData("a", "u/a", QWEN), "peft", "adapter"),
            (JudgeCardData("a", "u/a", QWEN, weights="merged", merged_adapter="u/b"), "transformers", "finetune"),
        ],
    )
    def test_library_and_relation(self, card, library, relation):
        data = metadata(card)
        assert (data.library_name, data.get("base_model_relation")) == (library, relation)
        assert ("lora" in data.tags) == (relation == "adapter")
        local = metadata(dataclasses.replace(card, base_model="/models/flux"))
        assert local.base_model is None and local.get("base_model_relation") is None


class TestGallery:
    """The images that the Hub shows next to the card."""

    def test_images_after_training_with_their_prompts(self, trained, prompts):
        folder = Path(trained.args.output_dir)
        widget = ModelCard.load(folder / "README.md").data.widget
        expected = prompts["prompt"][:3]  # of the evaluation
        assert [each["text"] for each in widget] == expected
        assert [each["output"]["url"] for each in widget] == [f"images/{number}.png" for number in range(3)]
        saved = [np.asarray(Image.open(folder / each["output"]["url"])) for each in widget]
        before = torch.load(folder / "evaluation" / "eval_baseline.pt", weights_only=True)["pictures"][0]
        assert saved[0].shape == (64, 64, 3) and (saved[0] != before.numpy()).any()


class TestSettings:
    """`paco_trl.json`, from which a card is rendered again."""

    @pytest.mark.parametrize("kind", ["trained", "judge"])
    def test_the_card_is_rendered_from_it(self, kind, request):
        trainer = request.getfixturevalue(kind)
        folder = Path(trainer.args.output_dir)
        card = load_card_data(folder)
        assert str(render_card(card)) == text_of(trainer)
        expected = trainer._model_card()
        assert card == dataclasses.replace(expected, base_model=card.base_model)
        text = (folder / CARD_DATA_FILE).read_text()
        for secret in (TOKEN, str(folder.parent), expected.base_model):
            assert secret not in text

    def test_no_path_and_one_error(self, tmp_path):
        card = ImageModelCardData(
            "a", "u/a", "/home/me/flux", "c0ffee", merged_adapter="/home/me/fox", license=License("mit")
        )
        save_card_data(card, tmp_path)
        assert "/home/me" not in (tmp_path / CARD_DATA_FILE).read_text()
        assert load_card_data(tmp_path) == dataclasses.replace(card, base_model="flux", merged_adapter="fox")
        # What an earlier version left empty
        empty = {"kind": "image model", "title": "a", "repo_id": "u/a", "base_model": "flux"}
        (tmp_path / CARD_DATA_FILE).write_text(json.dumps({**empty, "settings": {"panel_template": None}}))
        assert load_card_data(tmp_path).settings == {}
        for broken in ("{", "[]", '{"kind": "poem"}', '{"kind": "judge", "colour": "red"}'):
            (tmp_path / CARD_DATA_FILE).write_text(broken)
            with pytest.raises(ValueError, match=CARD_DATA_FILE):
                load_card_data(tmp_path)
        (tmp_path / CARD_DATA_FILE).unlink()
        assert load_card_data(tmp_path) is None

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *((name, "x(); import os") for name in ("family", "pipeline_class", "transformer_class", "dtype", "device")),
            ("call", {"x=1); import os; f(y": 1}), ("call", {"height": {"a": 1}}), ("call", {"sizes": [1, [2]]}),
            ("layout", [2]), ("layout", [0, 2]), ("layout", ["2", 2]),
        ],
    )  # fmt: skip
    def test_what_becomes_code_is_names_and_numbers(self, tmp_path, name, value):
        plain = {"kind": "image model", "title": "a", "repo_id": "u/a", "base_model": "flux"}
        fine = {"family": "FluxFamily", "call": {"height": 64, "sigmas": [1.0, 0.5]}, "layout": [2, 2]}
        (tmp_path / CARD_DATA_FILE).write_text(json.dumps(plain | fine))
        assert load_card_data(tmp_path).call == fine["call"]
        (tmp_path / CARD_DATA_FILE).write_text(json.dumps(plain | fine | {name: value}))
        with pytest.raises(ValueError, match=f"`{name}`"):
            load_card_data(tmp_path)

    def test_commit_of_the_base_model(self, tmp_path):
        with HubServer({TOKEN: "tester"}) as hub, hub.connected(tmp_path / "cache", TOKEN):
            repo = hub.add_repo("user/base", {"model_index.json": b"{}"})
            assert cached_commit("user/base", None) is None
            path = hf_hub_download("user/base", "model_index.json")
            assert cached_commit("user/base", None) == Path(path).parent.name and repo.sha_of("main") in path
        assert cached_commit(str(tmp_path), None) is None

    CARDS = (
        ImageModelCardData("title", "run", FLUX, pipeline_class="FluxPipeline"),
        ImageModelCardData("title", "run", FLUX, pipeline_class="FluxPipeline", formats=["peft"]),
        ImageModelCardData("title", "run", FLUX, pipeline_class="FluxPipeline", weights="transformer",
                       transformer_class="FluxTransformer2DModel"),
        JudgeCardData("title", "run", QWEN, weights="merged", merged_adapter="u/b"),
        JudgeCardData("title", "run", QWEN, lora=LoRA(4, 8)),
    )  # fmt: skip

    @pytest.mark.parametrize("card", CARDS)
    def test_of_another_repository(self, card):
        # The base model, in a directory of the same name, the title, and text that speaks of it remain
        same_words = {"title": "run", "base_model": "/models/run", "datasets": ["run"], "hardware": '"run" run'}
        written = '\nTo run it as in `run`, a run is run: vllm serve run or Class.from_pretrained("run").\n'
        for given in (card, dataclasses.replace(card, **same_words)):
            saved, there = (str(render_card(dataclasses.replace(given, repo_id=name))) for name in ("run", "u/run"))
            assert replace_repo_id(given, "u/run", saved) == there != saved
            # What was added later stays
            assert replace_repo_id(given, "u/run", f"{saved}{written}") == f"{there}{written}"

    @pytest.mark.parametrize("card", CARDS)
    def test_of_a_card_of_another_version(self, card):
        """Its lines are not those of today."""
        saved, there = (str(render_card(dataclasses.replace(card, repo_id=name))) for name in ("run", "u/run"))
        saved, there = (re.sub(r"^(.*\brun\b.*)$", r"\1  # old", text, flags=re.M) for text in (saved, there))
        assert "  # old" in saved
        assert replace_repo_id(card, "u/run", f'{saved}\n```python\n# run it\nrun("runs")\n```\n') == (
            f'{there}\n```python\n# run it\nrun("runs")\n```\n'
        )


class TestWhatItSays:
    def test_nothing_of_this_machine(self, trained, judge, tiny_flux, tiny_qwen, tiny_clip):
        for trainer, model in ((trained, tiny_flux), (judge, tiny_qwen)):
            text = text_of(trainer)
            pictures = re.findall(r"!\[.*\]\((.*)\)", text)
            assert len(pictures) >= 2 and all((Path(trainer.args.output_dir) / name).is_file() for name in pictures)
            assert trainer.args.hub_token == TOKEN  # it is there to be found
            assert model.name in text
            for secret in (TOKEN, str(model.parent), str(tiny_clip.parent), str(Path(trainer.args.output_dir).parent)):
                assert secret not in text
            assert not re.search(r"\b(None|nan|undefined)\b", text.replace("is None", ""))
            prose = re.sub(r"```.*?```", "code", text, flags=re.S)
            assert not re.search(r"\b(True|False)\b", prose)
            assert "\n\n\n" not in text and "|  |" not in text and "{{" not in prose and "{%" not in prose
            assert not re.search(r"^#+ .*\n\n## ", prose, flags=re.M)  # a head with nothing below it

    def test_evaluation_with_interval(self, trained):
        text = text_of(trained)
        assert "| reward | model | before | after | difference, 95 % |\n|---|---|---|---|---|\n" in text
        entry = next(e for e in reversed(trained.state.log_history) if "eval_reward" in e)
        values = {name: f"{entry[f'eval_rewards/clip_t/{name}']:.4f}" for name in ("baseline", "mean")}
        low, high = (f"{entry[f'eval_rewards/clip_t/gain_ci_{end}']:.4f}" for end in ("low", "high"))
        assert f"| {values['baseline']} | {values['mean']} | {low} to {high} |\n" in text.split("| clip_t | ")[1]
        assert values["baseline"] != values["mean"]

    def test_the_models_of_the_judges_reach_the_card(self, make_trainer, tiny_qwen, tiny_clip):
        served = ServedJudge("http://10.1.2.3:8000/v1", "/models/paco-reward")

        def custom(prompts, completions, **kwargs):
            return [0.0] * len(completions)

        custom.model_name = "/home/me/models/own"
        assert ConsistencyReward(PaCoReward.from_pretrained(tiny_qwen, device="cpu")).model_name == tiny_qwen.name
        nameless = SimpleNamespace(name="http://10.1.2.3:8000/v1", score=lambda images, prompts: [0.5] * len(images))
        assert ConsistencyReward(nameless).model_name is None
        text = str(card_of(make_trainer(reward_funcs=[ConsistencyReward(served, question="theme"), custom])))
        assert "| consistency | 1 | paco-reward |" in text and "10.1.2.3" not in text
        assert "| custom | 1 | own |" in text and "/home/me" not in text

    @pytest.mark.slow
    def test_time_goes_on_after_a_resume(self, make_trainer, tmp_path):
        class LongAgo(TrainerCallback):
            """As if the first part had begun 5,000 seconds ago."""

            def on_step_begin(self, args, state, control, **kwargs):
                trainer._started = began - 5000

        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "output_dir": str(tmp_path / "run")}
        trainer = make_trainer(**settings, callbacks=[LongAgo()])
        began = time.monotonic()
        trainer.train()
        assert 5000 < training_seconds(trainer.state, step=2) < training_seconds(trainer.state) < 5060
        shutil.rmtree(tmp_path / "run" / "checkpoint-4")
        resumed = make_trainer(**settings)
        resumed.train(resume_from_checkpoint=True)
        assert training_seconds(trainer.state, step=2) < training_seconds(resumed.state) < 5060
        said = "training time, with generation, scoring, evaluation and checkpoints: 1 h 2"
        assert said in str(card_of(resumed))
        # Trained anew, it begins at 0
        resumed.args.overwrite_output_dir = True
        resumed.train()
        assert training_seconds(resumed.state) < 60

    def test_raw_weights(self, trained, make_trainer):
        text = str(card_of(trained))
        assert "## Evaluation" in text and "(evaluation.png)" in text and "not their moving average" not in text
        raw = card_of(trained, use_ema=False)
        assert "| `saved_weights` | those of the last step, not their moving average" in raw.text
        assert "## Evaluation" not in raw.text and "evaluation.png" not in raw.text
        assert raw.data.eval_results is None
        assert set(latest_pictures(trained.args, 4)) - set(latest_pictures(trained.args, 4, use_ema=False)) == {
            "evaluation.png"
        }
        # Without an average there is nothing else that could be saved
        plain = make_trainer(ema_decay=None)
        assert str(card_of(plain, use_ema=False)) == str(card_of(plain))
        assert "saved_weights" not in str(card_of(plain))

    @pytest.mark.parametrize("kind", [ImageModelCardData, JudgeCardData])
    def test_sections_without_content_are_left_out(self, kind):
        is_judge = kind is JudgeCardData
        empty = kind("a", "u/a", "/models/base")
        evaluations = {"eval": {"pairs": 2, "step": 4, "ece": 0.5, "decision_accuracy": 0.5}}
        full = dataclasses.replace(
            empty, lora=LoRA(4, 8, ["to_q"], "u/earlier"), license=License("mit"), datasets=["u/data"],
            hardware="2 x GPU", seconds=90.0, versions={"torch": "2"}, settings={"optimizer_steps": 4},
            evaluations=evaluations if is_judge else [EvaluationRow("r", 0.5, step=4)],
            pictures=["eval_calibration.png"] if is_judge else ["curves.png"],
            **({} if is_judge else {"method": "PaCo-GRPO", "rewards": [RewardRow("r", 1.0)]}),
        )  # fmt: skip
        texts = {name: str(render_card(card)) for name, card in (("empty", empty), ("full", full))}
        for part in (
            "## Evaluation", "## Training", "### Data", "### Hardware and time", "### Versions", "![", "| LoRA |",
            "license: mit", "continued from u/earlier", "model-index",
        ):  # fmt: skip
            assert part in texts["full"] and part not in texts["empty"], part
        for part in ("## Use", "## Limits", "## License", "## Citation"):
            assert part in texts["full"] and part in texts["empty"], part
        assert "see there for the license" in texts["empty"] and "see there for the license" not in texts["full"]
        for text in texts.values():
            assert "None" not in text and "\n\n\n" not in text and "|  |" not in text
            assert not re.search(r"^#+ .*\n\n#+ ", text, flags=re.M)
        only = str(render_card(dataclasses.replace(empty, seconds=90.0)))
        assert "### Hardware and time\n\n- " in only and "GPU\n" not in only.split("## Limits")[0].split("###")[1]
        # A merged model is known by its adapter alone
        weights = "merged" if is_judge else "transformer"
        merged = kind("a", "u/a", FLUX, weights=weights, merged_adapter="/home/me/fox", lora=LoRA(4, 8))
        merged = str(render_card(merged))
        assert "fox merged into it" in merged and "/home/me" not in merged and "## Training" not in merged
        assert "## Adapter\n\n| setting | value |\n|---|---|\n| LoRA | rank 4, alpha 8 |" in merged
        assert "load_lora_weights" not in merged and "--enable-lora" not in merged


class TestUse:
    @pytest.mark.filterwarnings("error:.*torch_dtype")
    def test_the_code_of_an_adapter_runs_both_ways(self, trained, tiny_flux, prompts, tmp_path_factory, monkeypatch):
        """As it is, where training was started: the base model and the adapter are directories below."""
        monkeypatch.chdir(tmp_path_factory.getbasetemp())
        text = str(card_of(trained))
        assert str(tmp_path_factory.getbasetemp()) not in text
        diffusers, peft, call = code_of(text)
        assert '.to("cpu")' in diffusers  # where it was trained
        for argument in ("height=64, width=64", "num_inference_steps=2", "guidance_scale=3.5"):
            assert argument in call
        call = f"torch.manual_seed(0)\n{call}"
        images = []
        for lines in (diffusers, "\n".join(diffusers.splitlines()[:-1]) + "\n" + peft):
            names = {}
            exec(lines + call, names)
            images.append(names["image"])
            assert names["prompt"] == prompts[0]["prompt"] and names["image"].size == (64, 64)
            panels = split_grid(names["image"], 2, 2)
            assert [panel.tobytes() for panel in names["panels"]] == [panel.tobytes() for panel in panels]
        assert "load_lora_weights" in diffusers and "PeftModel" in peft
        assert images[0].tobytes() == images[1].tobytes()
        names = {}
        exec("\n".join(diffusers.splitlines()[:-1]) + "\n" + call, names)
        assert names["image"].tobytes() != images[0].tobytes()  # the base model

    @pytest.mark.parametrize("prompt", ['A "fox"  \\ in\tthe\n\n```snow\'s ' * 9, "\u2028 Zoë 狐 " * 30, "x" * 250])
    def test_the_prompt_of_the_code_is_that_of_training(self, prompt):
        card = ImageModelCardData("a", "u/a", FLUX, prompt=prompt, layout=[1, 2])
        code = str(render_card(card)).split("```python\nprompt = ")[1].split("\nimage = ")[0]
        assert ast.literal_eval(code) == prompt
        assert max(map(len, code.splitlines())) < 200
        assert "rows, cols = 1, 2\n" in str(render_card(card))
        assert "panels" not in code_of(str(render_card(dataclasses.replace(card, layout=[1, 1]))))[-1]

    def test_both_codes_of_a_judge_give_the_same_score(self, tiny_qwen, tmp_path, monkeypatch, caplog):
        """That of an adapter, and of the model that it is merged into."""
        monkeypatch.chdir(tmp_path)
        trainer = make_judge(tiny_qwen, Path("judge"), learning_rate=1e-2)
        trainer.train()
        trainer.save_model()
        merge(MergeArguments("judge", "merged", str(tiny_qwen)))
        for name, size in (("spring", (57, 90)), ("summer", (130, 61))):  # no whole patches
            Image.effect_noise(size, 80).save(f"{name}.png")

        def score_of(folder: str) -> float:
            pair = [("spring.png", "summer.png")]
            return PaCoReward.from_pretrained(folder).score(pair, "Same colour?")[0]

        def card_scores_of(folder: str) -> list[float]:
            ours, plain, _ = code_of(Path(folder, "README.md").read_text(encoding="utf-8"))
            assert "paco_trl" not in plain and ("peft" in plain) == (folder == "judge")
            names = {}
            exec(ours.replace("judge.score", "scores = judge.score"), names)
            exec(plain.replace(f'"{tiny_qwen.name}"', f'"{tiny_qwen}"'), names)
            return [*names["scores"], names["score"]]

        assert abs(score_of("judge") - score_of(str(tiny_qwen))) > 1e-3
        for folder in ("judge", "merged"):
            assert card_scores_of(folder) == pytest.approx([score_of(folder)] * 2, abs=1e-5)

        readme = Path("judge", "README.md").read_text(encoding="utf-8")
        assert 'It was trained on one question, "Same colour?"\n' in readme
        # The question of all of its pairs is that of the card, and of a reward that is given no other
        for folder, question in (("judge", "Same colour?"), ("merged", "Same colour?"), (str(tiny_qwen), "theme")):
            reward = ConsistencyReward(folder)
            assert reward.question == question and reward.needed_columns == ("theme",) * (question == "theme")
            given = ConsistencyReward(reward.judge, question="Same style, too?")
            assert given.question == "Same style, too?"
            warnings = [record.message for record in caplog.records if "'Same style, too?'" in record.message]
            assert len(warnings) == (question != "theme")
            caplog.clear()
        of_themes = dataclasses.replace(trainer._model_card(), settings={})
        text = str(render_card(of_themes))
        assert 'question = theme_question("A fox' in code_of(text)[0] and "one question" not in text

    def test_the_command_that_serves_it(self, judge):
        text = text_of(judge)
        *_, command = code_of(text, "bash")
        program, stage, *words = shlex.split(command)
        (args,) = CommandParser(ServeArguments).parse_args_and_config(words)
        assert [program, stage, args.model_name_or_path] == ["paco-trl", "serve", "judge"]
        assert f"model=\"{args.served_model_name}\", question='Same colour?')" in text


class TestLicenses:
    def test_of_the_papers_models_without_a_request(self):
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert base_license(QWEN) == base_license("Qwen/Qwen-Image-Edit") == License("apache-2.0")
        assert base_license("black-forest-labs/FLUX.1-Kontext-dev").name == "flux-1-dev-non-commercial-license"
        license = base_license("Qwen/Qwen2.5-VL-3B-Instruct")
        assert (license.identifier, license.name) == ("other", "qwen-research")
        cached = "/cache/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots/0123456789abcdef"
        assert base_license(cached) == License("apache-2.0")
        assert base_license("org/unknown") is None and base_license("FluxPipeline") is None

    def test_of_a_folder(self, make_trainer, tiny_flux, tmp_path):
        assert base_license(str(tiny_flux)) is None
        folder = tmp_path / "models--org--base" / "snapshots" / "0123456789abcdef"
        shutil.copytree(tiny_flux, folder)
        readme = "---\nlicense: other\nlicense_name: own\nlicense_link: {}\n---\n"
        for link, found in (("LICENSE.md", "/org/base/blob/main/LICENSE.md"), ("https://a.b/c", "https://a.b/c")):
            (folder / "README.md").write_text(readme.format(link))
            licenses._read_license_once.cache_clear()
            license = base_license(str(folder))
            assert (license.identifier, license.name) == ("other", "own") and license.link.endswith(found)
        data = card_of(make_trainer(model=str(folder))).data
        assert (data.license, data.base_model) == ("other", "org/base")
        (folder / "README.md").write_text("---\nlicense: [a, b]\n---\n")
        licenses._read_license_once.cache_clear()
        assert base_license(str(folder)) is None
        with pytest.raises(ValueError, match="names no license"):
            read_license(str(folder))

    def test_the_hub_is_asked_only_on_demand_and_once(self, tmp_path):
        licenses._read_license_once.cache_clear()
        with HubServer({TOKEN: "tester"}) as hub, hub.connected(tmp_path / "cache"):
            card = "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE.md\n---\n"
            hub.add_repo("org/base", {"README.md": card.encode()})
            assert base_license("org/base") is None and hub.requests == []
            known = License("other", "own", f"{hub.url}/org/base/blob/main/LICENSE.md")
            hub.stop()
            assert base_license("org/base", online=True) is None  # nothing is invented
            hub.start()
            for _ in range(2):
                assert base_license("org/base", online=True) == known
                assert base_license("org/nothing", online=True) is None
            assert hub.requests.count(("GET", "/api/models/org/base")) == 1
        licenses._read_license_once.cache_clear()


load_reference_card = runpy.run_path(str(ROOT / "model_cards" / "render.py"))["load_reference_card"]


class TestReferenceCards:
    @pytest.fixture(params=ZOO)
    def source(self, request) -> Path:
        return ROOT / "model_cards" / f"{request.param}.yaml"

    def test_the_file_is_what_is_rendered(self, source, tmp_path):
        assert f"({source.stem}.md)" in (ROOT / "model_cards" / "README.md").read_text()
        card = load_reference_card(source)
        rendered = render_card(card)
        rendered.save(tmp_path / "card.md")
        committed = source.with_suffix(".md").read_bytes()
        assert (tmp_path / "card.md").read_bytes() == committed, "run `python model_cards/render.py`"
        assert "published figures: paco_trl has neither trained nor measured it" in rendered.text
        assert "## Evaluation" not in rendered.text and "paco-trl" not in rendered.data.tags
        cells = {str(cell) for table in card.published["tables"] for row in table["rows"] for cell in row}
        for result in rendered.data.eval_results:
            assert f"{result.metric_value:.3f}" in cells
            assert result.source_name.startswith("Published figures") and "2512.04784" in result.source_url
        assert rendered.data.license == ("other" if "FLUX" in source.stem else "apache-2.0")
        recipe = ZOO[source.stem]
        assert card.published["config"] == f"paco_trl/recipes/{recipe}.yaml"
        assert f"--config {recipe} " in card.published["command"]

    def test_it_agrees_with_the_config(self, source):
        card = load_reference_card(source)
        config = yaml.safe_load((ROOT / card.published["config"]).read_text())
        stated = card.settings
        shared = {name for name in stated if name in config}
        assert len(shared) >= 6, shared
        assert {name: stated[name] for name in shared} == {name: config[name] for name in shared}
        # What has another form there
        assert config["model_name_or_path"] == card.base_model
        assert (config["lora_r"], config["lora_alpha"]) == (card.lora.rank, card.lora.alpha)
        assert (stated.get("precision") in (None, "bfloat16")) and config["bf16"]
        if isinstance(card, JudgeCardData):
            assert card.datasets == [config["dataset_name"]]
            return
        if card.lora.layers is not None:
            assert card.lora.layers == config["lora_target_modules"]
        assert stated["inference_size"] == [config["height"], config["width"]]
        scale = config["resolution_scale"]
        assert stated["training_size"] == [config["height"] * scale, config["width"] * scale]
        assert [reward.name for reward in card.rewards] == list(config["rewards"])
        assert card.rewards[0].model == config["judge_model"]
        assert config["guidance_scale"] in card.call.values()


class TestFiles:
    def test_pictures_of_an_earlier_state_go(self, trained, tmp_path):
        trained.save_model(tmp_path)
        assert (tmp_path / "evaluation.png").exists()
        trained.save_model(tmp_path, use_ema=False)
        assert (tmp_path / "curves.png").exists()
        assert not (tmp_path / "evaluation.png").exists()  # the card does not tell of it

    def test_published_files(self, trained):
        folder = Path(trained.args.output_dir)
        published = [path for pattern in PIPELINE_ADAPTER for path in folder.glob(pattern)]
        assert len(published) == 11 and {path.suffix for path in published} == {".json", ".safetensors", ".md", ".png"}
        names = {"contact_sheet.png", "curves.png", "evaluation.png", *(f"{n}.png" for n in range(3))}
        assert names == {path.name for path in published if path.suffix == ".png"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "less than a second"), (20, "20 s"), (90, "2 min"), (21600, "6 h")]
)
def test_time_of_a_training(seconds, text):
    card = ImageModelCardData("a", "u/a", "flux", seconds=seconds, hardware="a CPU", license=License("mit"))
    assert f": {text}\n" in str(render_card(card))


def test_a_card_names_the_rewards_of_before_a_resume():
    log = [
        {"step": 1, "reward": 0.5, "rewards/bright/mean": 0.5, "rewards/bright/std": 0.1},
        {"step": 2, "reward": 0.4, "rewards/red/mean": 0.4},
    ]
    (red,) = reward_rows(log[1:], [redness_reward], ["red"], [2.0])
    assert (red.weight, red.first, red.last) == (2.0, 0.4, 0.4)
    red, bright = reward_rows(log, [redness_reward], ["red"], [2.0])
    assert (red.weight, red.first, red.last) == (2.0, None, 0.4)
    assert (bright.name, bright.weight, bright.first, bright.last) == ("bright", None, 0.5, None)
    card = dataclasses.replace(
        ImageModelCardData("a", "u/a", "/models/base"), method="PaCo-GRPO", rewards=[red, bright]
    )
    assert "| bright | in an earlier part of the run | 0.5000 | not scored |" in str(render_card(card))


def test_arguments_that_a_card_cannot_state_are_left_out_with_a_warning(make_trainer, caplog):
    class WithScale(FluxFamily):
        def call_arguments(self, *args, **kwargs):
            return super().call_arguments(*args, **kwargs) | {"joint_attention_kwargs": {"scale": 1.0}}

    trainer = make_trainer(family=WithScale())
    call = trainer._model_card().call
    assert "joint_attention_kwargs" not in call and call["guidance_scale"] is not None
    assert "leave out the pipeline's argument(s) joint_attention_kwargs" in caplog.text
