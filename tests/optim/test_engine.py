"""Each technique against the plain loop, and what the engine refuses before it touches anything."""

from __future__ import annotations

from typing import Any

import optim_cases
import pytest
from rank_pool import RankPool

import trine
from trine.optim.techniques import techniques
from trine.record import events
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return optim_cases.train_plain(steps=30)[0]


def _worst(plain: list[float], tuned: list[float]) -> float:
    assert len(plain) == len(tuned)
    return max(abs(a - b) / abs(a) for a, b in zip(plain, tuned, strict=True))


def test_the_empty_configuration_is_bitwise_the_plain_loop(plain: list[float]) -> None:
    assert optim_cases.train({}, steps=30)[0] == plain


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"precision.dtype": "fp32"}, 0.0),
        ({"compute.attention": "sdpa"}, 1e-5),
        ({"compute.attention": "auto"}, 1e-5),
        ({"compute.attention": "flash"}, 1e-5),
        ({"compute.fuse": ["optimizer"]}, 1e-6),
        ({"accumulation.steps": 4}, 1e-6),
        ({"accumulation.steps": 3}, 1e-6),  # micro-batches of 1, 2 and 1 samples
        ({"compute.attention": "sdpa", "compute.fuse": ["optimizer"], "accumulation.steps": 2}, 1e-5),
    ],
)
def test_parity_in_fp32(plain: list[float], changes: dict[str, Any], tolerance: float) -> None:
    assert _worst(plain, optim_cases.train(changes, steps=30)[0]) <= tolerance


