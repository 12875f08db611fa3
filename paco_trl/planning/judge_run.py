# SPDX-License-Identifier: Apache-2.0
"""Memory of a judge, in a reward and in its own training."""

import math

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText

from ..rewards.paco_reward import read_judge_config
from ..trainer.paco_reward_config import PaCoRewardConfig
from .peaks import (
    PlanMode,
    cached_method,
    extrapolate,
    fake_weights,
    measure_peak,
    skip_equal_blocks,
    training_precision,
    weights_bytes,
)
from .plan import FLOAT32_BYTES, LIBRARIES_BYTES, MAX_BATCH_SIZE, MemoryPlan, Phase, PlanSettings, training_memory


_QWEN_MAX_PIXELS = 12_845_056  # default of Qwen2.5-VL's processor
QUESTION_TOKENS = 192  # a question with a theme of a few sentences, and the chat template
PAIR_TOKENS = 512  # a question, its answer and the reasons


def judge_tokens(pixels: int, text_tokens: int) -> int:
    """
    Count the tokens of a Qwen2.5-VL for images of so many pixels together, one per 28 x 28, and for a text. For other
    models it is an estimate.
    """
    return pixels // 28**2 + text_tokens


class JudgeNetwork:
    """A judge as in a reward. Only the language model is run; the vision tower counts by its weights."""

    def __init__(
        self,
        model: str,
        quantization: str | None,
        dtype: torch.dtype = torch.bfloat16,
        peft_config: LoraConfig | None = None,
    ):
        self.mode = PlanMode()
        self.quantization = quantization
        self.dtype = dtype
        with init_empty_weights():
            config = read_judge_config(model)
            self.network = AutoModelForImageTextToText.from_config(config, dtype=self.dtype).requires_grad_(False)
            self.model = self.network if peft_config is None else get_peft_model(self.network, peft_config)
        with skip_equal_blocks(self.model):
            fake_weights(self.model, self.mode)

    @cached_method
    def weights_bytes(self, module: nn.Module, trainable: bool | None = None, quantization: str | None = None) -> int:
        return weights_bytes(module, trainable, quantization)

    @cached_method
    def peak(self, batch_size: int, num_tokens: int, trains: bool = False, checkpointing: bool = False) -> int:
        decoder = self.network.get_decoder()
        width = self.network.config.get_text_config().hidden_size
        getattr(self.network, f"activation_checkpointing_{'enable' if checkpointing else 'disable'}")()
        with self.mode, training_precision(self.dtype, trains):
            embeds = torch.empty(batch_size, num_tokens, width, dtype=self.dtype, requires_grad=trains)

            def forward() -> torch.Tensor:
                return decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state

            return measure_peak(forward, self.model.train(trains), trains)


class JudgeRun:
    """Memory model of a judge's training."""

    max_batch_size = MAX_BATCH_SIZE

    def __init__(self, model: str, args: PaCoRewardConfig, peft_config: LoraConfig, quantization: str | None):
        self.args = args
        self.judge = JudgeNetwork(model, quantization, torch.bfloat16 if args.bf16 else torch.float32, peft_config)
        self.num_trained = sum(weight.numel() for weight in self.judge.model.parameters() if weight.requires_grad)
        pixels = _QWEN_MAX_PIXELS if args.max_pixels is None else args.max_pixels
        # Length of the longest pair
        self.num_tokens = min(judge_tokens(2 * pixels, PAIR_TOKENS), args.max_length or math.inf)
        self.size = f"{self.num_tokens} tokens, the longest pair that `max_pixels` and `max_length` admit"

    def plan(self, zero_stage: int | None, is_fsdp: bool) -> MemoryPlan:
        """Plan the run with the settings of its config."""
        return MemoryPlan(
            run=self,
            batch_size=self.args.per_device_train_batch_size,
            gradient_checkpointing=self.args.gradient_checkpointing,
            quantization=self.judge.quantization,
            zero_stage=zero_stage,
            is_fsdp=is_fsdp,
            num_processes=self.args.world_size,
        )

    def phases(self, settings: PlanSettings) -> list[Phase]:
        """Count the memory of loading, training and evaluation."""
        judge = self.judge
        frozen_bytes = judge.weights_bytes(judge.model, False, settings.quantization)
        element_size = FLOAT32_BYTES if settings.zero_stage is None else 2
        memory = training_memory(frozen_bytes, self.num_trained, element_size, settings, optim=self.args.optim)
        training = extrapolate(judge.peak, settings.batch_size, self.num_tokens, True, settings.gradient_checkpointing)
        evaluation = extrapolate(judge.peak, self.args.per_device_eval_batch_size, self.num_tokens)
        host = {"libraries": LIBRARIES_BYTES}
        return [
            Phase("load", {}, *settings.host_memory(host, {}, {"frozen weights": frozen_bytes})),
            Phase("train", memory.always | memory.micro_batch | {"activations": training}, host),
            Phase("evaluate", memory.always | {"activations": evaluation}, host),
        ]

    def commands(self, settings: PlanSettings) -> list[Phase]:
        """Count nothing: no command generates with a judge."""
        return []

    def savings(self, settings: PlanSettings) -> dict[str, bool]:
        """Return which options would save memory, the cheapest first."""
        return {
            "a smaller `--per_device_train_batch_size`": settings.batch_size > 1,
            "`--gradient_checkpointing`": not settings.gradient_checkpointing,
            "`--load_in_4bit`": settings.quantization is None,
            "`--accelerate_config zero3`": settings.could_use_zero3,
        }
