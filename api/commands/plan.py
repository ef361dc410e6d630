"""The fastest layout of a model on a cluster: every way to parallelise it weighed, without a device.

    trine plan llama3-70b dgx-h100 --devices 1024 --tokens 15T --price 2.5
    trine plan config.json cluster.toml --pin tensor=8 --pin schedule=1f1b,interleaved --format json -o plan.json

MODEL is a known model's name, a .toml, or a Hugging Face config.json; CLUSTER a known cluster's or device's name, or a .toml.
For each way to divide the devices (data, tensor, context, expert, pipeline) its fastest layout that fits is found: schedule,
chunks, micro-batch, ZeRO stage, recomputation, offload. --pin KEY=VALUE settles a choice, several values leave it open among
them, and "any" leaves it open entirely. --search NAME searches what is else left alone, since it changes numbers (precision,
compression) or no software runs it (remote: another node's memory).
Predictions are for one software stack, which --stack names.

Exit codes: 0 planned; 2 bad usage, or no layout works: the line says which constraint failed and what would.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trine.record.errors import UsageError

from ._runs import FORMAT_HELP, form_of, json_text, refuse_overwriting, terminal_style, write_output

if TYPE_CHECKING:
    from trine.optim.plan.planning import Plan

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "the fastest parallel layout of a model on a cluster"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine plan``."""
    parser.add_argument("model", metavar="MODEL", help="a known model, a .toml or a config.json")
    parser.add_argument("cluster", metavar="CLUSTER", help="a known cluster or device, or a .toml")
    _add_job(parser.add_argument_group("the job"))
    _add_search(parser.add_argument_group("the search"))
    _add_report(parser.add_argument_group("the report"))


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--devices", type=int, metavar="N", help="of the job (the cluster's own)")
    group.add_argument("--global-batch", type=int, metavar="B", help="sequences a step (about 4 Mi tokens)")
    group.add_argument("--sequence", type=int, metavar="S", help="tokens of a sequence (the model's own)")
    group.add_argument(
        "--stack",
        metavar="NAME",
        help="the software to predict for (megatron-core; maxtext on TPUs, trine on processors)",
    )
    group.add_argument("--tokens", type=_tokens, metavar="T", help="to train on, as 15T: gives days")
    group.add_argument("--price", type=float, metavar="P", help="of a device for an hour: gives the price")


def _add_search(group: argparse._ArgumentGroup) -> None:
    pin = "settle a choice, as tensor=8; may be repeated"
    group.add_argument("--pin", action="append", default=[], metavar="KEY=VALUE", help=pin)
    search = "search this, too: precision, compression, remote, or all; may be repeated"
    group.add_argument("--search", action="append", default=[], metavar="NAME", help=search)
    headroom = "of a device's memory to leave free (0.1)"
    group.add_argument("--memory-headroom", type=float, default=0.1, metavar="SHARE", help=headroom)
    group.add_argument(
        "--largest", action="store_true", help="also the largest micro-batch and context of any layout"
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--top", type=int, default=10, metavar="K", help="layouts to show (10)")
    group.add_argument(
        "--record", type=Path, metavar="FOLDER", help="write the best layout's simulated step as a record"
    )
    group.add_argument("--format", choices=("text", "json", "md", "html"), help=FORMAT_HELP)
    group.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Search and print."""
    from trine.optim.plan.planning import plan

    form = form_of(arguments.format, arguments.output)
    refuse_overwriting(arguments.output, (arguments.model, arguments.cluster))
    _refuse_folder(arguments.record)
    found = plan(
        arguments.model,
        arguments.cluster,
        devices=arguments.devices,
        global_batch=arguments.global_batch,
        sequence=arguments.sequence,
        stack=arguments.stack,
        memory_headroom=arguments.memory_headroom,
        top=arguments.top,
        pins=arguments.pin,
        search=arguments.search,
        tokens=arguments.tokens,
        price=arguments.price,
        largest=arguments.largest,
    )
    if arguments.record is not None:
        _record(found, arguments.record)
    write_output(_render(found, form, arguments.output), arguments.output)
    return 0


def _refuse_folder(folder: Path | None) -> None:
    """Before anything is searched. Raises ``UsageError`` where a record would join what lies there."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already; name a folder that is new or empty")


def _record(found: Plan, folder: Path) -> None:
    """What the timeline and every analysis take as they take a real run."""
    from trine.optim.plan.described import described
    from trine.optim.plan.drawn import simulated_step
    from trine.optim.plan.layouts import Layouts
    from trine.optim.plan.simulated_record import write_record

    problem = found.problem
    asked = (problem.workload, problem.cluster, problem.stack, Layouts.of(**found.best.layout), 0)
    write_record(simulated_step(*asked), folder, described(*asked))
    print(f"Wrote {folder}", file=sys.stderr)


def _render(found: Plan, form: str, output: Path | None) -> str:
    from trine.analyzers.reports import plan as report

    if form == "json":
        from trine.optim.plan.plan_json import plan_to_dict

        return json_text(plan_to_dict(found))
    if form == "md":
        return report.render_markdown(found)
    if form == "html":
        return report.render_html(found)
    colour, width = terminal_style(output)
    return report.render_text(found, colour=colour, width=width)


def _tokens(text: str) -> float:
    from trine.optim.plan.cost import parse_count

    try:
        return parse_count(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
