"""Facts about what is trained, read without running it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from profiled_loops import TinyModel

from trine.profiler import facts
from trine.profiler.memory import MemoryReader, bytes_of_gradients, bytes_of_optimizer, bytes_of_tensors
from trine.record.cores import cores_in


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.inputs, self.output = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)


class Language(torch.nn.Module):
    """A transformer without a configuration; its head shares the embedding's weight when tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 32)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(Attention()) for _ in range(3))
        self.head = torch.nn.Linear(32, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_the_class_is_the_programs() -> None:
    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._pipeline_model = Language(False)

    class ReplicateConvolution(torch.nn.Linear):
        """A name of the program's own."""

    stage = Stage()
    language = Language(False)
    language.__class__ = type("FSDPLanguage", (Language,), {})
    replica = Stage()
    replica.__class__ = type("ReplicateStage", (Stage,), {})
    several = torch.nn.Module()
    several.add_module("_pipeline_stage_1", Stage())
    for model in (stage, replica, language, several):
        known = facts.model_facts([model], [], None)
        assert known is not None and known["class"] == "Language"
    known = facts.model_facts([ReplicateConvolution(2, 2)], [], None)
    assert known is not None and known["class"] == "ReplicateConvolution"


@pytest.mark.parametrize("tied", [False, True])
def test_a_shared_embedding_is_multiplied_by_and_counts(tied: bool) -> None:
    model = Language(tied)
    known = facts.model_facts([model], [], 16)
    assert known is not None
    assert known["parameters"] == sum(p.numel() for p in model.parameters())
    assert known["parameters"] - known["parameters_without_embedding"] == (0 if tied else 3200)
    assert known["parameter_bytes"] == 4 * known["parameters"]
    assert known["shape"] == {
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "head_size": 8,
        "kv_heads": 4,
        "ffn": None,
        "vocab": 100,
        "sequence": 16,
    }


def test_a_configuration_tells_the_shape() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(  # type: ignore[assignment]
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=3072,
        vocab_size=50257,
        max_position_embeddings=1024,
    )
    shape = facts.model_facts([model], [], None)["shape"]  # type: ignore[index]
    assert (shape["layers"], shape["hidden"], shape["heads"], shape["kv_heads"]) == (12, 768, 12, 4)
    assert (shape["head_size"], shape["ffn"], shape["vocab"], shape["sequence"]) == (64, 3072, 50257, 1024)


def test_no_shape_is_guessed_of_what_is_no_language_model() -> None:
    shape = facts.model_facts([torch.nn.Sequential(torch.nn.Linear(3, 3))], [], None)["shape"]  # type: ignore[index]
    assert set(shape.values()) == {None}
    assert facts.model_facts([], [], None) is None


@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        ({}, "for-loop"),
        ({"foreach": True}, "foreach"),
        ({"foreach": False}, "for-loop"),
        ({"fused": True}, "fused"),
    ],
)
def test_the_optimizer_s_implementation(options: dict[str, Any], implementation: str) -> None:
    optimizer = torch.optim.AdamW(TinyModel().parameters(), **options)
    assert facts.optimizer_facts([optimizer]) == {
        "class": "AdamW",
        "implementation": implementation,
        "parameter_groups": 1,
    }
    assert facts.optimizer_facts([]) is None


def test_compiled_and_wrapped_models_are_seen_through() -> None:
    model = TinyModel()
    compiled = torch.compile(model, backend="eager")
    assert facts.unwrap(compiled) is model
    assert facts.is_compiled([compiled])
    assert not facts.is_compiled([model])
    model.layers.compile(backend="eager")
    assert facts.is_compiled([model])


def test_precision_and_loader() -> None:
    model = TinyModel().to(torch.bfloat16)
    known = facts.precision_facts([model], None)
    assert known == {"parameter_dtype": "bfloat16", "autocast_dtype": None, "float32_matmul": "highest"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert facts.autocast_dtype("cpu") == "bfloat16"
    assert facts.autocast_dtype("cpu") is None
    assert facts.loader_facts([1, 2]) is None
    loader = torch.utils.data.DataLoader([1, 2], batch_size=2)
    assert facts.loader_facts(SimpleNamespace(base_dataloader=loader))["batch_size"] == 2  # type: ignore[index]


def test_a_rank_says_its_threads_and_its_cores() -> None:
    device = facts.device_facts("cpu", 0)
    assert device["threads"] == torch.get_num_threads()
    if hasattr(os, "sched_getaffinity"):
        assert cores_in(device["cores"]) == os.sched_getaffinity(0)
    else:
        assert device["cores"] is None


def test_bytes_that_are_held() -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())
    total = sum(p.numel() * 4 for p in parameters)
    assert bytes_of_tensors([*parameters, *parameters]) == total
    assert bytes_of_gradients(parameters) == bytes_of_optimizer(optimizer) == 0
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert bytes_of_gradients(parameters) == total
    assert bytes_of_optimizer(optimizer) == 2 * total + 4 * len(
        parameters
    )  # two moments, and a step count each


def test_memory_is_read_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = MemoryReader()
    first = dict(reader.read())
    assert first["memory/resident_bytes"] > 50e6
    assert first["memory/resident_peak_bytes"] >= 0.9 * first["memory/resident_bytes"]
    assert reader.read() == []  # again so soon
    reader.close()
    reader.close()


def test_a_device_s_allocator_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = {
        "allocated_bytes.all.current": 5,
        "allocated_bytes.all.peak": 9,
        "reserved_bytes.all.current": 16,
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda index: flat)
    reader = MemoryReader("other")
    readings = dict(reader.read())
    reader.close()
    assert readings["memory/allocated_bytes"] == 5
    assert readings["memory/peak_bytes"] == 9
    assert readings["memory/reserved_bytes"] == 16
    assert readings["memory/allocation_retries"] == 2
    assert "memory/reserved_peak_bytes" not in readings
