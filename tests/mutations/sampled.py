# SPDX-License-Identifier: Apache-2.0
"""Planted errors in lines of every area that no error of the other lists touches."""

# fmt: off
P = "paco_trl/"

MUTANTS = [
    (P + "rollout/sde.py", "np.random.SeedSequence(key)", "np.random.SeedSequence(sorted(key))", "tests/test_sde.py tests/test_rollout.py"),
    (P + "rollout/sde.py", "if len(generator) != len(mean):", "if len(generator) < len(mean):", "tests/test_sde.py::TestRefusals"),
    (P + "rollout/sde.py", 'for option in ("stochastic_sampling", "invert_sigmas"):', 'for option in ("stochastic_sampling",):', "tests/test_scheduler.py"),
    (P + "checkpointing/weights.py", "{**buffers, **state_dict}", "state_dict", "tests/test_full_finetuning.py::TestAllWeights"),
    (P + "trainer/paco_nft_trainer.py", "count = valid.sum().clamp(min=1)", "count = len(valid)", "tests/test_paco_nft_trainer.py tests/test_awm.py"),
    (P + "rollout/families/z_image.py", "enable_thinking=True) > MAX_TOKENS", "enable_thinking=False) > MAX_TOKENS", "tests/test_families.py::TestTruncation"),
    (P + "rollout/families/qwen_image_21.py", "super().edited_size(pipeline, sizes[-1:], area)", "super().edited_size(pipeline, sizes, area)", "tests/test_families.py::TestEditedSizes"),
    (P + "rollout/families/qwen_image_21.py", "if is_image.sum() != expected:", "if is_image.sum() > expected:", "tests/test_families.py::TestQwenImage21"),
    (P + "rollout/families/unlisted.py", '_REFUSED_ARGUMENTS = ("strength", ', '_REFUSED_ARGUMENTS = (', "tests/test_unlisted_pipelines.py"),
    (P + "rollout/families/base.py", "return max(1, round(height / step)) * step,", "return round(height / step) * step,", "tests/test_families.py::TestEditedSizes"),
    (P + "rollout/families/base.py", 'if guidance_scale > 1 and not pipeline.transformer.config.get("guidance_embeds", True):', 'if False:', "tests/test_families.py::TestSettingsThatWouldBeIgnored"),
    (P + "dataset_building/agreement.py", "len(ranks[0]) < 3", "len(ranks[0]) < 2", "tests/test_build_pairs.py::TestAgreement"),
    (P + "dataset_building/agreement.py", "sum(sign != 0 for sign in signs)", "len(signs)", "tests/test_build_pairs.py::TestAgreement"),
    (P + "dataset_building/panels.py", "for panel in (reference, *candidates)]", "for panel in candidates]", "tests/test_pair_panels.py::TestInstances"),
    (P + "dataset_building/pairs.py", "key = frozenset((reference, candidate))", "key = (reference, candidate)", "tests/test_build_pairs.py"),
    (P + "dataset_building/pairs.py", "ranks[vote.best] == min(ranks) and ranks.count(min(ranks)) == 1 for", "ranks[vote.best] == min(ranks) for", "tests/test_build_pairs.py"),
    (P + "dataset_building/pairs.py", "ranks[index] == max(ranks) > min(ranks)", "ranks[index] == max(ranks)", "tests/test_build_pairs.py"),
    (P + "dataset_building/pairs.py", "hashes[pair.first] != hashes[pair.second]]", "pair.first != pair.second]", "tests/test_build_pairs.py"),
    (P + "dataset_building/rank.py", "sum(other > score for other in yes)", "sum(other >= score for other in yes)", "tests/test_build_pairs.py tests/test_build_dataset.py"),
    (P + "dataset_building/rank.py", "if (who, record.get(\"scorer\")) != (judge.name, scorer):", "if False:", "tests/test_build_pairs.py tests/test_build_dataset.py"),
    (P + "dataset_building/diversify.py", "changed = nearest > np.maximum(before, 0)", "changed = nearest > before", "tests/test_diversify.py"),
    (P + "rewards/image_rewards.py", "MAX_GAIN = 1.1", "MAX_GAIN = 3.0", "tests/test_pixel_rewards.py::TestDuplicateReward"),
    (P + "hub/settings.py", "if value is not None and not str(value).isidentifier():", "if False:", "tests/test_model_cards.py::TestSettings"),
    (P + "hub/settings.py", "if not name.isidentifier() or not all(", "if not all(", "tests/test_model_cards.py::TestSettings"),
    (P + "utils/addresses.py", "if address.username or address.password or address.query:", "if address.username or address.password:", "tests/test_served_judge.py tests/test_serve.py"),
    (P + "image_benchmarks/gedit_protocols.py", 'f"0/{seed}/{attempt}"', 'f"0/{seed}"', "tests/test_gedit.py"),
    (P + "image_benchmarks/leakage.py", "max(_MIN_SHARED, NEAR_DUPLICATE * min(len(own), len(texts[row])))", "max(_MIN_SHARED, NEAR_DUPLICATE * len(own))", "tests/test_leakage.py"),
    (P + "image_benchmarks/leakage.py", 'row_of.get(" ".join(words_of(text)))', 'row_of.get(text)', "tests/test_leakage.py"),
    (P + "generation/grids.py", "keyed_generator(seed, panel) if panel else", "keyed_generator(seed, 1) if panel else", "tests/test_generate_grids.py tests/test_stories.py"),
    (P + "generation/grids.py", 'noise = 0 if panel_generation == "shared_noise" else panel', 'noise = panel', "tests/test_generate_grids.py tests/test_stories.py"),
    (P + "generation/grids.py", "        if image.size != (batch.width, batch.height):", "        if False:", "tests/test_generate_grids.py"),
    (P + "utils/names.py", 'return f"{cached[1]}/{cached[2]}" if cached else re.split', 'return re.split', "tests/test_model_cards.py::TestLicenses"),
    (P + "image_benchmarks/statistics.py", "if not math.isnan(value):", "if True:", "tests/test_t2is_bench.py::TestStatistics"),
]
