# SPDX-License-Identifier: Apache-2.0
"""What is relied on of other libraries' private surface, so that a release that changes it fails here and loudly."""

import dataclasses
import inspect
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer, SFTConfig
from trl.trainer import grpo_trainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from paco_trl.commands.env import TESTED_WITH
from paco_trl.data import make_pair
from paco_trl.rewards import panel_similarity_reward, redness_reward
from paco_trl.trainer import round_trainer
from paco_trl.trainer.config_utils import REFUSED_GRPO_FIELDS, REFUSED_SFT_FIELDS, USED_GRPO_FIELDS
from paco_trl.trainer.data_collator import TOKEN_TENSORS


def test_the_collator_makes_no_other_tensors_of_tokens(tiny_qwen):
    """A new tensor of shape (batch, tokens) would not be cut with the others."""
    processor = AutoProcessor.from_pretrained(tiny_qwen)
    collator = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    pair = make_pair(*(Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")), "Same?", "No")
    batch = collator([pair])
    length = batch["input_ids"].shape[1]
    assert length > 10
    assert {name for name, tensor in batch.items() if tensor.shape[1:2] == (length,)} <= TOKEN_TENSORS


def test_the_suite_runs_with_what_is_tested():
    constraints = (Path(__file__).parent.parent / ".ci" / "constraints.txt").read_text()
    assert dict(re.findall(r"^(\w+)==(.*)\.\*$", constraints, re.MULTILINE)) == TESTED_WITH


def test_the_generator_takes_32_bits_of_a_seed():
    first, second, other = (
        torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32, 6)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def trl_rewards(trainer, rewards_per_func):
    """Advantages and metrics by the very lines of GRPOTrainer."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    lines = source[source.index("        unscorable_mask =") : source.index("        # Log prompts and completions")]
    args = trainer.args
    own = SimpleNamespace(
        **{name: getattr(args, name) for name in ("multi_objective_aggregation", "scale_rewards", "num_generations")},
        **{name: getattr(trainer, name) for name in ("reward_weights", "reward_funcs", "reward_func_names")},
        accelerator=trainer.accelerator,
        _metrics={"train": defaultdict(list)},
    )
    variables = {"self": own, "rewards_per_func": rewards_per_func, "num_generations": args.num_generations}
    variables |= {"device": "cpu", "mode": "train", "prompts": [None] * len(rewards_per_func)}
    variables = vars(grpo_trainer) | variables
    exec(textwrap.dedent(lines), variables)
    return variables["advantages"], own._metrics["train"]


SCALES = {"sum_then_normalize": ("group", "batch", "none"), "normalize_then_sum": ("group", "batch")}


@pytest.mark.parametrize("aggregation, scale_rewards", [(name, scale) for name in SCALES for scale in SCALES[name]])
def test_advantages_and_reward_metrics_are_those_of_trl(make_trainer, monkeypatch, aggregation, scale_rewards):
    settings = {"multi_objective_aggregation": aggregation, "scale_rewards": scale_rewards, "advantage_clip": None}
    rewards = [redness_reward, panel_similarity_reward]
    trainer = make_trainer(reward_funcs=rewards, reward_weights=[0.3, 2.0], max_steps=1, **settings)
    seen = {}
    roll_out, normalize = trainer._roll_out, round_trainer.group_advantages
    trainer._roll_out = lambda *args: seen.setdefault("scores", roll_out(*args))

    def keep_advantages(*args):
        found = normalize(*args)
        seen["advantages"] = found.values
        return found

    monkeypatch.setattr(round_trainer, "group_advantages", keep_advantages)
    trainer.train()
    rewards = seen["scores"][0].rewards
    assert rewards.shape == (16, 2) and (rewards.std(dim=0) > 1e-5).all()
    advantages, metrics = trl_rewards(trainer, rewards)
    largest = advantages.abs().max().item()
    assert largest > 1e-5
    # TRL computes in float32, where the mean of the rewards is rounded
    torch.testing.assert_close(seen["advantages"], advantages, rtol=1e-3, atol=1e-3 * largest)
    logged = trainer.state.log_history[0]
    names = [f"rewards/{name}/{part}" for name in trainer.reward_func_names for part in ("mean", "std")]
    for name in ("reward", "reward_std", "frac_reward_zero_std", *names):
        assert logged[name] == pytest.approx(metrics[name][0], rel=1e-4, abs=1e-6), name
    assert abs(logged["reward"]) > 1e-2  # 0 by construction, if it were that of the normalized rewards


# Fields of TrainingArguments that have in our trainers the effect that they have in Trainer
USED_FIELDS = set(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon bf16
    ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug
    deepspeed disable_tqdm enable_jit_checkpoint eval_delay eval_on_start eval_steps eval_strategy full_determinism
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
    hub_model_id hub_private_repo hub_revision hub_strategy hub_token learning_rate load_best_model_at_end log_level
    log_level_replica log_on_each_node logging_first_step logging_steps logging_strategy lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_steps metric_for_best_model num_train_epochs optim optim_args
    optim_target_modules output_dir per_device_eval_batch_size per_device_train_batch_size project push_to_hub report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_steps save_strategy
    save_total_limit seed skip_memory_metrics tf32 torch_empty_cache_steps trackio_bucket_id trackio_space_id
    trackio_static_space_id use_cpu warmup_steps weight_decay
    """.split()
)
# Of these their own documentation says that they do nothing, or nothing on their own: flags for scripts, options of a
# switch that is refused, what the launcher says
INERT_FIELDS = {"do_train", "do_eval", "do_predict", "fsdp_config", "local_rank"}
OF_PAIRS = set(
    """
    activation_offloading auto_find_batch_size average_tokens_across_devices chat_template_path data_seed
    dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc eos_token eval_accumulation_steps
    eval_use_gather_object fp16 ignore_data_skip include_num_input_tokens_seen logging_nan_inf_filter max_length
    model_init_kwargs neftune_noise_alpha save_only_model torch_compile torch_compile_backend torch_compile_mode
    train_sampling_strategy trust_remote_code
    """.split()
)


@pytest.mark.parametrize(
    "parent, refused, used",
    [
        # `logging_nan_inf_filter` is always False, see PaCoGRPOConfig; `use_cpu` sets `dataloader_pin_memory`; of
        # `include_num_input_tokens_seen`, whose default the command line reads as False, Trainer warns itself
        (
            GRPOConfig,
            REFUSED_GRPO_FIELDS,
            set(USED_GRPO_FIELDS)
            | {"logging_nan_inf_filter", "dataloader_pin_memory", "include_num_input_tokens_seen"},
        ),
        (SFTConfig, REFUSED_SFT_FIELDS, OF_PAIRS),
    ],
)
def test_every_inherited_field_is_used_or_refused(parent, refused, used):
    """A new one needs a decision: an option that is taken without effect is an error in somebody's experiment."""
    inherited = {field.name for field in dataclasses.fields(parent)}
    assert inherited == USED_FIELDS | INERT_FIELDS | used | set(refused)
    assert not set(refused) & (USED_FIELDS | INERT_FIELDS | used)
