"""Tensor parallelism: what is found in a model, live optimizers, random numbers, exchanges, plans of one's own, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import small_gpt
from rank_pool import RankPool
from tensor_cases import EVERYTHING, KINDS, TENSOR, causal_lm, stranger

from trine.optim import Config
from trine.optim.layout import layout_of
from trine.optim.techniques import tensor, zero
from trine.optim.techniques._assembly import Facts
from trine.optim.topology import Topology
from trine.record.errors import UsageError

torch = pytest.importorskip("torch")

SEQUENCE = {**TENSOR, "parallel.sequence": True}
LOSS = {**TENSOR, "parallel.loss": True}

# --- rows in another order ---------------------------------------------------------------------


@given(
    shards=st.integers(1, 4),
    sections=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    dim=st.integers(0, 1),
)
def test_every_rank_has_its_part_of_each_section(shards: int, sections: list[int], dim: int) -> None:
    from trine.optim.runtime.tensor_plans import Interleaved, in_given_order

    sizes = tuple(size * shards for size in sections)
    order = Interleaved(dim, sizes, shards)
    value = torch.arange(sum(sizes) * 2).view((-1, 2) if dim == 0 else (2, -1))
    moved = order.permuted(value)
    assert torch.equal(in_given_order(moved, order.reordered), value)
    parts = value.split(sizes, dim)
    for rank, own in enumerate(moved.chunk(shards, dim)):
        assert torch.equal(own, torch.cat([part.chunk(shards, dim)[rank] for part in parts], dim))
    rows = [row for _, there, count in order.reordered.blocks for row in range(there, there + count)]
    assert sorted(rows) == list(range(sum(sizes)))


# --- what is found -----------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_sample_is_understood(mlp: str, norm: str) -> None:
    from trine.optim.runtime.tensor_plans import plan_of

    plan = plan_of(small_gpt(mlp=mlp, norm=norm))
    assert [block.name for block in plan.blocks] == ["blocks.0", "blocks.1"]
    block = plan.blocks[0]
    (attention,) = block.attentions
    assert (attention.heads, attention.columns[0].sections) == (2, (32, 32, 32))
    (forward,) = block.feed_forwards
    ups = ["blocks.0.gate", "blocks.0.up"] if mlp == "swiglu" else ["blocks.0.up"]
    assert [column.name for column in forward.columns] == ups
    assert [name for name, _ in forward.rows] == ["blocks.0.down"]
    assert forward.entry is not None and forward.entry[0] == "blocks.0.norm2" and forward.is_behind
    assert not block.whole
    assert plan.head is not None and plan.embedding is not None
    assert (plan.head[0], plan.embedding[0]) == ("head", "tokens")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_models_are_understood(kind: str) -> None:
    pytest.importorskip("transformers")
    from trine.optim.runtime.tensor_plans import plan_of

    plan = plan_of(causal_lm(kind))
    assert len(plan.blocks) == 2
    for block in plan.blocks:
        (attention,) = block.attentions
        assert (attention.heads, attention.key_heads) == (4, 4 if kind == "gpt2" else 2)
        assert len(attention.norms) == (2 if kind == "qwen3" else 0)
        assert len(block.mixtures) == (1 if kind == "mixtral" else 0)
        assert len(block.feed_forwards) == (0 if kind == "mixtral" else 1)
        assert not block.whole
    assert plan.vocabulary == 96


def test_a_fused_gate_and_w3_are_known() -> None:
    from torch import nn

    from trine.optim.runtime.tensor_plans import plan_of

    def block(**layers: Any) -> Any:
        return nn.ModuleDict({"mlp": nn.ModuleDict({n: nn.Linear(*size) for n, size in layers.items()})})

    fused = nn.ModuleDict({"layers": nn.ModuleList([block(gate_up_proj=(8, 32), down_proj=(16, 8))])})
    (forward,) = plan_of(fused).blocks[0].feed_forwards
    assert forward.columns[0].sections == (16, 16)
    llama = nn.ModuleDict({"layers": nn.ModuleList([block(w1=(8, 16), w2=(16, 8), w3=(8, 16))])})
    (forward,) = plan_of(llama).blocks[0].feed_forwards
    assert [column.name[-2:] for column in forward.columns] == ["w1", "w3"]
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.one, layers\.0\.mlp\.two are no feed-forward"):
        plan_of(nn.ModuleDict({"layers": nn.ModuleList([block(one=(8, 12), two=(16, 8))])}))


def test_an_output_layer_of_another_name_is_told_what_is_known_and_a_plan_says_it() -> None:
    from torch import nn

    from trine.optim.runtime.tensor_plans import plan_of

    attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v", "back")})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mixer": attention})])})
    with pytest.raises(UsageError, match=r'not found among q, k, v, back \(known are .*"row" for each'):
        plan_of(model)
    styles = {"layers.*.mixer.back": "row"} | {f"layers.*.mixer.{name}": "column" for name in "qkv"}
    assert len(plan_of(model, styles).blocks) == 1


# --- the same training -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [TENSOR, pytest.param(EVERYTHING, marks=pytest.mark.slow)], ids=["tensor", "all"]
)
def test_a_live_optimizer_goes_on(changes: dict[str, Any], two_ranks: RankPool) -> None:
    for found in two_ranks.run("tensor_cases:adopted", changes):
        assert found["ours"] == pytest.approx(found["plain"], rel=1e-12)
        assert (
            found["apart"] < 1e-10
        )  # AdamW at 1e-2: a moment that was cut wrong would move parameters by that
        assert found["frozen"] and found["tied"]
        assert found["orders"] == [
            f"blocks.{n}.attention.qkv.{key}" for n in (0, 1) for key in ("bias", "weight")
        ]
        assert found["moments"]["blocks.0.attention.qkv.weight"] == (48, 32)
        assert found["moments"]["blocks.0.down.weight"] == (32, 64)
        assert found["moments"]["tokens.weight"] == (128, 32)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"zero.stage": 3}, {}], ids=["zero 3", "replicas"])
def test_a_live_optimizer_goes_on_in_two_dimensions(changes: dict[str, Any], four_ranks: RankPool) -> None:
    found = four_ranks.run("tensor_cases:adopted", {**EVERYTHING, **changes})
    for position in range(4, 8):
        mean = sum(each["ours"][position] for each in found) / 4
        assert mean == pytest.approx(found[0]["plain"][position], rel=1e-10)
    assert max(each["apart"] for each in found) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("changes", [TENSOR, EVERYTHING], ids=["tensor", "all"])
def test_what_every_rank_has_whole_stays_the_same_bits(changes: dict[str, Any], two_ranks: RankPool) -> None:
    """Thirty steps with dropout, from ranks that were seeded apart."""
    first, second = two_ranks.run("tensor_cases:replicas", changes, 30)
    assert first == second
    assert {"positions.weight", "norm.weight", "blocks.0.norm1.bias", "blocks.1.down.bias"} <= first.keys()


@pytest.mark.parametrize("changes", [TENSOR, EVERYTHING], ids=["tensor", "all"])
def test_a_plan_of_ones_own(changes: dict[str, Any], two_ranks: RankPool) -> None:
    for ours, plain in two_ranks.run("tensor_cases:own_plan", changes):
        assert ours == pytest.approx(plain, rel=1e-12)


def test_a_plan_names_modules_as_the_program_does() -> None:
    """Also one that is called as wrappers call theirs."""
    from trine.optim.runtime.tensor_plans.own import styles_of

    model = torch.nn.Module()
    model.module = stranger()
    assert set(styles_of(model, {"module.parts.*.mixer.into": "qkv"}).values()) == {"qkv"}


def test_a_plan_over_code_with_the_whole_number_of_heads_is_explained(two_ranks: RankPool) -> None:
    for (said,) in two_ranks.run("tensor_cases:looked_at", TENSOR, {"reads_heads": False}):
        assert "parts.0 does not run once it is cut" in said and "write -1 for heads" in said


@pytest.mark.parametrize(
    ("changes", "across"),
    [(TENSOR, "heads"), (TENSOR, "slopes"), (TENSOR, "features"), (SEQUENCE, "tokens")],
    ids=["heads", "slopes", "features", "tokens"],
)
def test_code_that_looks_across_what_is_cut_is_refused_by_name(
    changes: dict[str, Any], across: str, two_ranks: RankPool
) -> None:
    for (said,) in two_ranks.run("tensor_cases:looked_at", changes, {"across": across}):
        assert "parts.0 computes something else once it is cut" in said
        assert ("drop parallel.sequence" in said) == (across == "tokens")


@pytest.mark.parametrize("how", [{}, {"dropout": 0.5}], ids=["plain", "dropout"])
@pytest.mark.parametrize("changes", [TENSOR, EVERYTHING], ids=["tensor", "all"])
def test_blocks_that_compute_the_same_are_looked_at_and_pass(
    changes: dict[str, Any], how: dict[str, Any], two_ranks: RankPool
) -> None:
    assert two_ranks.run("tensor_cases:looked_at", changes, how) == [[], []]


@pytest.mark.slow
def test_blocks_that_were_not_compared_are_told(two_ranks: RankPool) -> None:
    changes = {**TENSOR, "compute.compile": "blocks"}
    for told in two_ranks.run("tensor_cases:looked_at", changes, {}):
        assert any("compute.compile is set" in each for each in told)


@pytest.mark.parametrize("changes", [EVERYTHING], ids=["all"])
def test_a_loop_with_a_body_of_its_own(changes: dict[str, Any], two_ranks: RankPool) -> None:
    for ours, plain in two_ranks.run("tensor_cases:own_body", changes):
        assert ours == pytest.approx(plain, rel=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*loss_type.*")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_models_train_the_same(kind: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    for changes, by in ((TENSOR, "outside"), (EVERYTHING, "outside"), (EVERYTHING, "labelled")):
        for ours, plain in two_ranks.run("tensor_cases:transformers_losses", kind, changes, by):
            # Transformers computes norms, routers and its own loss in float32, whatever the model is in.
            assert ours == pytest.approx(plain, rel=1e-7 if by == "outside" else 1e-6)
    changes = {**EVERYTHING, "zero.stage": 3}
    for ours, plain in four_ranks.run("tensor_cases:transformers_losses", kind, changes, "outside"):
        assert ours == pytest.approx(plain, rel=1e-7)


# --- random numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [TENSOR, SEQUENCE], ids=["tensor", "sequence"])
def test_dropout_is_the_same_where_activations_are(changes: dict[str, Any], two_ranks: RankPool) -> None:
    first, second = two_ranks.run("tensor_cases:masks", changes)
    assert first["losses"] == second["losses"]
    assert first["next"] == second["next"]  # ranks that were seeded apart go on together
    assert first["attention"] != second["attention"]  # of other heads
    assert first["residual"] == second["residual"]  # the first residual dropout is the embedding's: whole
    for each in (first, second):
        assert each["again"] == each["losses"]
        assert each["recomputed"] == each["losses"]  # bitwise


# --- exchanges ---------------------------------------------------------------------------------


def test_a_block_exchanges_what_it_must(two_ranks: RankPool) -> None:
    """Four all-reduces a block and step; with sequence parallelism all-gathers and reduce-scatters in their places."""
    small, large = (two_ranks.run("tensor_cases:exchanges", TENSOR, layers)[0] for layers in (2, 3))
    assert {
        kind: large[kind] - small.get(kind, 0) for kind in large if large[kind] != small.get(kind, 0)
    } == {"all_reduce": 4}
    small, large = (two_ranks.run("tensor_cases:exchanges", SEQUENCE, layers)[0] for layers in (2, 3))
    assert {
        kind: large[kind] - small.get(kind, 0) for kind in large if large[kind] != small.get(kind, 0)
    } == {
        "all_gather_into_tensor": 4,
        "reduce_scatter_tensor": 4,
    }


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_is_in_the_order_that_was_given(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    expected = two_ranks.run("tensor_cases:saved", folder, EVERYTHING)[0]
    assert two_ranks.run("tensor_cases:resumed", folder, EVERYTHING)[0] == expected  # bitwise
    for pool, changes in (
        (two_ranks, {}),
        (two_ranks, {"zero.stage": 3}),
        (four_ranks, {**TENSOR, "zero.stage": 3}),
    ):
        assert pool.run("tensor_cases:resumed", folder, changes)[0] == pytest.approx(expected, rel=1e-10)


# --- refusals ----------------------------------------------------------------------------------


def _refusal(
    changes: dict[str, Any], model: Any = None, node: int = 4, optimizer: Any = None, technique: Any = tensor
) -> str:
    model = small_gpt(heads=4) if model is None else model
    config = Config().with_changes(changes)
    ranks = 4
    facts = Facts(
        device=torch.device("cpu"),
        topology=Topology(0, ranks, node),
        layout=layout_of(config, 0, ranks),
        backend="gloo",
        model=model,
        optimizer=optimizer or torch.optim.AdamW(model.parameters()),
    )
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    reason = technique.refusal(config)
    if reason is not None:
        return reason
    with pytest.raises(UsageError) as raised:
        technique.check(config, facts)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    return str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel.sequence": True}, "parallel.sequence says how tensor parallelism divides"),
        ({"parallel.plan": {"head": "head"}}, "parallel.plan says how tensor parallelism divides"),
        ({**TENSOR, "compute.compile": "model"}, 'use compute.compile = "blocks"'),
        ({**TENSOR, "precision.float8": True}, "precision.float8 and parallel.tensor"),
        ({**TENSOR, "accumulation.delayed": True}, "accumulation.delayed and parallel.tensor"),
        ({**TENSOR, "precision.master_weights": True}, "set zero.stage = 2 or 3"),
        ({**TENSOR, "compute.fuse": ["cross_entropy"]}, "Use parallel.loss"),
        ({**TENSOR, "parallel.plan": {"blocks.*.qvk": "column"}}, 'no module is called "blocks.*.qvk"'),
        ({**TENSOR, "parallel.plan": {"head": "columns"}}, "a style is one of column, row"),
        ({**TENSOR, "parallel.plan": {"norm": "column"}}, '"column" cuts a linear layer'),
        ({**LOSS, "parallel.plan": {"tokens": "replicate"}}, "no head that is cut is found"),
    ],
    ids=str,
)
def test_keys_that_do_not_go_together(changes: dict[str, Any], said: str) -> None:
    assert said in _refusal(changes)


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    four = {"parallel.tensor": 4}
    assert "does not divide the 2 heads of blocks.0.attention: the nearest degree that does is 2" in _refusal(
        four, small_gpt()
    )
    said = _refusal(four, small_gpt(heads=4, vocab=258))
    assert "does not divide the vocabulary of 258 in head: make it 260" in said
    assert 'keep it whole with "replicate"' in said
    assert "must stay inside a node, and nodes have 2 ranks: use one of 2" in _refusal(four, node=2)
    assert "use pipelines or ZeRO between nodes" in _refusal(TENSOR, node=1)


def test_what_is_not_understood_is_refused_by_name() -> None:
    strange = _refusal(TENSOR, stranger())
    assert "parts.0.mixer.into, parts.0.mixer.back are no feed-forward" in strange
    assert '"parts.*.mixer.into" = "column"' in strange
    odd = small_gpt(heads=4)
    odd.blocks[1].attention.scale = torch.nn.Parameter(torch.ones(1))
    assert "blocks.1.attention.scale has no known place in attention" in _refusal(TENSOR, odd)
    quiet = small_gpt(heads=4)
    del quiet.blocks[0].attention.heads
    assert "blocks.0.attention does not say how many heads it has" in _refusal(TENSOR, quiet)
    normed = small_gpt(heads=4)
    normed.blocks[0].attention.norm = torch.nn.LayerNorm(32)
    assert "normalises over several heads at once" in _refusal(TENSOR, normed)
    more = small_gpt(heads=4)
    more.blocks[0].table = torch.nn.Embedding(4, 32)
    assert "parallel.sequence: blocks.0.table (Embedding) would see a part" in _refusal(SEQUENCE, more)
    shared = small_gpt(heads=4)
    shared.blocks[0].up.weight = shared.blocks[1].up.weight
    shared.extra = torch.nn.Linear(32, 128)
    shared.extra.weight = shared.blocks[0].up.weight
    assert "extra.weight is shared with a matrix that is cut" in _refusal(TENSOR, shared)
    model = small_gpt(heads=4)
    assert "is not known to update element by element" in _refusal(
        TENSOR, model, optimizer=torch.optim.Adafactor(model.parameters())
    )


@pytest.mark.slow
def test_heads_of_keys_must_divide() -> None:
    pytest.importorskip("transformers")
    said = _refusal({"parallel.tensor": 4}, causal_lm("llama"))
    assert "does not divide the 2 heads of keys and values of model.layers.0.self_attn" in said
    assert "the nearest degree that does is 2" in said


def test_rows_that_do_not_divide_are_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run("tensor_cases:message", SEQUENCE, {"rows": 31}, True):
        assert "parallel.sequence cuts rows in 2, and these are of 31 tokens: pad them" in said
    assert two_ranks.run("tensor_cases:message", SEQUENCE, {"rows": 30}, True) == ["not refused"] * 2


@pytest.mark.parametrize("how", ["width", "values", "none"])
def test_ranks_that_are_given_different_batches_later_are_refused(how: str, two_ranks: RankPool) -> None:
    for first, following in two_ranks.run("tensor_cases:given_apart", TENSOR, how):
        assert first == "not refused"
        expected = "not refused" if how == "none" else "call the model with different tensors (here "
        assert expected in following


# --- on a device -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_devices_generator_is_left_as_it_was() -> None:
    from trine.optim.runtime.tensor_plans import Streams

    device = torch.device("cuda", 0)
    drawn = []
    following = []
    for place in (0, 1, 0):
        torch.manual_seed(3)
        streams = Streams(device, place)
        streams.begin()
        drawn.append(torch.rand(64, device=device))
        streams.end()
        following.append(torch.rand(64, device=device))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert torch.equal(following[0], following[1])
    torch.manual_seed(3)
    torch.randint(2**62, ())  # what a region takes of the processor's generator
    assert torch.equal(torch.rand(64, device=device), following[0])


@pytest.mark.slow
def test_a_plan_of_ones_own_holds_on_every_stage(four_ranks: RankPool) -> None:
    """The names are the model's, although a stage has the model inside, and others' modules are not there."""
    changes = {**TENSOR, "parallel.pipeline": 2, "parallel.microbatches": 2}
    for ours, plain in four_ranks.run("tensor_cases:own_plan", changes):
        assert ours == pytest.approx(plain, rel=1e-10)


def test_zero_without_ranks_to_shard_over_names_each_key_and_what_can_help() -> None:
    every = _refusal({**TENSOR, "parallel.pipeline": 2, "zero.stage": 3}, technique=zero)
    assert "parallel.pipeline = 2 × parallel.tensor = 2 on 4 ranks leave one" in every
    assert "start more ranks" in every and "parallel.shard" not in every
    replicas = _refusal({**TENSOR, "zero.stage": 3, "parallel.shard": 1, "parallel.data": 2}, technique=zero)
    assert "write a larger parallel.shard" in replicas
