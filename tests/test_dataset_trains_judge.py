# SPDX-License-Identifier: Apache-2.0
"""A built dataset trains a judge as it is, and what the judge learns holds for prompts that it has not seen."""

import pytest
from datasets import load_from_disk

from paco_trl import PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.dataset_building import (
    StageFolder,
    annotation_files,
    build_pairs,
    make_instances,
    rank_automatically,
    read_annotations,
)
from planted_world import PlantedWorld


@pytest.mark.slow
def test_labels_by_construction_teach_what_is_true(tiny_qwen, tmp_path):
    """Two grids a prompt, one red and one blue; nobody says which panels are consistent."""
    world = PlantedWorld(tmp_path, num_prompts=36, seeds=(0, 1), colours=("red", "blue"), size=56)
    instances = make_instances(world.panels, max_instances_per_prompt=12)
    rank_automatically(instances, world.panels, tmp_path / "annotations")
    annotations = read_annotations(annotation_files(tmp_path / "annotations"), instances)
    pairs, _, _ = build_pairs(instances, world.panels, world.prompts, annotations, test_size=0.2)
    folder = StageFolder(tmp_path / "pairs")
    folder.finish(pairs, {})

    splits = load_from_disk(folder.path / "dataset")
    trainer = PaCoRewardTrainer(
        model=str(tiny_qwen),
        args=PaCoRewardConfig(
            str(tmp_path / "judge"),
            first_token_weight=1.0,  # the pairs are labels alone
            learning_rate=5e-3,
            num_train_epochs=5,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=32,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
    )
    untrained = trainer.evaluate()
    assert 0.2 < untrained["eval_auroc"] < 0.8
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_auroc"] > 0.85
    assert metrics["eval_decision_accuracy"] > 0.75

    # Not by the labels, but by the truth, and over all pairs of panels of a prompt that was held out
    prompt = splits["test"]["group"][0]
    panels = {row["id"]: row["image"] for row in world.panels if row["prompt_id"] == prompt}
    names = [(first, second) for first in panels for second in panels if first < second]
    question = splits["test"][0]["prompt"][0]["content"]
    judge = PaCoReward(trainer.model, trainer.processing_class)
    scores = judge.score([(panels[first], panels[second]) for first, second in names], question)
    consistent = [score for score, pair in zip(scores, names, strict=True) if world.is_consistent(*pair)]
    others = [score for score, pair in zip(scores, names, strict=True) if not world.is_consistent(*pair)]
    assert (len(consistent), len(others)) == (12, 16)
    assert sum(consistent) / len(consistent) > sum(others) / len(others) + 0.3
