# SPDX-License-Identifier: Apache-2.0
"""Rollout and replay: the unmodified diffusers pipeline as the policy."""

from .families import (
    FAMILIES,
    Family,
    Flux2Family,
    Flux2KleinFamily,
    FluxFamily,
    FluxKontextFamily,
    LongCatImageEditFamily,
    LongCatImageFamily,
    OvisImageFamily,
    QwenImage21Family,
    QwenImageEditFamily,
    QwenImageEditPlusFamily,
    QwenImageFamily,
    StableDiffusion3Family,
    UnlistedFamily,
    ZImageFamily,
    family_of,
)
from .pipeline_policy import EncodedImage, PipelinePolicy, RecordedStep, TransformerStep
from .policy import cast_floating_inputs, check_call_at, predict, score_step
from .sde import (
    SDE_TYPES,
    FlowMatchSDEScheduler,
    SDESettings,
    SDEStep,
    check_flow_matching,
    gaussian_log_prob,
    keyed_generator,
    sde_step,
)


__all__ = [
    "FAMILIES", "SDE_TYPES", "EncodedImage", "Family", "FlowMatchSDEScheduler", "Flux2Family", "Flux2KleinFamily",
    "FluxFamily", "FluxKontextFamily", "LongCatImageEditFamily", "LongCatImageFamily", "OvisImageFamily",
    "PipelinePolicy", "QwenImage21Family", "QwenImageEditFamily", "QwenImageEditPlusFamily", "QwenImageFamily",
    "RecordedStep", "SDESettings", "SDEStep", "StableDiffusion3Family", "TransformerStep", "UnlistedFamily",
    "ZImageFamily",
    "cast_floating_inputs", "check_call_at", "check_flow_matching", "family_of", "gaussian_log_prob",
    "keyed_generator", "predict", "score_step", "sde_step",
]  # fmt: skip
