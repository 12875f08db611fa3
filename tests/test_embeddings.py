# SPDX-License-Identifier: Apache-2.0
"""When text encoders and weights are placed, and embeddings in a directory: the same training, encoded once."""

import gc
import shutil
import weakref

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from paco_trl.rollout import policy
from paco_trl.rollout.families.flux import FluxFamily
from paco_trl.rollout.rounds import Batch, Round
from paco_trl.trainer import evaluator, round_trainer
from paco_trl.trainer.round_schedule import ROUNDS_AHEAD
from paco_trl.utils.placement import placed_on
from test_editing_training import dataset, klein, make  # noqa: F401  (fixtures)
from testing_utils import are_equal, count_images, weights_of


SHORT = {"num_generations": 2, "num_prompts_per_generation": 2, "per_device_train_batch_size": 2}


class ShoutingFlux(FluxFamily):
    def encode_prompt(self, pipeline, prompt, *args, **kwargs):
        return super().encode_prompt(pipeline, prompt.upper(), *args, **kwargs)


def files_in(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class TestPlacement:
    @pytest.fixture
    def events(self, monkeypatch):
        """What happens, in order: "placed" for the trained model, and what `watch` adds."""
        events, to = [], nn.Module.to

        def placing(self, *args, **kwargs):
            events.append("placed")
            return to(self, *args, **kwargs)

        monkeypatch.setattr(PeftModel, "to", placing, raising=False)
        return events

    def test_the_prompts_of_the_first_rounds_are_encoded_before_the_model_is_placed(self, make_trainer, events):
        trainer = make_trainer(**SHORT)
        trainer.pipeline.text_encoder_2.register_forward_pre_hook(lambda *_: events.append("text"))
        trainer.train()
        assert events.count("text") == 2 and events.index("placed") == 2  # a round of two prompts

    def test_evaluating_before_training_places_the_model(self, make_trainer, prompts, events):
        trainer = make_trainer(eval_dataset=prompts.select([5]), num_generations_eval=2, num_inference_steps_eval=2)
        assert events == []
        trainer.pipeline.text_encoder_2.register_forward_pre_hook(lambda *_: events.append("text"))
        trainer.evaluate()
        assert events[:2] == ["text", "placed"]

    def test_modules_come_back_to_the_memory_that_they_left(self):
        module = nn.Linear(2, 3)
        before = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in module.named_parameters()}
        with placed_on([module], torch.device("meta")):
            assert {weight.device.type for weight in module.parameters()} == {"meta"}
        for name, weight in module.named_parameters():
            assert weight.data_ptr() == before[name][0] and torch.equal(weight, before[name][1])


@pytest.fixture(scope="module")
def many(prompts) -> Dataset:
    return concatenate_datasets([prompts.map(lambda row, n=n: {"prompt": f"{n} {row['prompt']}"}) for n in "abc"])


class TestAhead:
    """What a round needs is encoded a bounded number of rounds ahead of it, and dropped when it is behind."""

    ONE = {"num_generations": 2, "num_prompts_per_generation": 1, "per_device_train_batch_size": 2}
    ONE |= {"optimizer_steps_per_generation": 1, "gradient_checkpointing": False}

    def test_memory_and_encodes_are_those_of_some_rounds(self, make_trainer, many):
        trainer = make_trainer(**self.ONE, train_dataset=many, max_steps=ROUNDS_AHEAD + 2)
        encoded, generate, found = count_images(trainer.pipeline.text_encoder_2), trainer._generating, []

        def watched(*args, **kwargs):
            found.append((len(encoded), len(trainer.policy.encoder._encoded)))
            return generate(*args, **kwargs)

        trainer._generating = watched
        trainer.train()
        # The last two rounds are encoded when the first of them comes; each prompt once
        ahead, rest = (ROUNDS_AHEAD, ROUNDS_AHEAD), (ROUNDS_AHEAD + 2, 2)
        assert found == [ahead] * ROUNDS_AHEAD + [rest] * 2

    @pytest.mark.parametrize("resumed", [False, True])
    def test_trains_the_same_whatever_is_ahead(self, make_trainer, many, monkeypatch, tmp_path, resumed):
        settings = {**self.ONE, "train_dataset": many.select(range(4)), "max_steps": 6, "save_strategy": "steps"}
        results = []
        for rounds in (6, 2):
            monkeypatch.setattr(round_trainer, "ROUNDS_AHEAD", rounds)
            trainer = make_trainer(**settings, save_steps=3, output_dir=str(tmp_path / str(rounds)))
            if resumed and results:
                shutil.copytree(tmp_path / "6" / "checkpoint-3", tmp_path / "2" / "checkpoint-3")
            encoded = count_images(trainer.pipeline.text_encoder_2)
            trainer.train(resume_from_checkpoint=bool(resumed and results))
            # Four prompts stay in memory, or those of the second epoch are encoded again
            assert len(encoded) == (4 if rounds == 6 else 3 if resumed else 5)
            results.append(weights_of(trainer))
        assert are_equal(*results)

    def test_evaluation_prompts_too(self, make_trainer, many, monkeypatch):
        settings = {"num_generations_eval": 2, "num_inference_steps_eval": 2, "eval_baseline": False}
        results = []
        for count in (3, 10):
            for module in (policy, evaluator):
                monkeypatch.setattr(module, "ROWS_AHEAD", count)
            trainer = make_trainer(**self.ONE, **settings, eval_dataset=many.select(range(9)))
            encoded = count_images(trainer.pipeline.text_encoder_2)
            results.append(trainer.evaluate())
            assert len(encoded) == 9 and len(trainer.policy.encoder._encoded) == (2 if count == 3 else 9)
        assert results[0] == pytest.approx(results[1], abs=0, nan_ok=True) and results[0]["eval_reward"] > 0


