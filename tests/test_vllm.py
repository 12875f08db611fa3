# SPDX-License-Identifier: Apache-2.0
"""
A real vLLM behind `paco-trl serve`: its scores are those in the process, and it may be killed.

Run with `make test-vllm`, which installs vLLM into an environment of its own. A server takes half a minute to start, so
there are five in all: a whole model, an adapter of the language model, and one of the vision tower, as the command
serves them; what a trainer saves and what `paco-trl merge` writes, as vLLM itself does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from paco_trl import PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.commands.merge import MergeArguments, merge
from paco_trl.data import criterion_question, edit_following_question, make_pair, theme_question
from paco_trl.data.questions import plain_question
from paco_trl.rewards import JudgeUnavailableError, ServedJudge
from paco_trl.tiny import build_tiny_qwen2_5_vl
from paco_trl.utils.vision_language import limit_pixels
from testing_utils import give_effect, noise, wait_until


VLLM = os.environ.get("PACO_TRL_VLLM")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM is None, reason="PACO_TRL_VLLM does not name the command of vLLM: run `make test-vllm`"),
]

ROOT = Path(__file__).parent.parent
KEY = "a-key"
QUESTIONS = [
    theme_question("A fox through the four seasons"),
    criterion_question("The same colour"),
    edit_following_question("Add a hat"),
]
TOLERANCE = 1e-3


# Below, at and above what the tiny model's processor leaves as it is; and sides that are no multiples of 28
SIZES = [(56, 28), (30, 45), (112, 112), (310, 200)]
IMAGES = [*(noise(seed, size) for seed, size in enumerate(SIZES)), Image.new("RGB", (84, 56), "red")]
PAIRS = list(permutations(IMAGES, 2))
# Each pair with each question
ALL_PAIRS, ALL_QUESTIONS = map(list, zip(*product(PAIRS, QUESTIONS), strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """
    A tiny Qwen2.5-VL that vLLM can serve: attention heads of 32 numbers, which its kernels on CPUs need, and Yes and No
    among the 20 likeliest answers.
    """
    folder = build_tiny_qwen2_5_vl(tmp_path_factory.mktemp("models") / "judge")
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    config.text_config.hidden_size = config.vision_config.out_hidden_size = 128
    config.text_config.rope_parameters["mrope_section"] = [4, 6, 6]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen2_5_VLForConditionalGeneration(config)
    judge = PaCoReward(network, AutoProcessor.from_pretrained(folder))

    # What the head sees has a common direction, the last token of the prompt being the same. Along it the two rows are
    # made longer, both to the same mean.
    seen = []
    hook = network.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, -1]))
    judge.score(ALL_PAIRS, ALL_QUESTIONS)
    judge.score(PAIRS, plain_question())
    hook.remove()
    mean = torch.cat(seen).mean(0)
    with torch.no_grad():
        rows = network.lm_head.weight[[judge.yes_id, judge.no_id]]
        wanted = 15.0 - rows @ mean
        network.lm_head.weight[[judge.yes_id, judge.no_id]] = rows + wanted[:, None] * mean / mean.dot(mean)
    network.save_pretrained(folder)
    return folder


def save_adapter(model: Path, folder: Path, layers: str) -> Path:
    """Saves a LoRA adapter with an effect."""
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    network = get_peft_model(network, LoraConfig(r=4, lora_alpha=8, target_modules=layers))
    give_effect(network, std=0.05)  # with more the answer is neither Yes nor No
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def language_adapter(model, tmp_path_factory) -> Path:
    """Adapter of the language model, trained at another size of images than the model below."""
    folder = save_adapter(model, tmp_path_factory.mktemp("language"), r".*language_model.*\.\w+_proj")
    processor = AutoProcessor.from_pretrained(model)
    limit_pixels(processor, 56 * 56)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vision_adapter(model, tmp_path_factory) -> Path:
    """Adapter of the vision tower and its projector."""
    layers = r".*visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.\w+_proj)|merger\.mlp\.[02])"
    return save_adapter(model, tmp_path_factory.mktemp("vision"), layers)


def scores_in_process(folder: Path) -> list[float]:
    return PaCoReward.from_pretrained(folder, device="cpu", dtype="float32").score(ALL_PAIRS, ALL_QUESTIONS)


def deviation(scores: list[float | None], expected: list[float]) -> float:
    assert None not in scores
    return max(abs(a - b) for a, b in zip(scores, expected, strict=True))


def check(scores: list[float | None], expected: list[float], others: list[float] | None = None) -> None:
    """The expected scores, which are not those of the others."""
    print(f"largest deviation {deviation(scores, expected):.2g}")  # for the report of `make test-vllm`
    assert deviation(scores, expected) < TOLERANCE
    assert others is None or deviation(expected, others) > 10 * TOLERANCE


def members_of(group: int) -> list[str]:
    """Names of the processes of a process group that are alive."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = file.read_text().rpartition(")")[::2]
        except OSError:  # has just ended
            continue
        state, _, of_group = fields.split()[:3]
        if int(of_group) == group and state != "Z":
            found.append(name)
    return found


