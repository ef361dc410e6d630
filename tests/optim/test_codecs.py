"""Codes of gradients as functions: what they lose, what they keep on average, and what they cost in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.runtime.exchange import Bucket, Piece
from trine.optim.runtime.exchange.codecs import (
    CLIP,
    Cast,
    Exact,
    Int8,
    OneBit,
    Qsgd,
    Ternary,
    pack,
    pad_rows,
    unpack,
)
from trine.optim.runtime.exchange.powersgd import PowerSGD, matrix_shape
from trine.optim.runtime.exchange.residuals import Residuals
from trine.optim.runtime.exchange.terngrad import TernGrad, scalers_of
from trine.optim.runtime.exchange.two_phase import Alone, TwoPhase

seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(seed: int, *shape: int, spread: float = 3.0) -> torch.Tensor:
    """Numbers over several orders of magnitude, as gradients are."""
    source = generator(seed)
    magnitude = torch.randn(shape, generator=source) * spread
    return torch.randn(shape, generator=source) * magnitude.exp()


def codecs(seed: int = 0) -> list[Any]:
    return [
        Int8(),
        Int8(generator=generator(seed)),
        Qsgd(generator(seed)),
        Qsgd(generator(seed), levels=7),
        Qsgd(generator(seed), levels=1),
        OneBit(),
        Ternary(generator(seed)),
        Cast(torch.bfloat16),
        Cast(torch.float16),
        Exact(torch.float32),
    ]


def there_and_back(codec: Any, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)
    return result


# --- packing -----------------------------------------------------------------------------------


@given(bits=st.sampled_from([1, 2, 4, 8]), rows=st.integers(1, 4), octets=st.integers(1, 40), seed=seeds)
@settings(max_examples=50)
def test_what_is_packed_is_unpacked(bits: int, rows: int, octets: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, octets * 8), generator=generator(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, octets * bits)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: f"{codec.name}-{codec.bits:.3g}")
def test_payload_has_the_bytes_that_its_bits_say(codec: Any) -> None:
    rows = drawn(1, 2, codec.padded(2**16))
    assert codec.encode(rows).numel() == pytest.approx(rows.numel() * codec.bits / 8, rel=1e-3)


@given(length=st.integers(1, 5000), ranks=st.integers(1, 9), seed=seeds)
@settings(max_examples=40)
def test_any_length_goes_through(length: int, ranks: int, seed: int) -> None:
    flat = drawn(seed, length)
    for codec in codecs(seed):
        rows = pad_rows(flat, ranks, codec)
        back = there_and_back(codec, rows)
        assert back.shape == rows.shape
        assert torch.equal(rows.view(-1)[:length], flat)
        assert not rows.view(-1)[length:].any()


# --- what is lost ------------------------------------------------------------------------------


@given(seed=seeds, spread=st.floats(0.0, 6.0))
@settings(max_examples=60)
def test_int8_is_within_half_a_level_and_leaves_exactly_the_rest(seed: int, spread: float) -> None:
    rows = drawn(seed, 2, 1024, spread=spread)
    back = there_and_back(Int8(), rows)
    levels = rows.view(2, -1, 64).abs().amax(-1, keepdim=True) / 127
    assert ((rows - back).view(2, -1, 64).abs() <= levels * 0.505).all()
    left = rows - back
    assert torch.equal(back + left, rows)  # bit for bit: what is sent and what is kept are the gradient


@given(seed=seeds)
@settings(max_examples=40)
def test_one_bit_loses_what_its_scale_says(seed: int) -> None:
    rows = drawn(seed, 1, 4096, spread=1.0).double()
    lost = (rows - there_and_back(OneBit(), rows)).square().view(-1, 512).sum(-1)
    whole = rows.view(-1, 512)
    predicted = whole.square().sum(-1) - whole.abs().sum(-1).square() / 512
    assert torch.allclose(lost, predicted, rtol=1e-4)
    assert (lost < whole.square().sum(-1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_round_to_nearest(dtype: torch.dtype) -> None:
    rows = drawn(3, 2, 100, spread=1.0)
    assert torch.equal(there_and_back(Cast(dtype), rows), rows.to(dtype).to(torch.float32))


def mean_error_in_standard_errors(codec: Any, rows: torch.Tensor, step: torch.Tensor, draws: int) -> float:
    """How far the mean of many draws is from ``rows``, where one draw's deviation is at most half of ``step``."""
    summed = torch.zeros_like(rows)
    for _ in range(draws):
        summed += there_and_back(codec, rows)
    standard_error = step / 2 / math.sqrt(draws)
    return float(((summed / draws - rows).abs() / standard_error).max())