class TestDirectory:
    def test_trains_the_same_and_encodes_once(self, make_trainer, tmp_path):
        folder, results = tmp_path / "embeddings", []
        for number, embeddings_dir in enumerate([None, str(folder), str(folder)]):
            trainer = make_trainer(**SHORT, embeddings_dir=embeddings_dir)
            encoded, before = count_images(trainer.pipeline.text_encoder_2), weights_of(trainer)
            trainer.train()
            assert not are_equal(before, weights_of(trainer))
            assert len(encoded) == (0 if number == 2 else 2)
            results.append(weights_of(trainer))
            files = files_in(tmp_path / "embeddings")
            assert [path.suffix for path in files] == [".safetensors"] * (2 if embeddings_dir else 0)
        assert are_equal(results[0], results[1]) and are_equal(results[0], results[2])
        assert load_file(files[0])["prompt_embeds"].shape[0] == 1

    @pytest.mark.parametrize("what", ["weights", "configuration", "tokenizer", "damage", "family", "version"])
    def test_what_another_model_or_half_a_file_has_is_encoded_again(
        self, make_trainer, tiny_flux, tmp_path, monkeypatch, what
    ):
        settings = {**SHORT, "embeddings_dir": str(tmp_path / "embeddings")}
        trainer = make_trainer(**settings)
        trainer.policy.encoder.prefetch(trainer.train_rows, [0, 1])
        first = {path: path.read_bytes() for path in files_in(tmp_path / "embeddings")}
        assert len(first) == 2
        model = str(tiny_flux)
        if what == "family":
            settings["family"] = ShoutingFlux()
        elif what == "version":
            monkeypatch.setattr("paco_trl.utils.fingerprint.version", lambda name: "0.0.1")
        elif what == "damage":
            for path, content in first.items():
                path.write_bytes(content[:-4])
        else:
            pipeline = DiffusionPipeline.from_pretrained(model)
            if what == "weights":
                with torch.no_grad():
                    pipeline.text_encoder_2.shared.weight.mul_(2)
            elif what == "configuration":  # of sources
                pipeline.vae.register_to_config(scaling_factor=0.5)
            else:
                pipeline.tokenizer_2.add_tokens(["panels"])
                pipeline.text_encoder_2.resize_token_embeddings(len(pipeline.tokenizer_2))
            model = str(tmp_path / "other")
            pipeline.save_pretrained(model)
        trainer = make_trainer(**settings, model=model)
        encoded = count_images(trainer.pipeline.text_encoder_2)
        trainer.policy.encoder.prefetch(trainer.train_rows, [0, 1])
        assert len(encoded) == 2
        if what == "damage":
            assert {path: path.read_bytes() for path in files_in(tmp_path / "embeddings")} == first
        else:
            assert len(files_in(tmp_path / "embeddings")) == 4

    def test_resumes_exactly_without_encoding(self, make_trainer, tmp_path):
        settings = {**SHORT, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
        whole = make_trainer(**settings, output_dir=str(tmp_path / "whole"))
        whole.train()
        settings["embeddings_dir"] = str(tmp_path / "embeddings")
        make_trainer(**settings, output_dir=str(tmp_path / "first")).train()
        # In the middle of the second round; the checkpoint of a run without the directory resumes with it
        for name in ("whole", "first"):
            output = tmp_path / f"{name}-resumed"
            shutil.copytree(tmp_path / name / "checkpoint-3", output / "checkpoint-3")
            resumed = make_trainer(**settings, output_dir=str(output))
            encoded = count_images(resumed.pipeline.text_encoder_2)
            resumed.train(resume_from_checkpoint=True)
            assert resumed.state.global_step == 4 and not encoded
            assert are_equal(weights_of(resumed), weights_of(whole))

    def test_source_images_too(self, klein, dataset, tmp_path):  # noqa: F811
        results = []
        for number, folder in enumerate([None, tmp_path / "embeddings", tmp_path / "embeddings"]):
            options = {} if folder is None else {"embeddings_dir": str(folder)}
            trainer = make(klein, dataset, tmp_path / str(number), **options)
            texts, images = count_images(trainer.pipeline.text_encoder), count_images(trainer.pipeline.vae.encoder)
            trainer.train()
            assert bool(texts) is bool(images) is (number < 2)
            results.append(weights_of(trainer))
        assert are_equal(*results[::2]) and are_equal(*results[:2])


@pytest.mark.parametrize("is_held", [False, True])
def test_what_was_fetched_is_freed_with_its_last_reference(make_trainer, is_held):
    """Its embeddings are on the accelerator: they must not wait for the garbage collector."""
    trainer = make_trainer()
    policy, rows = trainer.policy, trainer.train_rows
    policy.encoder.prefetch(rows, [0])
    round = Round(rows, [0], 1, (0, 3, 0), rows.training_sizes)
    gc.disable()
    try:
        fetched = policy.encoder.encode(round, [0])
        with policy.on_device(), torch.no_grad():
            images = policy.generate(Batch(round.samples), fetched, 2)
        assert len(images) == 1 and fetched.source_images(0) == []
        if is_held:
            fetched.cycle = fetched
        reference = weakref.ref(fetched)
        del fetched
        assert (reference() is not None) == is_held
    finally:
        gc.enable()