class Server:
    """A server in a process group of its own, ready to be asked."""

    def __init__(self, command: list[str], port: int, folder: Path, **env):
        self.url = f"http://127.0.0.1:{port}/v1"
        self.file = folder / "output"
        options = {"cwd": ROOT, "env": {**os.environ, "VLLM_API_KEY": KEY, **env}, "start_new_session": True}
        with self.file.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)
        wait_until(lambda: self.is_healthy() or self.process.poll() is not None, 300)
        assert self.is_healthy(), self.output[-3000:]

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def is_healthy(self) -> bool:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self.url[:-3]}/health") as reply:
                return reply.status == 200
        except OSError:
            return False

    def judge(self, model: str = "paco-reward", **kwargs) -> ServedJudge:
        return ServedJudge(self.url, model, **{"api_key": KEY, **kwargs})

    def stop(self) -> None:
        """As asked, and nothing is left."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        assert members_of(self.process.pid) == []
        assert KEY not in self.output


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def start(port, tmp_path_factory):
    """Starts a server, always at the same port, in place of one that a failed test has left: of a judge, or a command."""
    started = []

    def end() -> None:
        for server in started:
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait(60)

    def run(model: Path | list[str], **env) -> Server:
        end()
        command = model
        if isinstance(model, Path):
            command = [sys.executable, "-m", "paco_trl.commands.main", "serve", "--model_name_or_path", str(model)]
            command += ["--vllm", VLLM, "--port", str(port), "--dtype", "float32", "--max_model_len", "2048", "--"]
        # Nothing is compiled for a model of which every server answers few questions
        started.append(Server([*command, "--enforce-eager"], port, tmp_path_factory.mktemp("output"), **env))
        return started[-1]

    yield run
    end()


@pytest.fixture(scope="module")
def expected(model) -> list[float]:
    scores = scores_in_process(model)
    # Worth comparing
    assert np.std(scores) > 0.01 and 0.01 < min(scores) < max(scores) < 0.99
    return scores


@pytest.fixture(scope="module")
def served(start, model) -> Server:
    return start(model)


class TestWholeModel:
    def test_scores_are_those_in_the_process(self, served, expected):
        judge = served.judge()
        for _ in range(2):  # the second time from the caches
            check(judge.score(ALL_PAIRS, ALL_QUESTIONS), expected)

    def test_wrong_name_and_key(self, served):
        for ask in (lambda judge: judge.check(), lambda judge: judge.score(PAIRS[:1], QUESTIONS[0])):
            with pytest.raises(JudgeUnavailableError, match="has no model 'paco'"):
                ask(served.judge("paco"))
        with pytest.raises(JudgeUnavailableError, match=r"refuses the key .*401"):
            served.judge(api_key="another").check()


class TestAdapters:
    def test_killed_and_started_again_with_an_adapter(
        self, served, start, model, expected, language_adapter, vision_adapter
    ):
        # Killed in the middle of many questions
        judge = served.judge(timeout=10.0, time_budget=10.0)
        many = (ALL_PAIRS * 100, ALL_QUESTIONS * 100)
        raised = []

        def ask() -> None:
            try:
                judge.score(*many)
            except JudgeUnavailableError as error:
                raised.append((time.monotonic(), str(error)))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(2.0)
        assert thread.is_alive()
        os.killpg(served.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        thread.join(60)
        ((when, message),) = raised
        assert when - killed < judge.time_budget + 2.0
        assert f"paco-reward at {served.url} has not answered" in message
        assert served.process.wait(30) == -signal.SIGKILL and members_of(served.process.pid) == []

        # At the same address and under the same name, where the judge finds it; now the adapter's
        restarted = start(language_adapter, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
        check(judge.score(ALL_PAIRS, ALL_QUESTIONS), scores_in_process(language_adapter), expected)
        # It was trained at its own size of images, which all models of the server get
        below = PaCoReward.from_pretrained(model, device="cpu")
        limit_pixels(below.processor, 56 * 56)
        scores = restarted.judge("paco-reward-base").score(ALL_PAIRS, ALL_QUESTIONS)
        check(scores, below.score(ALL_PAIRS, ALL_QUESTIONS))

        # This server was not told of vision layers: it takes an adapter of them, and leaves them out
        content = {"lora_name": "vision", "lora_path": str(vision_adapter)}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        url = f"{restarted.url}/load_lora_adapter"
        request = urllib.request.Request(url, json.dumps(content).encode(), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
            assert response.status == 200
        check(restarted.judge("vision").score(ALL_PAIRS, ALL_QUESTIONS), scores)
        restarted.stop()

    def test_adapter_of_vision_layers(self, start, expected, vision_adapter):
        served = start(vision_adapter)
        check(served.judge().score(ALL_PAIRS, ALL_QUESTIONS), scores_in_process(vision_adapter), expected)
        served.stop()


@pytest.fixture(scope="module")
def trained_folder(model, tmp_path_factory) -> Path:
    """What the trainer saves: the layers of its adapter are named by a pattern."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [
        make_pair(first, second, QUESTIONS[0], index % 2 == 0, None) for index, (first, second) in enumerate(PAIRS[:8])
    ]
    trainer = PaCoRewardTrainer(
        model=str(model),
        args=PaCoRewardConfig(
            str(folder), first_token_weight=None, learning_rate=2e-3, max_steps=2, per_device_train_batch_size=4,
            max_pixels=None,  # that of the model below, which a server takes
            gradient_accumulation_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(config["target_modules"], str) and config["r"] == 32
    return folder


class TestSavedFolders:
    """Folders that vLLM serves as they are, without the command."""

    def scores(self, start, port: int, name: str, *arguments: str) -> list[float]:
        """Of a server, which is started and stopped."""
        command = [VLLM, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        server = start([*command, "--max-model-len", "2048"])
        scores = server.judge(name).score(ALL_PAIRS, ALL_QUESTIONS)
        server.stop()
        return scores

    def test_adapter_of_the_trainer(self, start, model, expected, trained_folder, port):
        lora = ["--enable-lora", "--max-lora-rank", "32", "--lora-modules", f"judge={trained_folder}"]
        scores = self.scores(start, port, "judge", str(model), *lora)
        check(scores, scores_in_process(trained_folder), expected)

    def test_merged_judge(self, start, expected, trained_folder, port, tmp_path):
        merge(MergeArguments(str(trained_folder), str(tmp_path / "merged")))
        scores = self.scores(start, port, "merged", str(tmp_path / "merged"), "--served-model-name", "merged")
        check(scores, scores_in_process(trained_folder), expected)
