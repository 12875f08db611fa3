# SPDX-License-Identifier: Apache-2.0
"""
Trained models on the Hub and back: what was pushed draws the same images and gives the same scores, by every way of
loading; an outage changes nothing of the training.

The Hub is a server of the tests. The clients are the real ones.
"""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from diffusers import FluxPipeline
from huggingface_hub import ModelCard, snapshot_download
from peft import LoraConfig, PeftModel

from hub_server import TOKEN, HubServer
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.checkpointing.weights import use_weights
from paco_trl.commands.doctor import DoctorState, check_hub
from paco_trl.commands.main import main
from paco_trl.commands.script_arguments import ScriptArguments
from paco_trl.data import make_pair, theme_question
from paco_trl.hub.pushing import reset_push_dir
from paco_trl.rewards import redness_reward
from testing_utils import SMALL_RUN, draw, files_in, noise, plain, square_prompts


BASE = "makers/tiny-flux"
REPO = "tester/adapter"
WITH_PICTURES = {"log_completions": True, "plot_curves": True}


# ---- What the clients do ----


def make_trainer(output_dir: str, base: str = BASE, **kwargs):
    settings = SMALL_RUN | {
        "output_dir": output_dir, "max_steps": 4, "learning_rate": 0.1, "epsilon": 0.1, "save_strategy": "steps",
        "save_steps": 2, "push_to_hub": True, "hub_model_id": REPO, "hub_token": TOKEN, **kwargs,
    }  # fmt: skip
    adapter = LoraConfig(r=4, lora_alpha=32, init_lora_weights="gaussian")
    return PaCoGRPOTrainer(base, redness_reward, PaCoGRPOConfig(**settings), square_prompts(), peft_config=adapter)


def train(output_dir: str) -> None:
    trainer = make_trainer(output_dir, hub_private_repo=True, **WITH_PICTURES)
    trainer.train()
    trainer.save_model()
    with use_weights(trainer.model, trainer.ema.average, 0):
        np.save(Path(output_dir).parent / "average.npy", draw(trainer.pipeline))
    np.save(Path(output_dir).parent / "raw.npy", draw(trainer.pipeline))
    trainer.push_to_hub(use_ema=False, revision="raw", tags="raw-weights")


def pull(folder: str, base: str = BASE, repo: str = REPO) -> None:
    """Loads what is on the Hub in both ways, and draws."""
    np.save(Path(folder) / "base.npy", draw(FluxPipeline.from_pretrained(base)))
    for revision, name in (("main", "pulled"), ("raw", "pulled_raw")):
        by_diffusers = FluxPipeline.from_pretrained(base)
        by_diffusers.load_lora_weights(repo, revision=revision)
        np.save(Path(folder) / f"{name}_by_diffusers.npy", draw(by_diffusers))
        by_peft = FluxPipeline.from_pretrained(base)
        by_peft.transformer = PeftModel.from_pretrained(by_peft.transformer, repo, revision=revision)
        np.save(Path(folder) / f"{name}_by_peft.npy", draw(by_peft))


def resume(output_dir: str) -> None:
    snapshot_download(REPO, allow_patterns="last-checkpoint/*", local_dir=Path(output_dir).parent, token=TOKEN)
    checkpoint = str(Path(output_dir).parent / "last-checkpoint")
    make_trainer(output_dir, resume_from_checkpoint=checkpoint).train(checkpoint)


def refuse(output_dir: str, **kwargs) -> str:
    """A trainer whose base model does not exist: an error about the Hub comes before one about the model."""
    try:
        make_trainer(output_dir, **{"base": f"{output_dir}/no-such-model", **kwargs})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


PAIRS = [(plain(20 * number), noise(number)) for number in range(8)]


def judge_scores(model: str) -> np.ndarray:
    return np.array(PaCoReward.from_pretrained(model).score(PAIRS, theme_question("a fox")))


