# SPDX-License-Identifier: Apache-2.0
"""
Measure how much of a served judge's latency is hidden behind generation, and the requests per image.

    python benchmarks/speed/reward_overlap.py
    python benchmarks/speed/reward_overlap.py --quick --output runs/reward_overlap.json      # does it run?

Real rounds of `PaCoGRPOTrainer` on a CPU, with the tiny FLUX. The judge is the tests' server in a separate process,
which waits for as long as a judge would compute and computes nothing. Its latency follows the rollout: before each
round that is measured it is set to a multiple of what a micro-batch took in the last round without a judge.

Rounds take turns: with a reward that costs nothing, with the served reward, and with a copy of it that blocks its
caller, which the trainer calls with 16 images. Medians and ratios are saved.
"""

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig
from PIL import Image

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import demo_prompts_path, load_image_set_prompts, split_grid, theme_question
from paco_trl.rewards import ConsistencyReward, ServedJudge
from paco_trl.rewards.scoring import RewardScorer
from paco_trl.rewards.weighting import Rewards
from paco_trl.tiny import build_tiny_flux
from paco_trl.trainer.round_schedule import TrainingRound


LATENCIES = (0.25, 0.5, 0.9, 2.0)  # multiples of a micro-batch's rollout
PAIRS = 6  # of a 2 x 2 grid
SCORED_ALONE = 8  # micro-batches that are scored once more when nothing else runs

# As many as a row of T2IS has: 6 to 13, 9.8 on average
CRITERIA = {
    "Style": {
        "palette": "All images share one palette of muted blues and ochres.",
        "medium": "All images are painted in gouache on rough paper.",
        "light": "The light is soft and comes from the same side in all images.",
        "detail": "The background is as detailed in one image as in the others.",
    },
    "Identity": {
        "face": "The woman has the same face and is of the same age in all images.",
        "hair": "Her grey braid lies over the left shoulder in all images.",
        "clothes": "She wears the same mustard coat and navy jumper in all images.",
        "whistle": "A brass whistle hangs from a cord around her neck in all images.",
    },
    "Logic": {
        "place": "The scenes are at the same lighthouse.",
        "weather": "Weather and hour of the day fit together over the scenes.",
    },
}


# ---- The judge ----


