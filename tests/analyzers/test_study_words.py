"""What sections of studies say beside their numbers, where the numbers alone would be read wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from analysis_builders import MS, build

from trine.analyzers.reports.document import Paragraph, Section, Table
from trine.analyzers.reports.studies import kernel_efficiency, launch_queue, memory_owners, modules
from trine.analyzers.results import Analysis
from trine.analyzers.studies._grouped import NO_OPERATOR
from trine.analyzers.studies._kernel_rows import OperatorTime
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.studies.launch_queue import LaunchQueue, QueuePart, RankQueue
from trine.analyzers.studies.memory_owners import MemoryOwners, OwnedMemory, RankMemory
from trine.analyzers.studies.modules import Modules, ModuleTime


def tables(section: Section | None) -> list[Table]:
    assert section is not None
    return [block for block in section.blocks if isinstance(block, Table)]


def efficiency(*operators: OperatorTime) -> KernelEfficiency:
    none = ((), (), (), ())
    return KernelEfficiency(
        *("device", 1, None, 10 * MS, 5 * MS, 0, 9),
        *(operators, *none[:3], None, {}, {}, {}, (), (0, 0, 0), {}, (), (0, 0, 0, 0, 0, 0), None, ()),
    )


def test_work_of_no_operator_has_no_one_kind() -> None:
    mine = OperatorTime("aten::mm", "matmul", 4, 4, 5 * MS, 0)
    (healthy,) = tables(kernel_efficiency.section(efficiency(mine), build(), 8))
    assert healthy.rows[0][:2] == ("aten::mm", "matmul") and not healthy.note
    nobody = OperatorTime(NO_OPERATOR, "matmul", 509, 509, 5 * MS, 0)  # the kind with most time in it
    (table,) = tables(kernel_efficiency.section(efficiency(nobody, mine), build(), 8))
    assert table.rows[0][:2] == (NO_OPERATOR, "–") and table.note.startswith(
        "(no operator): work of all kinds"
    )


@pytest.mark.parametrize(("lost", "said"), [(0, False), (509, True)])
def test_parts_of_the_launch_queue_say_what_they_sum_to(lost: int, said: bool) -> None:
    queue = QueuePart(35 * MS, 20 * MS, 5 * MS, 10 * MS, MS, MS, MS, 1_198, lost, 3, (), ())
    (table,) = tables(
        launch_queue.section(LaunchQueue(0.57, 0.14, MS, (RankQueue(0, queue),), 0), build(), 8)
    )
    assert "sum to the time from the first to the last work whose launch is known, 35.0 ms." in table.note
    assert ("509 of 1.71 k pieces of work have none and are left out" in table.note) is said


def test_an_annotation_is_not_said_to_be_one_instance() -> None:
    row = ModuleTime("Optimizer.step", 1, 12, 6 * MS, 0, 6 * MS, ("Optimizer.step", 6 * MS))
    found = Modules("annotation", "device", 1, 10 * MS, 6 * MS, (row,))
    (table,) = tables(modules.section(found, build(), 8))
    assert [column.title for column in table.columns] == [
        "annotation",
        "time",
        "forward",
        "backward",
        "itself",
    ]
    (table,) = tables(modules.section(replace(found, named_by="module"), build(), 8))
    assert [column.title for column in table.columns][:2] == ["module", "instances"]


def memory(owned: OwnedMemory) -> MemoryOwners:
    curve = (("activations",), (0, MS), ((0, 100),), (0, 100))
    part = RankMemory(
        *(0, "device", 0, 100, MS, None, False), *curve, (owned,), 0, {}, None, None, None, 0, 0, (), (), 0
    )
    return MemoryOwners((part,), 0, ())


def of_format(name: str) -> Analysis:
    found = build()
    return replace(found, source=replace(found.source, format=name))


def test_memory_without_owners_says_why() -> None:
    def paragraphs(owned: OwnedMemory, format: str) -> str:
        section = memory_owners.section(memory(owned), of_format(format), 8)
        assert section is not None
        return " ".join(block.text for block in section.blocks if isinstance(block, Paragraph))

    category = OwnedMemory("activations", None, 100, 0, None, None, ())
    assert "an exported timeline does not say" in paragraphs(category, "memory_timeline")
    assert "the source does not say" in paragraphs(category, "kineto")
    known = OwnedMemory("activations", "model.py:3 forward", 100, 1, None, None, ())
    assert "not say" not in paragraphs(known, "memory_snapshot")
