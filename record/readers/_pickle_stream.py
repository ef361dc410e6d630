"""A pickle read piece by piece: what is finished is handed over, and need not stay in memory.

Python's unpicklers build all of a file before they give any of it back, and a dictionary takes seven times
its bytes in the file. A memory snapshot is a few hundred thousand small dictionaries, of which seven
numbers each are wanted. :func:`stream` shows each dictionary to a function as soon as it is complete and
puts in its place what that returns.

Only plain data is admitted, as in :mod:`._pickles`: containers and scalars, keys that are scalars or
tuples of them. Opcodes: Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from typing import Any

from ..errors import UnreadableInput
from ._pickles import OTHER_OPCODES, PLAIN_KEYS, damaged, most_memos, refuse_hollow, refused

__all__ = ["stream"]

#: Opcodes that push one value and take at most nine bytes: fetches from the memo, small numbers, constants.
_PUSH_WORDS = rb"h.|j.{4}|K.|J.{4}|\x8a\x07.{7}|\x8a\x06.{6}|\x8a\x08.{8}|\x8a\x05.{5}|M..|N|\x88|\x89"
_PUSH = re.compile(_PUSH_WORDS, re.DOTALL)
_PUSHES = re.compile(b"(?:" + _PUSH_WORDS + b")++", re.DOTALL)

#: Opcode → (bytes of its length prefix, whether it is text).
_TEXTS = {0x8C: 1, ord("X"): 4, 0x8D: 8}
_BYTES = {ord("U"): 1, ord("C"): 1, ord("T"): 4, ord("B"): 4, 0x8E: 8, 0x96: 8}
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_CONTAINERS = frozenset((list, dict))
_PUSHING = frozenset(b"hjKJMN\x8a\x88\x89")
_TUPLE_SIZES = {0x85: 1, 0x86: 2, 0x87: 3}


Finished = Callable[[dict[Any, Any], Callable[[Any, Any], None]], Any]


def stream(data: bytes, where: str, finished: Finished) -> Any:
    """The data of a pickle, each dictionary in it replaced by what ``finished`` makes of it when its items are in. (Of
    dictionaries that are filled item by item, as old protocols do, those that are members of lists.)

    ``finished(dictionary, replace)`` may call ``replace(container, other)`` for a list or dictionary within: where the
    pickle names that container again it gets the other, and the container need not live on. ``where`` names the source
    in errors. Raises ``UnreadableInput`` as :func:`._pickles.load` does.
    """
    refuse_hollow(data, where)
    try:
        return _Machine(data, where, finished).run()
    except UnreadableInput:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a damaged stream makes of it
        raise damaged(where, error) from None


class _Values(dict[bytes, Any]):
    """A pushing opcode with its argument → the value. Filled as they are met; large numbers are not kept."""

    def __init__(self, memo: list[Any]) -> None:
        super().__init__()
        self._memo = memo

    def __missing__(self, word: bytes) -> Any:
        opcode = word[0]
        if opcode == 0x8A:
            return int.from_bytes(word[2:], "little", signed=True)
        if opcode == 74:  # BININT
            return int.from_bytes(word[1:], "little", signed=True)
        if opcode in _CONSTANTS:
            value = _CONSTANTS[opcode]
        else:
            number = int.from_bytes(word[1:], "little")
            value = self._memo[number] if opcode in (104, 106) else number
        self[word] = value
        return value


class _Machine:
    """The pickle machine: a stack, marks on it, and a memo."""

    def __init__(self, data: bytes, where: str, finished: Finished) -> None:
        self._data = data
        self._where = where
        self._finished = finished
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._places: dict[int, int] = {}  # identity of a list or dictionary in the memo → its index
        self._open: dict[int, Any] = {}  # dictionaries that are filled item by item
        self._values = _Values(self._memo)
        self._most_memos = most_memos(len(data))

    def run(self) -> Any:
        data, stack, memo, marks, places = self._data, self._stack, self._memo, self._marks, self._places
        values, size, place = self._values, len(self._data), 0
        push, pushes, words = stack.append, _PUSHES.match, _PUSH.findall
        while place < size:
            opcode = data[place]
            if opcode in _PUSHING:
                match = pushes(data, place)
                if match is None:
                    place = self._other(opcode, place)
                    continue
                place = match.end()
                stack.extend([values[word] for word in words(match[0])])
            elif opcode == 0x94:  # MEMOIZE
                value = stack[-1]
                if type(value) in _CONTAINERS:
                    places[id(value)] = len(memo)
                memo.append(value)
                place += 1
            elif opcode == 40:  # MARK
                marks.append(len(stack))
                place += 1
            elif opcode == 125:  # EMPTY_DICT
                push({})
                place += 1
            elif opcode == 117:  # SETITEMS
                self._set_items(marks.pop())
                place += 1
            elif opcode == 93:  # EMPTY_LIST
                push([])
                place += 1
            elif opcode == 101:  # APPENDS
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                self._list().extend(self._finish(items) if self._open else items)
                place += 1
            elif opcode == 46:  # STOP
                return stack.pop()
            else:
                place = self._other(opcode, place)
        raise damaged(self._where, "it ends before its end")

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            raise damaged(self._where, "items for what is no list")
        return target

    def _items(self, mark: int) -> list[Any]:
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _finish(self, items: list[Any]) -> list[Any]:
        """Members of a list, of which dictionaries that were filled item by item (protocol 0) are finished by now."""
        return [
            self._finished_now(each) if self._open.pop(id(each), None) is not None else each for each in items
        ]

    def _finished_now(self, target: dict[Any, Any]) -> Any:
        result = self._finished(target, self._replace)
        if result is not target:
            self._replace(target, result)
        return result

    def _set_items(self, mark: int, *, last: bool = True) -> None:
        items = self._items(mark)
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise damaged(self._where, "items for what is no dictionary")
        keys = items[::2]
        if not PLAIN_KEYS.issuperset(map(type, keys)):
            self._check(keys)
        target.update(zip(keys, items[1::2], strict=True))
        if last:
            self._stack[-1] = self._finished_now(target)
        else:
            self._open[id(target)] = target

    def _replace(self, container: Any, other: Any) -> None:
        index = self._places.pop(id(container), None)
        if index is not None:
            self._memo[index] = other

    def _check(self, keys: list[Any]) -> None:
        """Keys may be tuples of scalars; the hash of nested ones can take for ever."""
        for key in keys:
            plain = type(key) in PLAIN_KEYS
            if not plain and not (type(key) is tuple and all(type(part) in PLAIN_KEYS for part in key)):
                raise refused(self._where, f"a key or member of type {type(key).__name__}")

    def _other(self, opcode: int, place: int) -> int:
        """One opcode of the rarer ones; the place after it."""
        data, push = self._data, self._stack.append
        if opcode == 0x8A:  # LONG1 of an uncommon length
            body, place = self._counted(place, 1)
            push(int.from_bytes(body, "little", signed=True))
            return place
        if (prefix := _TEXTS.get(opcode)) is not None:
            body, place = self._counted(place, prefix)
            push(body.decode("utf-8", "surrogatepass"))
            return place
        if opcode == ord("a"):
            item = self._stack.pop()
            self._list().extend(self._finish([item]))
        elif opcode == ord("s"):
            self._set_items(len(self._stack) - 2, last=False)
        elif opcode in _TUPLE_SIZES:
            items = self._items(len(self._stack) - _TUPLE_SIZES[opcode])
            if len(items) != _TUPLE_SIZES[opcode]:
                raise damaged(self._where, "a tuple without its members")
            push(tuple(items))
        elif opcode == ord("t"):
            push(tuple(self._items(self._marks.pop())))
        elif opcode == ord(")"):
            push(())
        elif opcode == ord("q"):
            self._put(data[place + 1])
            return place + 2
        elif opcode == ord("r"):
            self._put(int.from_bytes(data[place + 1 : place + 5], "little"))
            return place + 5
        elif opcode == ord("G"):
            push(struct.unpack_from(">d", data, place + 1)[0])
            return place + 9
        elif opcode == 0x95:  # FRAME: only says how much to read at once
            return place + 9
        elif opcode == 0x80:  # PROTO
            if data[place + 1] > 5:
                raise damaged(self._where, f"unsupported pickle protocol {data[place + 1]}")
            return place + 2
        else:
            return self._rare(opcode, place)
        return place + 1

    def _rare(self, opcode: int, place: int) -> int:
        """Opcodes of old protocols, and those that are refused."""
        push = self._stack.append
        if (prefix := _BYTES.get(opcode)) is not None:
            body, place = self._counted(place, prefix)
            as_text = opcode in b"UT"  # strings of Python 2
            push(body.decode("ascii") if as_text else bytearray(body) if opcode == 0x96 else body)
            return place
        if opcode == 0x8B:  # LONG4
            body, place = self._counted(place, 4)
            push(int.from_bytes(body, "little", signed=True))
            return place
        if opcode in b"IFLSVgp":
            end = self._data.index(b"\n", place)
            self._line(opcode, self._data[place + 1 : end])
            return end + 1
        if opcode == ord("l"):
            push(self._items(self._marks.pop()))
        elif opcode == ord("d"):
            mark = self._marks.pop()
            self._stack.insert(mark, {})
            self._set_items(mark + 1)
        elif opcode == 0x8F:  # EMPTY_SET
            push(set())
        elif opcode == 0x90:  # ADDITEMS
            items = self._items(self._marks.pop())
            self._check(items)
            if type(self._stack[-1]) is not set:
                raise damaged(self._where, "members for what is no set")
            self._stack[-1].update(items)
        elif opcode == 0x91:  # FROZENSET
            items = self._items(self._marks.pop())
            self._check(items)
            push(frozenset(items))
        elif opcode == ord("0"):
            self._stack.pop()
        elif opcode == ord("1"):
            self._items(self._marks.pop())
        elif opcode == ord("2"):
            push(self._stack[-1])
        else:
            self._refuse(opcode, place)
        return place + 1

    def _line(self, opcode: int, text: bytes) -> None:
        push = self._stack.append
        if opcode == ord("I"):
            push(text == b"01" if text in (b"00", b"01") else int(text))
        elif opcode == ord("L"):
            push(int(text.removesuffix(b"L")))
        elif opcode == ord("F"):
            push(float(text))
        elif opcode == ord("S"):
            text = text.strip()
            if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
                raise damaged(self._where, "a string without quotes")
            push(codecs.escape_decode(text[1:-1])[0].decode("ascii"))
        elif opcode == ord("V"):
            push(text.decode("raw-unicode-escape"))
        elif opcode == ord("g"):
            push(self._memo[int(text)])
        else:
            self._put(int(text))

    def _counted(self, place: int, prefix: int) -> tuple[bytes, int]:
        start = place + 1 + prefix
        end = start + int.from_bytes(self._data[place + 1 : start], "little")
        if end > len(self._data):
            raise damaged(self._where, "it ends before its end")
        return self._data[start:end], end

    def _put(self, index: int) -> None:
        if not 0 <= index <= self._most_memos:
            raise damaged(self._where, "a memo index out of proportion to its size")
        value, memo = self._stack[-1], self._memo
        if type(value) in _CONTAINERS:
            self._places[id(value)] = index
        if index < len(memo):
            self._values.clear()
            memo[index] = value
        else:
            memo.extend([None] * (index - len(memo)))
            memo.append(value)

    def _refuse(self, opcode: int, place: int) -> None:
        if opcode in b"ci":  # GLOBAL, INST: two lines
            module, name = self._data[place + 1 : place + 1024].split(b"\n")[:2]
            raise refused(
                self._where, f"{module.decode('utf-8', 'replace')}.{name.decode('utf-8', 'replace')}"
            )
        if opcode == 0x93:  # STACK_GLOBAL: the names lie on the stack
            module_name = ".".join(str(part) for part in self._stack[-2:] if type(part) is str)
            raise refused(self._where, module_name or "a name from the stack")
        if opcode in OTHER_OPCODES:
            raise refused(self._where, f"the opcode {OTHER_OPCODES[opcode]}")
        raise damaged(self._where, f"no opcode {opcode:#04x}")