def serve(connection) -> None:
    """The tests' server, until the other end hangs up: sets its latency, and says how many questions came."""
    path = Path(__file__).parents[2] / "tests" / "judge_server.py"
    spec = importlib.util.spec_from_file_location("judge_server", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.JudgeServer(lambda *_: random.gauss(0, 1)) as server:
        connection.send(server.url)
        while True:
            try:
                server.latency = connection.recv()
            except EOFError:
                return
            connection.send(len(server.requests))
            server.requests.clear()


class Server:
    """The judge's process."""

    def __init__(self):
        self._connection, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.url = self._connection.recv()

    def _serve(self, other) -> None:
        self._connection.close()  # the copy of this end
        serve(other)

    def restart_count(self, latency: float) -> int:
        """Sets the latency; how many questions came since the last call."""
        self._connection.send(latency)
        return self._connection.recv()

    def stop(self) -> None:
        self._connection.close()
        self._process.join(10)


# ---- Rewards ----


def instant_reward(completions: list[Image.Image], **_) -> list[float]:
    return [image.getpixel((0, 0))[0] / 255 for image in completions]


class BlockingReward:
    """The same questions, but the caller waits for the answers."""

    __name__ = "consistency"

    def __init__(self, judge: ServedJudge):
        self.judge = judge

    def __call__(self, completions, panel_images, theme, **_) -> list[float]:
        pairs = [list(combinations(panels, 2)) for panels in panel_images]
        questions = [theme_question(text) for text, of_set in zip(theme, pairs, strict=True) for _ in of_set]
        scores = iter(self.judge.score([pair for of_set in pairs for pair in of_set], questions))
        return [statistics.mean(next(scores) for _ in of_set) for of_set in pairs]


# ---- A. Rounds ----


def clocks() -> dict[str, float]:
    """
    Return the seconds of wall time, those in which this thread slept (without waiting for a processor that other work
    had, by proc(5) of Linux), and the processor seconds of the other threads of this process.
    """
    wall, own = time.perf_counter(), time.thread_time()
    schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    in_line = int(schedule.read_text(encoding="utf-8").split()[1]) / 1e9
    return {"wall": wall, "slept": wall - own - in_line, "beside": time.process_time() - own}


class OverlapTrainer(PaCoGRPOTrainer):
    """The trainer, whose rounds take turns between rewards, and are timed."""

    def __init__(self, plan: list[tuple[str, float]], server: Server, judge: ServedJudge, **kwargs):
        super().__init__(reward_funcs=instant_reward, **kwargs)
        self.plan, self.server, self.judge, self.rounds = plan, server, judge, []
        rewards = {
            "instant": instant_reward,
            "served": ConsistencyReward(judge),
            "blocking": BlockingReward(judge),
        }
        self.scorers = {}
        for kind, reward in rewards.items():
            self.scorers[kind] = RewardScorer(Rewards(reward), self.accelerator)
            self.scorers[kind].rewards.names = self.reward_func_names = ["consistency"]
            self.scorers[kind].scoring = self._recorded(self.scorers[kind].scoring)
        self._micro_batch_seconds = 0.0

    def _recorded(self, scoring):
        @contextmanager
        def recorded(round, state):
            with scoring(round, state) as started:
                add = started.add

                def add_recorded(completions):
                    rows, images = (
                        [round.row(done.row_index) for done in completions],
                        [done.image for done in completions],
                    )
                    self.drawn.append((rows, images))
                    add(completions)

                started.add = add_recorded
                yield started

        return recorded

    def _generate_and_score_completions(self, index: int) -> TrainingRound:
        kind, multiple = self.plan[index]
        self.scorer, self.drawn = self.scorers[kind], []
        self.rewards = self.scorer.rewards
        latency = multiple * self._micro_batch_seconds
        self.server.restart_count(latency)
        before = clocks()
        round = super()._generate_and_score_completions(index)
        spent = {name: seconds - before[name] for name, seconds in clocks().items()}
        questions = self.server.restart_count(latency)
        metrics, count = round.metrics, len(self.drawn)
        expected = 0 if kind == "instant" else PAIRS * self.schedule.plan.num_images
        if questions != expected or metrics["rewards/consistency/failure_rate"] > 0:
            raise SystemExit(f"A round of {kind}: {questions} questions instead of {expected}, or without answers.")
        done = {
            "kind": kind,
            "multiple": multiple,
            "latency": latency,
            **spent,
            "micro_batch": metrics["time/rollout"] / count,
            "waited": metrics["time/reward"],
            "hidden": metrics["time/reward_hidden"],
        }
        if kind == "instant":
            self._micro_batch_seconds = done["micro_batch"]
        elif kind == "served":
            done["alone"] = self._seconds_alone() * count / min(count, SCORED_ALONE)
        self.rounds.append(done)
        return round

    def _seconds_alone(self) -> float:
        """Seconds in which the round's first images are scored when nothing else runs, one micro-batch after another."""
        reward = ConsistencyReward(self.judge)  # remembers nothing

        async def score() -> None:
            for rows, images in self.drawn[:SCORED_ALONE]:
                panels = [split_grid(image, row["rows"], row["cols"]) for row, image in zip(rows, images, strict=True)]
                themes, prompts = [row["theme"] for row in rows], [row["prompt"] for row in rows]
                await reward(prompts=prompts, completions=images, panel_images=panels, theme=themes)

        started = time.perf_counter()
        asyncio.run(score())
        return time.perf_counter() - started


def measure_rounds(args: argparse.Namespace, server: Server, judge: ServedJudge, folder: Path):
    kinds = ("served", "blocking")
    turns = [turn for latency in LATENCIES for turn in (("instant", 0.0), *((kind, latency) for kind in kinds))]
    warm_up = [("instant", 0.0), ("served", 0.25), ("blocking", 0.25)]
    plan = [*warm_up, *turns * args.repeats, ("instant", 0.0)]
    dataset = load_image_set_prompts(demo_prompts_path())
    dataset = dataset.filter(lambda row: row["rows"] == row["cols"] == 2).remove_columns(["height", "width"])
    config = PaCoGRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        height=args.pixels,
        width=args.pixels,
        resolution_scale=1.0,
        num_inference_steps=args.num_inference_steps,
        num_generations=4,
        num_prompts_per_generation=args.micro_batches // 4,
        per_device_train_batch_size=1,
        optimizer_steps_per_generation=1,
        max_steps=len(plan),
        report_to="none",
        save_strategy="no",
        log_completions=False,
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = OverlapTrainer(
        plan,
        server,
        judge,
        model=str(build_tiny_flux(folder / "flux")),
        args=config,
        train_dataset=dataset,
        peft_config=LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian"),
    )
    trainer.train()
    server.restart_count(0.0)
    return trainer.rounds[len(warm_up) :], trainer.drawn


def summary(rounds: list[dict]) -> dict:
    """Medians over the rounds of a kind and latency."""
    found = defaultdict(lambda: defaultdict(list))
    for index, done in enumerate(rounds):
        if done["kind"] == "instant":
            before, after = done, next(later for later in rounds[index + 1 :] + [done] if later["kind"] == "instant")
            base = {name: (before[name] + after[name]) / 2 for name in ("wall", "slept")}
            continue
        if done["kind"] == "served":
            alone = done["alone"]  # of the same questions and latency as of the reward that blocks, which comes next
        values = found[f"{done['kind']}, {done['multiple']:g}"]
        # The generating thread sleeps while it waits for rewards, or for Python's lock that the client has. On a machine
        # with other work the difference of two walls would be that of the work.
        values["hidden share"].append(1 - (done["slept"] - base["slept"]) / alone)
        values["hidden share, by the metrics"].append(done["hidden"] / (done["hidden"] + done["waited"]))
        values["waited / latency"].append(done["waited"] / done["latency"])
        values["latency / rollout of a micro-batch in this round"].append(done["latency"] / done["micro_batch"])
        values["alone, seconds"].append(alone)
        for name, seconds in base.items():
            values[f"{name} without a judge, seconds"].append(seconds)
        for name in ("latency", "waited", "wall", "slept", "beside", "micro_batch"):
            values[f"{name}, seconds"].append(done[name])
    return {
        kind: {name: round(statistics.median(numbers), 3) for name, numbers in values.items()}
        for kind, values in found.items()
    }


# ---- B. Requests ----


@contextmanager
def counted_images():
    """How many images are encoded in the meantime."""
    encoded, save = [], Image.Image.save

    def counted(image, file, format=None, **kwargs):
        encoded.append(format)
        return save(image, file, format, **kwargs)

    with mock.patch.object(Image.Image, "save", counted):
        yield encoded


def measure_requests(server: Server, judge: ServedJudge, drawn: list) -> dict:
    """Requests and encoded images for each image, as they came, not as they should."""
    images = [image for _, batch in drawn for image in batch]
    panels = [split_grid(image, 2, 2) for image in images]
    theme = "One lighthouse keeper in four working poses."
    criteria = sum(len(texts) for texts in CRITERIA.values())

    def ours(question: str):
        reward = ConsistencyReward(judge, question=question)

        async def score() -> None:
            for image, cut in zip(images, panels, strict=True):
                await reward(
                    prompts=["a prompt"], completions=[image], panel_images=[cut], theme=[theme], criteria=[CRITERIA]
                )

        asyncio.run(score())

    def as_published() -> None:
        for cut in panels:
            for pair in combinations(cut, 2):
                for _ in range(criteria):  # the question does not name the criterion
                    judge.score([pair], theme_question(theme))

    ways = {"theme": lambda: ours("theme"), "criteria": lambda: ours("criteria"), "published": as_published}
    found = {}
    for name, ask in ways.items():
        server.restart_count(0.0)
        with counted_images() as encoded:
            ask()
        requests = server.restart_count(0.0)
        found[name] = {"requests": requests / len(images), "images encoded": len(encoded) / len(images)}
    return {"criteria of a row": criteria, "per image": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=128, help="side of an image of four panels, in rollout")
    parser.add_argument(
        "--num_inference_steps", type=int, default=80, help="of a rollout; more make a micro-batch longer"
    )
    parser.add_argument("--micro_batches", type=int, default=24, help="of a round, one image each; a multiple of 4")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small and few: does it run?")
    parser.add_argument("--output", default="benchmarks/speed/reward_overlap.json")
    args = parser.parse_args()
    if args.quick:
        args.pixels, args.num_inference_steps, args.micro_batches = 64, 10, 12
    torch.set_num_threads(1)

    server = Server()  # first: its process is a copy of this one
    judge = ServedJudge(server.url, "judge")
    judge.check()
    with tempfile.TemporaryDirectory() as folder:
        rounds, drawn = measure_rounds(args, server, judge, Path(folder))
        requests = measure_requests(server, judge, drawn[:SCORED_ALONE])
    server.stop()

    latencies = summary(rounds)
    counts = requests["per image"]

    def of(kind: str, name: str) -> dict[str, float]:
        return {f"{latency:g}": latencies[f"{kind}, {latency:g}"][name] for latency in LATENCIES}

    def to_published(what: str) -> dict[str, float]:
        return {name: round(counts[name][what] / counts["published"][what], 4) for name in ("theme", "criteria")}

    report = {
        "setting": {name: value for name, value in vars(args).items() if name not in ("output", "quick")},
        "torch": torch.__version__,
        "ratios": {
            "hidden share of the judge's latency, by latency / rollout of a micro-batch": of("served", "hidden share"),
            "hidden share, a reward that blocks": of("blocking", "hidden share"),
            "hidden share, by time/reward_hidden and time/reward": of("served", "hidden share, by the metrics"),
            "hidden share, by the metrics, a reward that blocks": of("blocking", "hidden share, by the metrics"),
            "waited / latency": of("served", "waited / latency"),
            "waited / latency, a reward that blocks": of("blocking", "waited / latency"),
            "requests per image / one for each pair and criterion": to_published("requests"),
            "images encoded per image / two for each request": to_published("images encoded"),
        },
        "medians of rounds": latencies,
        "requests": requests,
    }
    text = json.dumps(report, indent=2, sort_keys=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(text + "\n", encoding="utf-8")
    print_table(report)


def print_table(report: dict) -> None:
    columns = ["hidden share", "hidden share, by the metrics", "waited / latency"]
    print(f"{'reward, latency / rollout':28}" + "".join(f"{name:>30}" for name in columns))
    for kind, medians in report["medians of rounds"].items():
        print(f"{kind:28}" + "".join(f"{medians[name]:30}" for name in columns))
    for name, counts in report["requests"]["per image"].items():
        print(f"{name:28}{counts['requests']:12} requests and {counts['images encoded']} encoded images per image")


if __name__ == "__main__":
    main()