def test_parity_in_bf16(plain: list[float]) -> None:
    losses, model, _ = optim_cases.train({"precision.dtype": "bf16"}, steps=30)
    assert 0 < _worst(plain, losses) <= 2e-3  # above nothing: it does compute in bf16
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_accumulation_is_exact_in_float64() -> None:
    plain, whole = optim_cases.train_plain(steps=10, double=True)
    losses, split, _ = optim_cases.train({"accumulation.steps": 3}, steps=10, double=True)
    assert _worst(plain, losses) < 1e-12
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_sdpa_really_runs() -> None:
    _, model, engine = optim_cases.train({"compute.attention": "sdpa"}, steps=1)
    assert {block.attention.implementation for block in model.blocks} == {"sdpa"}
    assert [str(effect) for effect in engine.effects] == ["compute.attention: manual → sdpa (2 modules)"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself, and fails where warnings are errors
def test_compiled_blocks_keep_losses_and_names(plain: list[float]) -> None:
    losses, model, engine = optim_cases.train({"compute.compile": "blocks"}, steps=6)
    assert _worst(plain[:6], losses) <= 1e-5
    assert not any("_orig_mod" in name for name in model.state_dict())
    assert "2 blocks of Block" in str(engine.effects[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()


def test_dropout_draws_the_same_numbers() -> None:
    with_dropout = {"dropout": 0.2}
    plain, _ = optim_cases.train_plain(steps=6, model_changes=with_dropout)
    assert optim_cases.train({}, steps=6, model_changes=with_dropout)[0] == plain
    fused = optim_cases.train({"compute.fuse": ["optimizer"]}, steps=6, model_changes=with_dropout)[0]
    assert _worst(plain, fused) <= 1e-6


def _half_trained(kind: Any, **keys: Any) -> tuple[Any, Any, list[Any]]:
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt()
    optimizer = kind(model.parameters(), **keys)
    data = optim_cases.batches(12, 4)
    for batch in data[:6]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, data[6:]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("AdamW", {"lr": 1e-3}),
        ("Adam", {"lr": 1e-3, "amsgrad": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        # From nought, Adagrad blows the rounding noise of a gradient that is zero up to a whole step.
        ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    ],
)
def test_a_live_optimizer_is_adopted_with_its_state(name: str, keys: dict[str, Any]) -> None:
    from trine.samples.gpt import loss_of

    results = []
    for changes in ({}, {"compute.fuse": ["optimizer"]}):
        model, optimizer, rest = _half_trained(getattr(torch.optim, name), **keys)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        engine = trine.optimize(
            model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of, scheduler=scheduler
        )
        assert engine.optimizer is optimizer  # so that schedulers and checkpoints keep working
        losses = [float(engine.train_step(batch)) for batch in rest]
        results.append((losses, [p.detach().clone() for p in model.parameters()], optimizer))
    (plain, plain_parameters, _), (fused, fused_parameters, optimizer) = results
    assert optimizer.param_groups[0]["fused"] is True
    assert _worst(plain, fused) <= 1e-6
    for a, b in zip(plain_parameters, fused_parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fused_state_survives_a_checkpoint() -> None:
    model, optimizer, _ = _half_trained(torch.optim.AdamW, lr=1e-3)
    trine.optimize(model, optimizer, {"compute": {"fuse": ["optimizer"]}})
    other = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["fused"] is True


def test_loops_with_their_own_body() -> None:
    from torch.nn import functional

    plain, _ = optim_cases.train_plain(steps=4, size=4)
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, {"accumulation": {"steps": 2}})
    halves = [
        (ids[start : start + 2], targets[start : start + 2])
        for ids, targets in optim_cases.batches(4, 4)
        for start in (0, 2)
    ]
    losses, stepped = [], []
    for ids, targets in engine.steps(halves):
        loss = functional.cross_entropy(engine(ids).flatten(0, 1), targets.flatten())
        engine.backward(loss, count=targets.numel())
        stepped.append(engine.step())
        losses.append(float(loss.detach()))
    assert stepped == [False, True] * 4
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert _worst(plain, means) <= 1e-6


def test_the_last_incomplete_accumulation_still_steps() -> None:
    model = optim_cases.small_gpt()
    engine = trine.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"accumulation": {"steps": 2}}
    )
    stepped = []
    for ids, _ in engine.steps(optim_cases.batches(3, 2)):
        engine.backward(engine(ids).square().mean())
        stepped.append(engine.step())
    assert stepped == [False, True, True]


def test_events_tell_each_step_and_phase() -> None:
    told: list[tuple[str, Any]] = []
    stop = events.listen(lambda kind, values: told.append((kind, values.get("name", values.get("index")))))
    try:
        optim_cases.train({"accumulation.steps": 2}, steps=2)
    finally:
        stop()
    assert told.count(("metric", "memory/saved_activation_bytes")) == 2
    seen = [(kind, value) for kind, value in told if kind != "metric"]
    one = [
        *(("phase", name) for name in ("data", "copy", "forward", "backward", "forward", "backward")),
        ("phase", "optimizer"),
    ]
    assert seen == [
        ("configuration", None),
        ("step_begin", 0),
        *one,
        ("step_end", 0),
        ("step_begin", 1),
        *one,
        ("step_end", 1),
        ("step_begin", 2),
        ("phase", "data"),
        ("step_cancel", 2),
    ]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_batch_that_nothing_trained_on_is_no_step(leaves: bool) -> None:
    model = optim_cases.small_gpt()
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_of)
    seen: list[str] = []
    stop = events.listen(lambda kind, values: seen.append(kind) if kind.startswith("step_") else None)
    try:
        for position, batch in enumerate(engine.steps(optim_cases.batches(4, 2))):
            if position == 2:
                if leaves:
                    break
                continue
            engine.train_step(batch)
    finally:
        stop()
    assert engine.step_index == (2 if leaves else 3)
    assert seen[:6] == ["step_begin", "step_end"] * 2 + ["step_begin", "step_cancel"]


def test_key_paths_are_a_configuration_too() -> None:
    model = optim_cases.small_gpt()
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"accumulation.steps": 2})
    assert engine.config.accumulation.steps == 2


def test_the_end_of_a_step_says_what_it_held() -> None:
    ends: list[dict[str, Any]] = []
    stop = events.listen(lambda kind, values: ends.append(values) if kind == "step_end" else None)
    try:
        losses, _, _ = optim_cases.train({}, steps=2)
    finally:
        stop()
    assert [(end["samples"], end["tokens"]) for end in ends] == [(4, 4 * 32)] * 2
    assert [float(end["loss"]) for end in ends] == losses


def test_clipping_and_scheduling_at_each_optimizer_step() -> None:
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    engine = trine.optimize(
        model, optimizer, {"accumulation": {"steps": 2}}, loss_fn=loss_of, clip_norm=1e-3, scheduler=scheduler
    )
    engine.train_step(optim_cases.batches(1, 4)[0])
    moved = torch.cat(
        [(a - b.detach()).flatten() for a, b in zip(before, model.parameters(), strict=True)]
    ).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)
    assert scheduler.get_last_lr() == [0.5]