def train_judge(output_dir: str) -> np.ndarray:
    pairs = [make_pair(*pair, theme_question("a fox"), bool(row % 2), None) for row, pair in enumerate(PAIRS)]
    trainer = PaCoRewardTrainer(
        model="makers/tiny-judge",
        args=PaCoRewardConfig(
            output_dir, first_token_weight=None, learning_rate=2e-2, per_device_train_batch_size=4, max_steps=4,
            save_strategy="steps", save_steps=2, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
            push_to_hub=True, hub_model_id="tester/judge", hub_strategy="all_checkpoints", hub_token=TOKEN,
        ),
        train_dataset=Dataset.from_list(pairs),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return judge_scores(output_dir)  # of the folder, as it was left


# ---- Tests ----


@pytest.fixture(scope="module")
def hub(tiny_flux, tiny_qwen):
    with HubServer({TOKEN: "tester"}) as server:
        server.add_repo(BASE, files_in(tiny_flux))
        card = b"---\nlicense: other\nlicense_name: made-up-1\nlicense_link: LICENSE.md\n---\n# Tiny\n"
        server.add_repo("makers/tiny-judge", {**files_in(tiny_qwen), "README.md": card})
        yield server


def run(hub: HubServer, cache: Path, function, *arguments, fails: bool = False, **keywords) -> tuple:
    """Calls a function with clients of this Hub; gives what it gave, and all that was printed."""
    outcome = hub.call(cache, function, *arguments, **keywords)
    assert ("error" in outcome) == fails, outcome["log"][-3000:]
    return outcome.get("result"), outcome["log"]


def assert_no_token(*folders: Path) -> None:
    contents = [content for folder in folders for content in files_in(folder).values()]
    assert contents and not any(TOKEN.encode() in content for content in contents)


@pytest.fixture(scope="module")
def folder(hub, tmp_path_factory):
    """A run that was pushed, deleted here, and pulled with another cache."""
    folder = tmp_path_factory.mktemp("run")
    run(hub, folder / "cache", train, str(folder / "out"))
    assert_no_token(folder / "out")
    (folder / "out").rename(folder / "taken away")
    run(hub, folder / "other cache", pull, str(folder), client_token=TOKEN)
    return folder


class TestPushAndPull:
    @pytest.mark.slow
    def test_both_ways_of_loading_give_the_trained_image(self, folder):
        images = {path.stem: np.load(path) for path in folder.glob("*.npy")}
        assert np.abs(images["average"] - images["base"]).mean() > 2  # it does something
        assert not np.array_equal(images["average"], images["raw"])
        for name in ("pulled_by_diffusers", "pulled_by_peft"):
            assert np.array_equal(images[name], images["average"]), name
        for name in ("pulled_raw_by_diffusers", "pulled_raw_by_peft"):
            assert np.array_equal(images[name], images["raw"]), name

    def test_what_is_in_the_repository(self, hub, folder):
        files = hub.files(REPO, "model")
        assert set(files) == {
            ".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "paco_trl.json",
            "pytorch_lora_weights.safetensors", "contact_sheet.png", "curves.png", *(f"images/{n}.png" for n in range(4)),
        }  # fmt: skip
        assert hub.repos["model", REPO].private
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == BASE
        titles = list(filter(None, hub.repos["model", REPO].titles.values()))
        assert titles[-3:] == ["Training in progress, step 4", "Model save", "End of training"]
        for content in files.values():
            assert TOKEN.encode() not in content and str(folder).encode() not in content

    def test_card(self, hub):
        card = ModelCard(hub.files(REPO, "model")["README.md"].decode())
        assert card.data.base_model == BASE and card.data.base_model_relation == "adapter"
        assert f'load_lora_weights("{REPO}")' in card.content  # with the user's name
        raw = ModelCard(hub.files(REPO, "model", "raw")["README.md"].decode())
        assert "raw-weights" in raw.data.tags and "raw-weights" not in card.data.tags
        # The client has asked the Hub whether the metadata are right, before each commit
        assert hub.requests.count(("POST", "/api/validate-yaml")) >= 3

    def test_nothing_unknown_was_asked(self, hub, folder):
        assert hub.unknown == []


class TestOutages:
    def test_a_push_that_finds_no_hub_has_saved_the_model(self, hub, tmp_path):
        """Also one of a run that had nothing to push before."""

        def push() -> None:
            trainer = make_trainer(str(tmp_path / "out"), push_to_hub=False, max_steps=1)
            with pytest.raises(ConnectionError, match="cannot be reached"):
                trainer.push_to_hub()

        hub.fault = lambda method, path: None if "tiny-flux" in path else "500"
        run(hub, tmp_path / "cache", push)
        assert {"README.md", "adapter_model.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}

    @pytest.mark.slow
    def test_training_neither_waits_nor_changes(self, hub, folder, tmp_path):
        """The Hub holds the first upload until the last step is saved, and answers 500 from then on."""
        output_dir = tmp_path / "out"
        hub.repos.pop(("model", REPO), None)

        def fault(method: str, path: str) -> str | None:
            if "/commit/" not in path:
                return None
            deadline = time.monotonic() + 300
            while not (output_dir / "checkpoint-4").is_dir():
                assert time.monotonic() < deadline, "training waited for the upload"
                time.sleep(0.05)
            return "500"

        def train() -> None:
            trainer = make_trainer(str(output_dir))
            trainer.train()
            (output_dir / "trained").touch()
            trainer.save_model()

        hub.fault = fault
        _, log = run(hub, tmp_path / "cache", train, fails=True)
        assert (output_dir / "trained").exists()
        assert "was not pushed to the Hub, and training continues" in log
        assert log.count(f"paco-trl push {output_dir}") >= 2  # beside training, and at its end
        assert f"{hub.url} cannot be reached" in log
        assert set(hub.files(REPO, "model")) == {".gitattributes"}
        # Trained as without an outage, and pushed later
        hub.fault = lambda method, path: None
        code, printed = run(hub, tmp_path / "cache", main, ["push", str(output_dir)], client_token=TOKEN)
        assert code == 0 and f"{hub.url}/{REPO}" in printed
        files = hub.files(REPO, "model")
        assert files["adapter_model.safetensors"] == (output_dir / "adapter_model.safetensors").read_bytes()
        assert [path.name for path in (output_dir / ".pushing").iterdir()] == ["repository.json"]
        assert_no_token(output_dir)
        without = folder / "taken away" / "checkpoint-4" / "adapter_model.safetensors"
        assert without.read_bytes() == files["adapter_model.safetensors"]

    @pytest.mark.slow
    def test_a_run_goes_on_from_its_checkpoint_on_the_hub(self, hub, folder, tmp_path):
        hub.fault = lambda method, path: None
        hub.repos.pop(("model", REPO), None)
        run(
            hub,
            tmp_path / "cache",
            lambda: make_trainer(str(tmp_path / "gone" / "out"), max_steps=2, hub_strategy="checkpoint").train(),
        )
        files = hub.files(REPO, "model")
        assert {"last-checkpoint/optimizer.pt", "last-checkpoint/run.json", "README.md"} <= set(files)
        run(hub, tmp_path / "cache", resume, str(tmp_path / "new" / "out"))
        resumed = hub.files(REPO, "model")["adapter_model.safetensors"]
        assert resumed != files["adapter_model.safetensors"]
        without = folder / "taken away" / "checkpoint-4" / "adapter_model.safetensors"
        assert without.read_bytes() == resumed


def test_said_before_a_model_is_loaded(hub, tiny_flux, tmp_path):
    by_path = FluxPipeline.from_pretrained(tiny_flux)
    assert isinstance(by_path.name_or_path, Path)
    hub.fault = lambda method, path: None
    hub.add_repo("makers/gated", {"README.md": b""})
    hub.add_repo("tester/open", {"README.md": b""})
    hub.gated.add("makers/gated")
    cases = [
        ({"hub_token": None}, "LocalTokenNotFoundError"),
        ({"hub_model_id": "tester/open", "hub_private_repo": True}, "ValueError: .*public"),
        ({"base": by_path, "hub_model_id": "others/adapter"}, "HfHubHTTPError: 403 .*others"),
        ({"base": "makers/gated", "hub_model_id": "tester/gated"}, "PermissionError: .*makers/gated is gated"),
        # The negative twin: without `push_to_hub` it is the model that is missing
        ({"push_to_hub": False}, "no-such-model"),
    ]  # fmt: skip
    for case, expected in cases:
        message, _ = run(hub, tmp_path / "cache", refuse, str(tmp_path / "out"), **case)
        assert re.search(expected, message), (case, message)


@pytest.mark.slow
def test_down_at_the_start(hub, tmp_path):
    """A new run is told before its model is loaded; one that goes on goes on."""
    hub.fault = lambda method, path: "500" if path == "/api/whoami-v2" else None
    reset_push_dir(tmp_path / "known", "tester/known", None)
    cases = [{"output_dir": str(tmp_path / name), "hub_model_id": name} for name in ("new", "known")]
    cases += [
        {**cases[1], **other}
        for other in ({"hub_model_id": "another"}, {"hub_private_repo": True}, {"hub_revision": "try"})
    ]
    said = [run(hub, tmp_path / "cache", refuse, **case) for case in cases]
    (new, _), (known, log), *others = said
    assert new.startswith("ConnectionError") and "push_to_hub=False" in new and f"paco-trl push {tmp_path}/new" in new
    assert "no-such-model" in known and "ConnectionError" not in known  # it got as far as the model
    assert "The run continues, since it has pushed to tester/known before" in log
    assert len(others) == 3 and all(other.startswith("ConnectionError") for other, _ in others)


def test_doctor(hub, tmp_path):
    def check(model: str, **settings) -> tuple[str, str]:
        settings |= {"push_to_hub": True, "hub_token": TOKEN}
        args = PaCoGRPOConfig(f"{tmp_path}/out", use_cpu=True, bf16=False, **settings)
        return check_hub(DoctorState(None, [], str(tmp_path), script_args=ScriptArguments(model), run_args=args))

    hub.fault = lambda method, path: None
    with hub.connected(tmp_path / "cache"):
        found = check(BASE, hub_model_id="tester/not-there")
        assert found == f"The repository tester/not-there at {hub.url} will be created."
        assert ("model", "tester/not-there") not in hub.repos


@pytest.mark.slow
def test_judge(hub, tmp_path):
    hub.fault = lambda method, path: None
    scores, _ = run(hub, tmp_path / "cache", train_judge, str(tmp_path / "out"))
    files = hub.files("tester/judge", "model")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= set(files)
    assert {"checkpoint-2/optimizer.pt", "checkpoint-4/optimizer.pt"} <= set(files)
    assert not any(name.endswith("training_args.bin") for name in files)
    for name, content in files.items():
        assert TOKEN.encode() not in content, name
        assert str(tmp_path).encode() not in content or name.startswith("checkpoint-"), name
    assert b"license_name: made-up-1" in files["README.md"]
    base, pulled = (
        run(hub, tmp_path / "other", judge_scores, name)[0] for name in ("makers/tiny-judge", "tester/judge")
    )
    assert np.abs(scores - base).max() > 1e-3
    assert np.array_equal(pulled, scores)
