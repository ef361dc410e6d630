"""The dialects' tables know every key of the packages that are installed, and the documentation shows them as they are."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trine.optim.dialects import accelerate_keys, deepspeed_keys
from trine.optim.dialects.reading import each_path
from trine.optim.dialects.rows import Row

ROOT = Path(__file__).resolve().parents[2]


def known(rows: tuple[Row, ...], path: str) -> bool:
    """Whether a table deals with a key: by a row of its own, or as a part of one that is dealt with whole."""
    paths = set(each_path(rows))
    whole = {row.path for row in rows if row.whole and not row.inner}
    parents = [path[:at] for at in range(len(path)) if path[at] == "."]
    return (
        path in paths
        or any(parent in whole for parent in parents)
        or any(each.startswith(f"{path}.") for each in paths)
    )


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    pytest.importorskip("deepspeed", reason="the table is compared with DeepSpeed; install trine[deepspeed]")
    from trine.optim.runtime.deepspeed_engine import imported

    return imported("cpu")


def fields_of(model: Any, path: str) -> Iterator[str]:
    """Paths of a pydantic model's fields and their aliases, inner models too."""
    for name, field in model.model_fields.items():
        inner = [
            each
            for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if hasattr(each, "model_fields")
        ]
        for spelled in {name, field.alias or name}:
            if inner:
                yield from fields_of(inner[0], f"{path}{spelled}.")
            else:
                yield f"{path}{spelled}"


def test_every_field_of_deepspeeds_models_is_known(deepspeed: Any) -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization.": DeepSpeedZeroConfig,
        "bf16.": DeepSpeedBF16Config,
        "fp16.": DeepSpeedFP16Config,
        "compile.": CompileConfig,
        "hybrid_engine.": HybridEngineConfig,
        "comms_logger.": CommsLoggerConfig,
        "tensor_parallel.": TPTrainingConfig,
        "": DeepSpeedMonitorConfig,
    }
    paths = [path for prefix, model in models.items() for path in fields_of(model, prefix)]
    assert len(paths) > 100
    assert [path for path in paths if not known(deepspeed_keys.ROWS, path)] == []
    assert not known(deepspeed_keys.ROWS, "zero_optimization.not_a_key")


def test_every_key_that_deepspeeds_configuration_reads_is_known(deepspeed: Any) -> None:
    from deepspeed.runtime import config

    tree = ast.parse(inspect.getsource(config))

    def text_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        value = getattr(config, node.id, None) if isinstance(node, ast.Name) else None
        return value if isinstance(value, str) else None

    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("get_scalar_param", "param_dict.get"):
            asked = node.args[1:2] if ast.unparse(node.func) == "get_scalar_param" else node.args[:1]
            on = ast.unparse(node.args[0]) if ast.unparse(node.func) == "get_scalar_param" else "param_dict"
            found |= {key for each in asked if on == "param_dict" and (key := text_of(each))}
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) == "param_dict"
            and (key := text_of(node.slice))
        ):
            found.add(key)
    assert {"train_batch_size", "gradient_clipping", "prescale_gradients", "optimizer", "checkpoint"} <= found
    found.discard("allgather_size")  # of a form of zero_optimization that is long gone
    assert sorted(key for key in found if not known(deepspeed_keys.ROWS, key)) == []


def test_what_deepspeed_has_removed_is_said_to_be(deepspeed: Any) -> None:
    from deepspeed.runtime import config

    gone = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    gone += [f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS]
    assert len(gone) > 8
    for path in gone:
        assert deepspeed_keys.ROWS_BY_PATH[path].does == "removed", path


def test_clipping_that_nobody_asked_for_is_deepspeeds_default(deepspeed: Any) -> None:
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    from trine.optim.dialects.deepspeed import CLIPS_AT

    assert GRADIENT_CLIPPING_DEFAULT == CLIPS_AT


def test_every_key_of_accelerates_file_is_known() -> None:
    pytest.importorskip("accelerate", reason="the table is compared with Accelerate; install it")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.dataclasses import DistributedDataParallelKwargs

    unknown = [name for name in ClusterConfig.__dataclass_fields__ if not known(accelerate_keys.ROWS, name)]
    assert unknown == []
    options = [action.dest for action in launch_command_parser()._actions]
    tables = {
        "fsdp_": "fsdp_config.",
        "dynamo_": "dynamo_config.",
        "parallelism_config_": "parallelism_config.",
    }
    paths = [tables[prefix] + name for name in options for prefix in tables if name.startswith(prefix)]
    assert len(paths) > 25
    assert [path for path in paths if not known(accelerate_keys.ROWS, path)] == []
    fields = set(DistributedDataParallelKwargs.__dataclass_fields__)
    assert fields == set(accelerate_keys.DDP_ROWS_BY_PATH)


def test_paths_stand_once() -> None:
    for rows in (deepspeed_keys.ROWS, accelerate_keys.ROWS, accelerate_keys.DDP_ROWS):
        paths = list(each_path(rows))
        assert len(paths) == len(set(paths))


def test_the_documentation_shows_the_tables_as_they_are() -> None:
    text = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
    for title, rows in (("DeepSpeed", deepspeed_keys.ROWS), ("Accelerate", accelerate_keys.ROWS)):
        section = text.partition(f"## Keys of {title}")[2].partition("\n## ")[0]
        shown = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section, re.MULTILINE))
        expected = {row.path: row.words for row in rows if row.does in ("translated", "told")}
        assert shown == {path: words.replace("|", "\\|") for path, words in expected.items()}