DRAWS = 1000
#: Of the largest of a few hundred means: beyond this by chance once in 10⁷ suites.
BOUND = 6.5


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_is_right_on_average(levels: int) -> None:
    rows = drawn(5, 1, 256, spread=1.0).double()
    step = (rows.abs().amax() / levels).expand_as(rows)
    assert mean_error_in_standard_errors(Qsgd(generator(1), levels), rows, step, DRAWS) < BOUND


def test_stochastic_int8_is_right_on_average_and_the_nearest_level_is_not() -> None:
    rows = drawn(5, 1, 256, spread=1.0).double()
    step = (rows.abs().amax() / 127).expand_as(rows)
    assert mean_error_in_standard_errors(Int8(generator=generator(1)), rows, step, DRAWS) < BOUND
    assert mean_error_in_standard_errors(Int8(), rows, step, DRAWS) > 3 * BOUND


def test_ternary_is_right_on_average_of_what_it_clips_to() -> None:
    rows = drawn(6, 1, 256, spread=1.0).double()
    limit = CLIP * float(rows.std(correction=0))
    clipped = rows.clamp(-limit, limit)
    assert not torch.equal(clipped, rows)
    step = torch.full_like(rows, 2 * limit)

    class Clipped:
        """Decodes the same; compared with the clipped gradient."""

        def __init__(self) -> None:
            self.codec = Ternary(generator(2))

        def encode(self, _: torch.Tensor) -> torch.Tensor:
            return self.codec.encode(rows)

        def decode(self, *arguments: Any) -> torch.Tensor:
            return self.codec.decode(*arguments)

    assert mean_error_in_standard_errors(Clipped(), clipped, step, DRAWS) < BOUND


@given(seed=seeds)
@settings(max_examples=30)
def test_terngrad_sends_three_values_of_each_piece(seed: int) -> None:
    flat = drawn(seed, 300, spread=1.0)
    pieces = (Piece("a", 0, (10, 20)), Piece("b", 200, (100,)))
    clipped, scalers = scalers_of(Bucket(flat, pieces))
    bucket = Bucket(flat.clone(), pieces)
    TernGrad(generator(seed), Alone(1)).mean(bucket)
    for piece, scaler in zip(pieces, scalers, strict=True):
        part = bucket.flat[piece.start : piece.start + math.prod(piece.shape)]
        assert set(part.abs().unique().tolist()) <= {0.0, float(scaler)}
        same_sign = part * clipped[piece.start : piece.start + part.numel()] >= 0
        assert same_sign.all()


# --- numbers that are not finite, and zeros ----------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: f"{codec.name}-{codec.bits:.3g}")
def test_a_number_that_is_not_finite_stays_so(codec: Any, poison: float) -> None:
    rows = drawn(7, 2, 4096, spread=1.0)
    rows[1, 17] = poison
    back = there_and_back(codec, rows)
    assert not torch.isfinite(back[1]).all()
    assert torch.isfinite(back[0]).all()


@pytest.mark.parametrize(
    "codec", [c for c in codecs() if c.name != "onebit"], ids=lambda codec: f"{codec.name}-{codec.bits:.3g}"
)
def test_zeros_stay_zeros_and_the_tiniest_numbers_do_not_break(codec: Any) -> None:
    rows = torch.zeros(1, 512)
    assert not there_and_back(codec, rows).any()
    rows[0, 3] = 1e-44  # a denormal
    assert torch.isfinite(there_and_back(codec, rows)).all()


# --- the exchange, with ranks that are all alike -------------------------------------------------


def bucket_of(flat: torch.Tensor) -> Bucket:
    return Bucket(flat, (Piece("weight", 0, (flat.numel(),)),))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_nothing_is_lost_by_the_exchange_itself(ranks: int) -> None:
    row = drawn(8, 40).double()
    bucket = bucket_of(row.repeat(ranks))  # every part alike, so that every rank's answer is this one's
    TwoPhase(Exact(), Alone(ranks)).mean(bucket)
    assert torch.allclose(bucket.flat, row.repeat(ranks), rtol=1e-14)


def test_residuals_make_up_for_what_one_bit_loses() -> None:
    """Over many steps the mean of what arrives is the gradient; without residuals it never is."""
    gradient = drawn(9, 512, spread=0.0).double()
    errors = []
    for residuals in (Residuals(1, 0), None):
        reduction = TwoPhase(OneBit(), Alone(1), residuals)
        summed = torch.zeros_like(gradient)
        for _ in range(200):
            bucket = bucket_of(gradient.clone())
            reduction.mean(bucket)
            summed += bucket.flat
        errors.append(float((summed / 200 - gradient).norm() / gradient.norm()))
    assert errors[0] < 0.05
    assert errors[1] > 0.5