def test_loader_workers_keep_order_and_losses() -> None:
    from torch.utils.data import DataLoader

    from trine.samples.gpt import loss_of
    from trine.samples.text import SourceText

    results = []
    for changes in ({}, {"data.workers": 1, "data.prefetch": 3}):
        model = optim_cases.small_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            SourceText(optim_cases.TEXT, 32),
            batch_size=200,
            shuffle=True,
            generator=generator,
            drop_last=True,
        )
        engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
        results.append([float(engine.train_step(batch)) for batch in engine.steps(loader)])
    assert len(results[0]) >= 3
    assert results[0] == results[1]


def test_workers_would_repeat_an_iterable_dataset() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.zeros(32, dtype=torch.int64)] * 4)

    model = optim_cases.small_gpt()
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"data": {"workers": 2}})
    with pytest.raises(UsageError, match="repeat"):
        next(engine.steps(DataLoader(Stream(), batch_size=2)))
    with pytest.raises(UsageError, match=r"data\.workers.*list"):
        next(engine.steps([1, 2]))


# --- refusals ----------------------------------------------------------------------------------

REFUSED = [
    ({"compute.attention": "flex"}, "compute.attention"),
    ({"parallel.pipeline": 2}, "parallel.pipeline"),
    ({"activations.pool": True}, "activations.pool"),
    ({"data.packing": True, "data.shape_buckets": [64]}, "data.packing"),
    ({"parallel.tensor": 2}, "parallel.tensor"),
]


@pytest.mark.parametrize(("changes", "key"), REFUSED)
def test_keys_that_cannot_be_applied_here_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    config = trine.Config().with_changes(changes)
    with pytest.raises(UsageError) as raised:
        trine.optimize(model, optimizer, config)
    assert key in str(raised.value) and "\n" not in str(raised.value)
    assert model.blocks[0].attention.implementation == "manual"
    assert not optimizer.param_groups[0]["fused"]


def test_every_key_is_either_a_techniques_or_refused() -> None:
    answered = {key for technique in techniques() for key in technique.KEYS}
    assert answered <= set(trine.Config.keys())
    assert all(technique.NUMERICS and technique.QUANTITY for technique in techniques())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"communication.bucket_mib": 5.0}, "communication.bucket_mib is about several ranks"),
        ({"data.pin_memory": True}, "data.pin_memory"),
        ({"parallel.data": 4}, "parallel.data = 4"),
        ({"precision.tf32": True}, "precision.tf32 is for NVIDIA"),
        ({"precision.float8": True}, "precision.float8 needs a device"),
    ],
)
def test_what_this_machine_cannot_do(changes: dict[str, Any], words: str) -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match=words):
        trine.optimize(model, torch.optim.AdamW(model.parameters()), trine.Config().with_changes(changes))


def test_what_this_model_cannot_do() -> None:
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(linear.parameters())
    with pytest.raises(UsageError, match=r"compute\.attention: Linear"):
        trine.optimize(linear, optimizer, {"compute": {"attention": "sdpa"}})
    trine.optimize(linear, optimizer, {"compute": {"attention": "auto"}})
    trine.optimize(linear, optimizer, {"compute.attention": "auto", "engine": "torch"})  # a path of one name
    with pytest.raises(UsageError, match=r'compute\.compile = "blocks": Linear'):
        trine.optimize(linear, optimizer, {"compute": {"compile": "blocks"}})
    half = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"precision\.dtype.*weight"):
        trine.optimize(half, torch.optim.AdamW(half.parameters()), {"precision": {"dtype": "bf16"}})
    with pytest.raises(UsageError, match=r"compute\.fuse: LBFGS|LBFGS"):
        trine.optimize(linear, torch.optim.LBFGS(linear.parameters()), {"compute": {"fuse": ["optimizer"]}})


def test_an_optimizer_of_another_model_is_refused() -> None:
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="none of the model's parameters"):
        trine.optimize(one, torch.optim.AdamW(other.parameters()))


def test_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match=r"compute\.compile needs a C\+\+ compiler"):
        trine.optimize(model, torch.optim.AdamW(model.parameters()), {"compute": {"compile": "model"}})


def test_train_step_without_a_loss_function() -> None:
    model = optim_cases.small_gpt()
    engine = trine.optimize(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UsageError, match="loss_fn"):
        engine.train_step(optim_cases.batches(1, 2)[0])


