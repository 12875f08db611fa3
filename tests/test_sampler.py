# SPDX-License-Identifier: Apache-2.0
"""The sampler that training, evaluation and the doctor share."""

import gc
import weakref

import pytest
import torch


@pytest.mark.parametrize("is_held", [False, True])
def test_what_was_fetched_is_freed_with_its_last_reference(make_trainer, is_held):
    """Its embeddings are on the accelerator: they must not wait for the garbage collector."""
    sampler, rows = make_trainer().sampler, make_trainer().train_rows
    rows.measure(sampler.policy.pipeline, sampler.policy.family)
    sampler.prompt_encoder.encode(rows, [0])
    gc.disable()
    try:
        fetched = sampler.prompt_encoder.fetch(rows, [0])
        with sampler.ready(), torch.no_grad():
            images, _ = sampler.generate(fetched, [0], [(0, 3, 0, 0, 0)], rows.training_sizes[0], 2)
        assert len(images) == 1 and fetched.read(0)["rows"] == 2 and fetched.source_images(0) == []
        if is_held:
            fetched.cycle = fetched
        reference = weakref.ref(fetched)
        del fetched
        assert (reference() is not None) == is_held
    finally:
        gc.enable()
