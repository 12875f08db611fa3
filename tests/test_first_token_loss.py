# SPDX-License-Identifier: Apache-2.0
"""The loss of PaCo-Reward against its formulas, written out response by response in plain Python."""

import pytest
import torch

from paco_trl.trainer import first_token_weighted_loss
from paco_trl.trainer.first_token_loss import first_token_weights
from testing_utils import closed_form


NAN, INF = float("nan"), float("inf")

# Responses of 1, 2, 5, 7 and no tokens in rows of 9, placed at the left, the right and in the middle
LENGTHS = [1, 2, 5, 7, 0]
STARTS = {"padding right": [0, 0, 0, 0, 0], "padding left": [8, 7, 4, 2, 0], "padding both": [3, 0, 4, 1, 0]}
VARIANTS = ["paper", "released"]


def batch_of(lengths, starts, width=9):
    """Log-probabilities (B, T), float64, and a boolean mask."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(len(lengths), width, generator=generator, dtype=torch.float64) * 3 - 0.05
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mask[row, start : start + length] = True
    return log_probs, mask


def responses(log_probs, mask):
    return [row[keep].tolist() for row, keep in zip(log_probs, mask, strict=True) if keep.any()]


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("a", [0.0, 0.1, 0.5, 1.0, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_closed_forms(starts, a, variant):
    log_probs, mask = batch_of(LENGTHS, starts)
    loss = first_token_weighted_loss(log_probs, mask, a, variant).item()
    rows = responses(log_probs, mask)
    assert [len(row) for row in rows] == LENGTHS[:4]  # the one without a token does not count
    assert loss == pytest.approx(closed_form(rows, a, variant), rel=1e-6)
    # Twins: neither another a, nor the other variant, nor the last token in the place of the first
    others = [closed_form(rows, 0.3, variant)]
    if a is None:  # nor the mean over the responses of their means
        others.append(sum(closed_form([row], None, variant) for row in rows) / 4)
    else:
        others.append(closed_form(rows, a, VARIANTS[variant == "paper"]))
        others.append(closed_form([row[::-1] for row in rows], a, variant))
    for other in others:
        assert loss != pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("a", [0.1, None])
@pytest.mark.parametrize("variant", VARIANTS)
class TestMask:
    @pytest.mark.parametrize("garbage", [NAN, -INF])
    def test_anything_outside_of_it_does_not_matter(self, a, variant, garbage):
        log_probs, mask = batch_of(LENGTHS, STARTS["padding both"])
        weights = first_token_weights(mask, a, variant)
        assert weights.dtype == torch.float32 and weights[~mask].count_nonzero() == 0
        results = []
        for values in (log_probs, torch.where(mask, log_probs, garbage)):
            leaf = values.clone().requires_grad_()
            loss = first_token_weighted_loss(leaf, mask, a, variant)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
        assert results[0][0] == results[1][0] and torch.isfinite(results[0][0])
        assert torch.equal(results[0][1], results[1][1])
        assert results[1][1][~mask].count_nonzero() == 0 and results[0][1].abs().sum() > 0.1
        # Twin: inside it, garbage is seen
        inside = log_probs.clone()
        inside[3, 1] = inside[3, 2] = -INF
        assert not torch.isfinite(first_token_weighted_loss(inside, mask, a, variant))

    def test_nothing_at_all_is_zero(self, a, variant):
        log_probs = torch.full((2, 3), NAN, requires_grad=True)
        loss = first_token_weighted_loss(log_probs, torch.zeros(2, 3), a, variant)
        assert loss == 0
        loss.backward()
        assert torch.equal(log_probs.grad, torch.zeros(2, 3))


def test_the_dtype_is_that_of_the_log_probabilities_or_better():
    log_probs, mask = batch_of(LENGTHS, STARTS["padding left"])
    assert first_token_weighted_loss(log_probs, mask, 0.1).dtype == torch.float64
    # A sum of 4000 terms in bfloat16 would be off by percents
    long, long_mask = batch_of([4000], [0], width=4000)
    low = long.bfloat16()
    loss = first_token_weighted_loss(low, long_mask, 0.1)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(closed_form(responses(low.double(), long_mask), 0.1, "paper"), rel=1e-5)


def test_an_unknown_variant():
    with pytest.raises(ValueError, match="'Paper'"):
        first_token_weighted_loss(*batch_of(LENGTHS, STARTS["padding left"]), None, "Paper")
