# SPDX-License-Identifier: Apache-2.0
"""The loss of PaCo-Reward against its formulas, written out response by response in plain Python."""

import pytest
import torch

from paco_trl.trainer import first_token_weighted_loss
from paco_trl.trainer.first_token_loss import first_token_weights, token_weights


NAN, INF = float("nan"), float("inf")

# Responses of 1, 2, 5 and 7 tokens in rows of 9, placed at the left, the right and in the middle
LENGTHS = [1, 2, 5, 7]
STARTS = {"padding right": [0, 0, 0, 0], "padding left": [8, 7, 4, 2], "padding both": [3, 0, 4, 1]}


def batch_of(lengths, starts, width=9, seed=0):
    """Log-probabilities (B, T), float64, and a boolean mask."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(len(lengths), width, generator=generator, dtype=torch.float64) * 3 - 0.05
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mask[row, start : start + length] = True
    return log_probs, mask


def responses(log_probs, mask):
    return [row[keep].tolist() for row, keep in zip(log_probs, mask, strict=True) if keep.any()]


def paper(rows, a):
    """Sec. 3.2: a for y_0, (1 - a) / (n - 1) for the sum of the others, the mean over the responses."""
    losses = []
    for y in rows:
        n = len(y)
        losses.append(-y[0] if n == 1 else -(a * y[0] + (1 - a) / (n - 1) * sum(y[1:])))
    return sum(losses) / len(losses)


def released(rows, a):
    """The published code: a for y_0, n (1 - a) / (n - 1) for every other token, divided by the number of tokens."""
    total = 0.0
    for y in rows:
        n = len(y)
        total -= a * y[0] + sum(n * (1 - a) / (n - 1) * value for value in y[1:])
    return total / sum(map(len, rows))


def likelihood(rows):
    values = [value for y in rows for value in y]
    return -sum(values) / len(values)


class TestClosedForms:
    @pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
    @pytest.mark.parametrize("a", [0.0, 0.1, 0.5, 1.0])
    @pytest.mark.parametrize(("variant", "by_hand"), [("paper", paper), ("released", released)])
    def test_batch(self, starts, a, variant, by_hand):
        log_probs, mask = batch_of(LENGTHS, starts)
        loss = first_token_weighted_loss(log_probs, mask, a, variant).item()
        rows = responses(log_probs, mask)
        assert [len(row) for row in rows] == LENGTHS
        assert loss == pytest.approx(by_hand(rows, a), rel=1e-6)
        # Twin: neither the other variant, nor another a, nor the last token in the place of the first
        for other in (
            (released if by_hand is paper else paper)(rows, a),
            by_hand(rows, 0.3),
            by_hand([row[::-1] for row in rows], a),
        ):
            assert loss != pytest.approx(other, rel=1e-3)

    @pytest.mark.parametrize("variant", ["paper", "released"])
    @pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
    def test_none_is_the_mean_over_the_tokens_of_the_batch(self, variant, starts):
        log_probs, mask = batch_of(LENGTHS, starts)
        rows = responses(log_probs, mask)
        loss = first_token_weighted_loss(log_probs, mask, None, variant).item()
        assert loss == pytest.approx(likelihood(rows), rel=1e-6)
        # Twin: not the mean over the responses of their means
        assert loss != pytest.approx(sum(likelihood([row]) for row in rows) / len(rows), rel=1e-3)

    @pytest.mark.parametrize(("variant", "ratio"), [("paper", 11.0), ("released", 0.11)])
    def test_what_the_decision_weighs_beside_a_token_of_the_reasons(self, variant, ratio):
        """n = 100, a = 0.1, from the gradients and from the weights."""
        log_probs, mask = batch_of([100], [3], width=105)
        log_probs.requires_grad_()
        first_token_weighted_loss(log_probs, mask, 0.1, variant).backward()
        gradient = -log_probs.grad[0]
        assert (gradient[3] / gradient[4]).item() == pytest.approx(ratio, rel=1e-5)
        assert gradient[4:103].tolist() == pytest.approx([gradient[4].item()] * 99)
        assert gradient.count_nonzero() == 100
        # The decision's share of one response's loss: a in the paper's, a / n in the released one
        assert gradient[3].item() == pytest.approx(0.1 if variant == "paper" else 0.001, rel=1e-6)
        first, others = token_weights(torch.tensor(100), 0.1, variant)
        assert (first / others).item() == pytest.approx(ratio, rel=1e-5)


class TestTokenWeights:
    @pytest.mark.parametrize("a", [0.0, 0.1, 0.6, 1.0, None])
    @pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
    def test_the_papers_weights_of_a_response_sum_to_one(self, a, starts):
        _, mask = batch_of(LENGTHS, starts)
        weights = first_token_weights(mask, a)
        assert weights.dtype == torch.float32 and weights.shape == mask.shape
        assert torch.equal(weights[~mask], torch.zeros(int((~mask).sum())))
        expected = torch.ones(4) if a is not None else torch.tensor(LENGTHS, dtype=torch.float32)
        torch.testing.assert_close(weights.sum(dim=1), expected)
        # Twin: the released ones sum to a for a decision alone, and to n - a (n - 1) otherwise
        if a is not None:
            sums = first_token_weights(mask, a, "released").sum(dim=1)
            torch.testing.assert_close(sums, torch.tensor([a, *(n - a * (n - 1) for n in LENGTHS[1:])]))


class TestMask:
    @pytest.mark.parametrize("a", [0.1, None])
    @pytest.mark.parametrize("variant", ["paper", "released"])
    @pytest.mark.parametrize("garbage", [NAN, -INF])
    def test_anything_outside_of_it_does_not_matter(self, a, variant, garbage):
        log_probs, mask = batch_of([*LENGTHS, 0], [*STARTS["padding both"], 0])
        results = []
        for values in (log_probs, torch.where(mask, log_probs, garbage)):
            leaf = values.clone().requires_grad_()
            loss = first_token_weighted_loss(leaf, mask, a, variant)
            loss.backward()
            results.append((loss.detach(), leaf.grad))
        assert results[0][0] == results[1][0] and torch.isfinite(results[0][0])
        assert torch.equal(results[0][1], results[1][1])
        assert torch.equal(results[1][1][~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))
        assert results[0][1].abs().sum() > 0.1
        # Twin: inside it, garbage is seen
        inside = log_probs.clone()
        inside[3, 1] = inside[3, 2] = -INF
        assert not torch.isfinite(first_token_weighted_loss(inside, mask, a, variant))

    @pytest.mark.parametrize("a", [0.1, None])
    @pytest.mark.parametrize("variant", ["paper", "released"])
    def test_rows_without_a_token_do_not_count(self, a, variant):
        log_probs, mask = batch_of(LENGTHS, STARTS["padding right"])
        more, more_mask = batch_of([0, *LENGTHS, 0, 0], [0, *STARTS["padding right"], 0, 0])
        more[1:5] = log_probs
        expected = first_token_weighted_loss(log_probs, mask, a, variant)
        assert first_token_weighted_loss(more, more_mask, a, variant).item() == pytest.approx(expected.item())
        # Twin: a row with one token more counts
        more_mask[0, 3] = True
        assert first_token_weighted_loss(more, more_mask, a, variant).item() != pytest.approx(expected.item())

    @pytest.mark.parametrize("a", [0.1, None])
    @pytest.mark.parametrize("variant", ["paper", "released"])
    def test_nothing_at_all_is_zero(self, a, variant):
        log_probs = torch.full((2, 3), NAN, requires_grad=True)
        loss = first_token_weighted_loss(log_probs, torch.zeros(2, 3), a, variant)
        assert loss == 0
        loss.backward()
        assert torch.equal(log_probs.grad, torch.zeros(2, 3))

    def test_the_dtype_is_that_of_the_log_probabilities_or_better(self):
        log_probs, mask = batch_of(LENGTHS, STARTS["padding left"])
        assert first_token_weighted_loss(log_probs, mask, 0.1).dtype == torch.float64
        # A sum of 4000 terms in bfloat16 would be off by percents
        long, long_mask = batch_of([4000], [0], width=4000)
        low = long.bfloat16()
        loss = first_token_weighted_loss(low, long_mask, 0.1)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(paper(responses(low.double(), long_mask), 0.1), rel=1e-5)


class TestErrors:
    def test_an_unknown_variant(self):
        log_probs, mask = batch_of(LENGTHS, STARTS["padding left"])
        with pytest.raises(ValueError, match="'Paper'"):
            first_token_weighted_loss(log_probs, mask, None, "Paper")
