"""What two sides wrote, compared: without processes, on files as a witness writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trine._verification_words import as_text
from trine.optim.runtime.fingerprints import BUCKETS, bits_of, sketch_of
from trine.optim.verify import Tolerance, Verification, compare
from trine.record.errors import UnreadableInput

EXACT = Tolerance(0.0, 0.0)
NEAR = Tolerance(1e-5, 1e-4)


def write(folder: Path, ranks: int = 1, gradients: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    gradients = {"a": [3.0, 4.0], "b": [1e-9, 0.0]} if gradients is None else gradients
    for rank in range(ranks):
        facts = {
            "rank": rank,
            "ranks": ranks,
            "backend": "gloo" if ranks > 1 else None,
            "engine": True,
            "losses": [2.0, 1.5, 1.25],
            "gradient_norms": {"0": 5.0},
            "bits": [{"a": ["whole", 1], "b": ["whole", 2]}] * 3,
            "recomputed_regions": 0,
            "recomputation_differences": [],
            "configuration": {},
            "effects": [],
            **changes,
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
        arrays = {f"0/{name}": numpy.array(values) for name, values in gradients.items()}
        numpy.savez(folder / f"rank-{rank}.npz", **arrays)
    return folder


def verified(tmp_path: Path, tolerance: Tolerance = NEAR, ranks: int = 1, **changes: Any) -> Verification:
    plain = write(tmp_path / "plain", ranks)
    return compare(plain, write(tmp_path / "optimised", ranks, **changes), tolerance)


def failures(verification: Verification) -> list[str]:
    return [check.said for check in verification.checks if not check.holds]


def test_the_same_numbers_are_the_same(tmp_path: Path) -> None:
    found = verified(tmp_path, EXACT)
    assert (found.verdict, failures(found)) == ("same", [])


def test_within_the_tolerance(tmp_path: Path) -> None:
    found = verified(tmp_path, losses=[2.0, 1.500001, 1.25])
    assert found.verdict == "same within the stated tolerance"
    assert found.checks[0].measured == pytest.approx(1e-6 / 1.5)


def test_the_first_step_that_is_too_far_is_named(tmp_path: Path) -> None:
    found = verified(tmp_path, losses=[2.0, 1.6, 9.0])
    assert failures(found) == ["1.6 against 1.5 at step 1: 6.7e-02 apart"]


def test_a_loss_that_is_no_number_is_infinitely_far(tmp_path: Path) -> None:
    assert verified(tmp_path, losses=[2.0, None, 1.25]).verdict == "not the same"
    assert verified(tmp_path, losses=[2.0, float("nan"), 1.25]).verdict == "not the same"


def test_rounding_where_a_gradient_is_nought_in_theory(tmp_path: Path) -> None:
    # b differs by its whole self, and by nothing beside the gradient as a whole.
    assert verified(tmp_path, gradients={"a": [3.0, 4.0], "b": [0.0, 1e-9]}).holds
    found = verified(tmp_path, gradients={"a": [3.0, 4.004], "b": [1e-9, 0.0]})
    assert failures(found) == ["a at step 0: 8.0e-04 apart"]


def test_a_gradient_that_overflowed_is_infinitely_far(tmp_path: Path) -> None:
    """Infinite by infinite is no number, and no number is larger than the tolerance."""
    for place, (plain, optimised) in enumerate(
        [([float("inf"), 4.0], [3.0, 4.0]), ([3.0, 4.0], [float("inf"), 4.0])]
    ):
        folders = [
            write(tmp_path / f"{place}-{name}", gradients={"a": values})
            for name, values in (("plain", plain), ("optimised", optimised))
        ]
        found = compare(*folders, NEAR)
        assert failures(found) == ["a at step 0: inf apart"]


def test_a_gradient_that_one_side_lacks(tmp_path: Path) -> None:
    found = verified(tmp_path, gradients={"a": [3.0, 4.0]})
    assert failures(found) == ["b has a gradient in the plain run alone"]


def test_gradients_of_compression_are_not_compared(tmp_path: Path) -> None:
    found = verified(tmp_path, Tolerance(1e-5, None), gradients={"a": [9.0, 9.0], "b": [1.0, 0.0]})
    assert [check.name for check in found.checks] == ["losses", "replicas"]
    assert found.holds


def test_shards_are_no_replicas_of_each_other(tmp_path: Path) -> None:
    write(tmp_path / "plain", 2)
    folder = write(tmp_path / "optimised", 2)
    path = folder / "rank-1.json"
    facts = json.loads(path.read_text())
    facts["bits"][1] = {"a": ["(1,) at (1,)", 7], "b": ["whole", 2]}
    path.write_text(json.dumps(facts))
    assert compare(tmp_path / "plain", folder, NEAR).holds
    facts["bits"][1]["a"] = ["whole", 7]
    path.write_text(json.dumps(facts))
    found = compare(tmp_path / "plain", folder, NEAR)
    assert failures(found) == ["a differs between rank 0 and rank 1 after step 1"]


def test_recomputation_names_its_module(tmp_path: Path) -> None:
    assert verified(tmp_path, recomputed_regions=4).checks[-1].said == "the same bits in 4 recomputed regions"
    broken = verified(tmp_path, recomputed_regions=4, recomputation_differences=[["blocks.3", "differs"]])
    assert failures(broken) == ["blocks.3 on rank 0: differs"]


def test_a_side_without_steps_or_ranks(tmp_path: Path) -> None:
    write(tmp_path / "plain", 2)
    with pytest.raises(UnreadableInput, match="the optimised run took no optimizer step"):
        compare(tmp_path / "plain", tmp_path / "absent", NEAR)
    (tmp_path / "plain" / "rank-1.json").unlink()
    with pytest.raises(UnreadableInput, match="2 ranks, and only 1 of them"):
        compare(tmp_path / "plain", tmp_path / "plain", NEAR)


def test_only_a_search_tells_that_no_key_is_at_fault(tmp_path: Path) -> None:
    found = verified(tmp_path, losses=[9.0, 9.0, 9.0])
    assert "key" not in as_text(found)
    assert "they fail together" in as_text(found.blaming(None))
    assert "the key at fault is zero.stage" in as_text(found.blaming("zero.stage"))


def test_tolerances_add_up() -> None:
    assert NEAR.plus(NEAR) == Tolerance(2e-5, 2e-4)
    assert NEAR.plus(Tolerance(0.1, None)) == Tolerance(0.1 + 1e-5, None)


@given(st.integers(BUCKETS + 1, 5 * BUCKETS), st.integers(0, 2**31))
def test_a_sketch_keeps_the_norm_of_a_difference(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(size, generator=generator) for _ in range(2))
    apart = numpy.linalg.norm(sketch_of(one) - sketch_of(other))
    assert apart == pytest.approx(float((one - other).norm()), rel=0.12)  # five standard deviations


def test_small_tensors_are_kept_whole() -> None:
    assert sketch_of(torch.arange(6.0).view(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


@given(st.integers(1, 300), st.data())
def test_a_checksum_sees_every_bit_and_the_order(size: int, data: st.DataObject) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    before = bits_of(tensor)
    assert bits_of(tensor.clone()) == before
    changed = tensor.clone()
    position, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    changed.view(torch.int32)[position] ^= (1 << bit) if bit < 31 else -(2**31)
    assert bits_of(changed) != before
    if size > 1:
        assert bits_of(tensor.flip(0)) != before


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.complex128],
)
def test_what_is_looked_at_stays_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype)
    kept = tensor.clone()
    assert bits_of(tensor) == bits_of(kept) and torch.equal(tensor, kept)
    if not dtype.is_complex:
        sketch = sketch_of(tensor)
        tensor.zero_()  # as an optimizer zeroes gradients
        assert sketch.tolist() == kept.double().tolist()
