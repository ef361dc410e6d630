"""Stacks of a memory snapshot: who allocated, and what the program was doing.

A snapshot's stack may have a hundred frames, most of them the interpreter and the dispatcher. Kept are
the operator, the Python frames (innermost first, as PyTorch writes them) and, under ``owner``, the one
line that a person would blame: the innermost one of the user's own code, or of a library's model where a
module's ``forward`` is that library's.

Frames and stacks repeat: each is looked at once, by identity where the pickle shares it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..memory_categories import Trait
from ..model import Strings

__all__ = ["FrameNumber", "StackNumber", "Stacks"]

#: A stack keeps this many Python frames, a frame this many characters.
_MOST_FRAMES, _MOST_CHARACTERS = 40, 160

_NATIVE_FILES = (".cpp", ".cc", ".cxx", ".c", ".h", ".hpp", ".cu", ".cuh", ".so", ".inc")
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/")
_TORCH = re.compile(
    r"(?:site|dist)-packages/(?:torch|functorch|triton|torchgen)/"
    r"|(?:^|/)torch/(?:nn|optim|autograd|utils|distributed|cuda|amp|fx|jit|profiler|_\w+|functional\.py)(?:/|$|(?<=\.py))"
    r"|torchinductor_"
)
_STANDARD = re.compile(r"^<frozen |/lib/python3[^/]*/(?!(?:site|dist)-packages)")
_OVERLOAD = re.compile(r"_[A-Z]\w*$|_out$")
_OPERATOR = re.compile(r"\bat::_ops::(\w+)::(?:call|redispatch)")
_NODE = re.compile(
    r"\b(?:torch::autograd::(?:generated::)?)(\w+(?:Backward\d*|AccumulateGrad|CopyBackwards))\b|\b(AccumulateGrad)::"
)
_COMMUNICATION = re.compile(r"\bc10d::|ProcessGroup|\bnccl|\bncclComm", re.IGNORECASE)


class FrameNumber(int):
    """A frame that was looked at, in place of the frame."""


class StackNumber(int):
    """A stack that was looked at, in place of its list of frames."""


class _Frame:
    """A frame, looked at once."""

    __slots__ = ("foreign", "forward_of", "mark", "node", "operator", "python", "text", "torch", "traits")

    def __init__(self, file: str, line: int, name: str) -> None:
        native = file in ("", "??") or file.lower().endswith(_NATIVE_FILES) or "::" in name
        self.python = not native and bool(name)
        place = file.replace("\\", "/")
        self.torch = self.python and bool(_TORCH.search(place))
        self.foreign = self.python and bool(_LIBRARIES.search(place))
        standard = self.python and not self.foreign and bool(_STANDARD.search(place))
        self.torch |= standard
        short = "/".join(place.split("/")[-2:])
        self.text = f"{short[-120:]}:{line} {name}"[:_MOST_CHARACTERS] if self.python else ""
        operator, node = (None, None) if self.python else (_OPERATOR.search(name), _NODE.search(name))
        # ``mul_Tensor`` is mul's overload Tensor.
        self.operator = "aten::" + _OVERLOAD.sub("", operator[1]) if operator else None
        self.node = (node[1] or node[2]) if node else None
        self.forward_of = self.torch and name == "_call_impl" and place.endswith("nn/modules/module.py")
        self.traits = _traits_of_python(place, name, self) if self.python else _traits_of_native(name)


def _traits_of_python(place: str, name: str, frame: _Frame) -> Trait:
    found = Trait.PYTHON
    if frame.forward_of:
        found |= Trait.MODULE
    if name == "zero_grad":
        found |= Trait.ZERO_GRAD
    if name == "empty_cache":
        found |= Trait.EMPTIES_CACHE
    if frame.torch:
        if "torch/optim/" in place or place.endswith("_functional_optim.py"):
            found |= Trait.OPTIMIZER
        elif "torch/distributed/" in place:
            found |= Trait.COMMUNICATION
        elif place.endswith("torch/utils/checkpoint.py") and name != "checkpoint":
            found |= Trait.RECOMPUTES
        elif name in ("_engine_run_backward", "backward") and "torch/autograd/" in place:
            found |= Trait.BACKWARD
        elif "torch/nn/" in place and name in (
            "__init__",
            "_apply",
            "convert",
            "load_state_dict",
            "reset_parameters",
        ):
            found |= Trait.SETUP
    elif name == "from_pretrained":
        found |= Trait.SETUP
    elif name == "step" and "optim" in place.rsplit("/", 1)[-1].lower():
        found |= Trait.OPTIMIZER
    return found


def _traits_of_native(name: str) -> Trait:
    found = Trait.NATIVE
    if "torch::autograd::Engine::" in name:
        found |= Trait.BACKWARD
    if "emptyCache" in name:
        found |= Trait.EMPTIES_CACHE
    if "AccumulateGrad::" in name:
        found |= Trait.ACCUMULATES | Trait.BACKWARD
    if _COMMUNICATION.search(name):
        found |= Trait.COMMUNICATION
    return found


class Stacks:
    """Stacks of one rank, numbered. ``owners``, ``texts`` (codes into ``strings``) and ``traits`` are by number;
    number 0 is no stack. ``most_bytes`` bounds the text that is kept; ``shortened`` counts stacks beyond it."""

    def __init__(self, strings: Strings, most_bytes: int) -> None:
        self.owners: list[int] = [-1]
        self.texts: list[int] = [-1]
        self.traits: list[int] = [0]
        self.shortened = 0
        self._strings = strings
        self._left = most_bytes
        self._frames: list[_Frame] = []
        self._by_content: dict[tuple[str, int, str], FrameNumber] = {}
        self._by_identity: dict[int, FrameNumber] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._lists: dict[int, int] = {}
        self._alive: list[Any] = []  # an identity holds only as long as its object lives

    def number(self, frames: Any, *, lasting: bool = True) -> int:
        """The number of a stack as the snapshot holds it: a list of dicts with ``filename``, ``line``, ``name``, or of
        :class:`FrameNumber`. What is no such list has number 0.

        A ``lasting`` list is kept and known again by its identity.
        """
        if type(frames) is StackNumber:
            return int(frames)
        if type(frames) is not list or not frames:
            return 0
        known = self._lists.get(id(frames)) if lasting else None
        if known is None:
            key = tuple([each if type(each) is FrameNumber else self._frame(each) for each in frames])
            known = self._stacks.get(key)
            if known is None:
                known = self._stacks[key] = self._add([self._frames[number] for number in key])
            if lasting:
                self._lists[id(frames)] = known
                self._alive.append(frames)
        return known

    def frame(self, frame: Any) -> FrameNumber:
        """The number of a frame, by its content."""
        values: tuple[Any, Any, Any] = ("", 0, "")
        if type(frame) is dict:
            values = (frame.get("filename"), frame.get("line"), frame.get("name"))
        elif type(frame) in (list, tuple) and len(frame) == 3:
            values = (frame[0], frame[1], frame[2])
        file, line, name = values
        content = (
            file if type(file) is str else "",
            line if type(line) is int else 0,
            name if type(name) is str else "",
        )
        number = self._by_content.get(content)
        if number is None:
            number = self._by_content[content] = FrameNumber(len(self._frames))
            self._frames.append(_Frame(content[0][:4096], content[1], content[2][:4096]))
        return number

    def _frame(self, frame: Any) -> FrameNumber:
        """The same, of a frame in a list that is kept: known again by its identity."""
        known = self._by_identity.get(id(frame))
        if known is None:
            known = self._by_identity[id(frame)] = self.frame(frame)
            self._alive.append(frame)
        return known

    def _add(self, frames: Sequence[_Frame]) -> int:
        traits, inmost = int(Trait.STACK), True
        for frame in frames:
            # A module wrapped by FSDP has torch.distributed around all that it does: only what lies within counts.
            inmost = inmost and (not frame.python or (frame.torch and not frame.forward_of))
            own = frame.traits if inmost or not frame.python else frame.traits & ~Trait.COMMUNICATION
            traits |= int(own)
        python = [frame for frame in frames if frame.python]
        operator, node = _operator_of(frames)
        owner = _owner_of(python, node or operator)
        lines = [f"operator {operator}"] if operator else []
        lines += [f"autograd {node}"] if node else []
        lines += [frame.text for frame in python[:_MOST_FRAMES]]
        text = "\n".join(lines)
        self.traits.append(traits)
        self.owners.append(self._strings.code(owner))
        if len(text) <= self._left:
            if self._strings.find(text) < 0:
                self._left -= len(text)
            self.texts.append(self._strings.code(text or None))
        else:
            self.shortened += 1
            self.texts.append(-1)
        return len(self.owners) - 1


def _operator_of(frames: Sequence[_Frame]) -> tuple[str | None, str | None]:
    """The operator that Python or autograd called, and the autograd node: the outermost one below either."""
    operator = node = None
    for frame in frames:
        if frame.python and operator is not None:
            break
        if frame.node is not None:
            node = frame.node
            break
        operator = frame.operator or operator
    return operator, node


def _owner_of(python: Sequence[_Frame], otherwise: str | None) -> str | None:
    first = None
    for place, frame in enumerate(python):
        if frame.torch:
            continue
        called = place + 1 < len(python) and python[place + 1].forward_of
        if not frame.foreign or called:
            return frame.text
        first = first or frame
    if first is not None:
        return first.text
    return python[0].text if python and otherwise is None else otherwise