# --- residuals -----------------------------------------------------------------------------------


def test_residuals_change_only_with_steps_that_were_taken() -> None:
    residuals = Residuals(1, 0, staged=True)
    bucket = bucket_of(torch.zeros(4))
    residuals.keep_own(bucket, torch.ones(4))
    residuals.settle(False)
    assert not residuals.own(bucket, torch.float32).any()
    residuals.keep_own(bucket, torch.ones(4))
    assert not residuals.own(bucket, torch.float32).any()  # not yet
    residuals.settle(True)
    assert residuals.own(bucket, torch.float32).tolist() == [1.0] * 4


def test_residuals_follow_the_loss_scale() -> None:
    residuals = Residuals(1, 0)
    bucket = bucket_of(torch.zeros(4))
    residuals.keep_own(bucket, torch.ones(4))
    residuals.keep_averaged(bucket, torch.ones(4))
    residuals.rescale(0.5)
    assert residuals.own(bucket, torch.float32).tolist() == [0.5] * 4
    assert residuals.averaged(bucket, 4, torch.float32).tolist() == [0.5] * 4


def test_residuals_of_means_survive_new_buckets_and_checkpoints() -> None:
    """Rank 1 of 2 averages the second half of a bucket; its residual there counts twice as one of the terms."""
    residuals = Residuals(2, 1)
    old = Bucket(torch.zeros(8), (Piece("a", 0, (5,)), Piece("b", 5, (3,))))
    residuals.keep_own(old, torch.arange(8.0))
    residuals.keep_averaged(old, torch.full((4,), 0.25))
    saved = residuals.state_dict()
    assert saved["a"].tolist() == [0, 1, 2, 3, 4.5]
    assert saved["b"].tolist() == [5.5, 6.5, 7.5]
    new = Bucket(torch.zeros(3), (Piece("b", 0, (3,)),))
    assert residuals.own(new, torch.float32).tolist() == [5.5, 6.5, 7.5]
    assert residuals.own(Bucket(torch.zeros(5), (Piece("a", 0, (5,)),)), torch.float32)[4] == 4.5
    fresh = Residuals(2, 1)
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.own(new, torch.float32), residuals.own(new, torch.float32))


# --- PowerSGD ------------------------------------------------------------------------------------


def test_vectors_and_small_matrices_are_sent_whole() -> None:
    assert matrix_shape((64,), 1) is None
    assert matrix_shape((8, 8), 4) is None
    assert matrix_shape((256, 256), 4) == (256, 256)
    assert matrix_shape((64, 3, 7, 7), 1) == (64, 147)


def test_a_matrix_of_the_rank_arrives_whole_and_one_above_it_is_fed_back() -> None:
    low = drawn(10, 64, 2, spread=0.0).double() @ drawn(11, 2, 48, spread=0.0).double()
    power = PowerSGD(2, lambda flat: None, 1, Residuals(1, 0))
    bucket = Bucket(low.flatten().clone(), (Piece("w", 0, (64, 48)),))
    power.mean(bucket)
    assert torch.allclose(bucket.flat.view(64, 48), low, rtol=1e-8)
    full = drawn(12, 64, 48, spread=0.0).double()
    summed, steps = torch.zeros_like(full), 100
    power = PowerSGD(2, lambda flat: None, 1, Residuals(1, 0))
    for _ in range(steps):
        bucket = Bucket(full.flatten().clone(), (Piece("w", 0, (64, 48)),))
        power.mean(bucket)
        summed += bucket.flat.view(64, 48)
    left = power.state_dict()["residuals"]["w"].view(64, 48)
    assert torch.allclose(summed + left, full * steps, rtol=1e-9)  # sent and kept are the gradients
    assert float((summed / steps - full).norm() / full.norm()) < 0.25


def test_power_sgd_keeps_what_it_had_when_a_gradient_is_not_finite() -> None:
    power = PowerSGD(2, lambda flat: None, 1, Residuals(1, 0))
    pieces = (Piece("w", 0, (64, 48)),)
    power.mean(Bucket(drawn(13, 64 * 48), pieces))
    before = power.state_dict()
    poisoned = Bucket(drawn(14, 64 * 48), pieces)
    poisoned.flat[5] = float("nan")
    power.mean(poisoned)
    assert not torch.isfinite(poisoned.flat).all()
    after = power.state_dict()
    assert torch.equal(before["residuals"]["w"], after["residuals"]["w"])
    assert torch.equal(before["q"]["w"], after["q"]["w"])