def test_batches_that_cannot_be_cut() -> None:
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt()
    engine = trine.optimize(
        model, torch.optim.AdamW(model.parameters()), {"accumulation": {"steps": 3}}, loss_fn=loss_of
    )
    with pytest.raises(UsageError, match=r"accumulation\.steps = 3: a batch of 2"):
        engine.train_step(optim_cases.batches(1, 2)[0])


# --- two ranks ---------------------------------------------------------------------------------

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"communication.bucket_mib": 0.02},
    {"communication.bucket_mib": 0.02, "communication.first_bucket_mib": 0.005},
    {"communication.bucket_mib": "auto"},
    {"communication.gradient_as_view": True},
    {"communication.static_graph": True, "compute.fuse": ["optimizer"]},
    {"accumulation.steps": 2, "communication.gradient_as_view": True},
]


@pytest.fixture(scope="module")
def on_two(two_ranks: RankPool) -> list[dict[str, Any]]:
    """What most tests below look at."""
    return two_ranks.run("optim_cases:everything_on_ranks", 2, CONFIGURATIONS)


@pytest.mark.parametrize("position", range(len(CONFIGURATIONS)), ids=lambda n: str(CONFIGURATIONS[n]))
def test_two_ranks_match_one_process_on_the_whole_batch(on_two: list[dict[str, Any]], position: int) -> None:
    whole, _ = optim_cases.train_plain(steps=8, size=8, double=True)
    (losses, total), (_, other) = (each["losses"][position] for each in on_two)
    assert total == other, "the replicas differ"
    assert _worst(whole, losses) < 1e-10


def test_tokens_weigh_alike_over_micro_batches_and_ranks(on_two: list[dict[str, Any]]) -> None:
    """A mean of means is far off where counts differ; the weighted one is the whole batch's."""
    model = optim_cases.token_model()
    inputs = torch.cat([optim_cases.masked_batch(rank)[0] for rank in range(2)])
    targets = torch.cat([optim_cases.masked_batch(rank)[1] for rank in range(2)])
    loss, _ = optim_cases.masked_loss(model, (inputs, targets))
    loss.backward()
    exact = torch.cat([(p - p.grad).detach().flatten() for p in model.parameters()])
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    for each in on_two:
        weighted = torch.tensor([value for row in each["weighted"] for value in row], dtype=torch.float64)
        assert float((weighted - exact).norm() / gradient.norm()) < 1e-10


def test_a_wrapped_model_is_adopted_in_mid_training(on_two: list[dict[str, Any]]) -> None:
    for each in on_two:
        plain, adopted, refused = each["rewrapped"]
        assert _worst(plain, adopted) <= 1e-6
        assert "replaced by trine.optimize" in refused


def test_ranks_synchronise_at_the_last_micro_batch_alone(on_two: list[dict[str, Any]]) -> None:
    assert [each["synchronisations"] for each in on_two] == [1, 1]


def test_a_static_graph_with_accumulation_is_refused(on_two: list[dict[str, Any]]) -> None:
    for each in on_two:
        assert "static_graph and accumulation" in each["refused"].replace("communication.", "")


@pytest.mark.slow
def test_the_refused_static_graph_with_accumulation_is_broken_in_pytorch() -> None:
    for said in optim_cases.on_ranks(2, optim_cases.static_graph_with_no_sync):
        assert said.startswith("error")


def test_a_bucket_too_small_for_a_compiled_model_is_refused(on_two: list[dict[str, Any]]) -> None:
    assert all("communication.bucket_mib = 0.5" in each["refused_bucket"] for each in on_two)


def test_best_bucket_size() -> None:
    from trine.optim.techniques.data_parallel import best_bucket_bytes

    gradients, alpha, beta = 100 * 2**20, 50e-6, 10e9

    def exposed(size: float) -> float:
        buckets = gradients / size
        return buckets * alpha + size / beta

    best = best_bucket_bytes(gradients, alpha, beta)
    assert exposed(best) <= min(exposed(best * 1.2), exposed(best / 1.2))
    assert best_bucket_bytes(gradients, 1.0, beta) == gradients  # one bucket where each is dear
    assert best_bucket_bytes(100_000, 1e-9, 1e9) == 64 * 2**10
    assert best_bucket_bytes(10, alpha, beta) == 10
