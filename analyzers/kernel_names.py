"""One kernel under two names: what versions, profilers and compilers change in a name, and what they leave.

    void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>, at::detail::Array<char*, 3>>(int, …)
    void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>, std::array<char*, 3ul> >(int, …)
    _ZN2at6native29vectorized_elementwise_kernelILi4ENS0_10AddFunctorIfEESt5arrayIPcLm3EEEEviT0_T1_

The base is ``vectorized_elementwise_kernel`` in all three; the words inside tell an addition from a product.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["base_name", "likeness", "pair_names", "short_name"]

#: Words that say nothing of what a kernel does: namespaces, containers, plain types, argument places.
_GENERIC = frozenset(
    {
        *(
            "at",
            "native",
            "std",
            "detail",
            "array",
            "char",
            "int",
            "unsigned",
            "long",
            "short",
            "bool",
            "void",
            "const",
        ),
        *(
            "operator",
            "lambda",
            "anonymous",
            "namespace",
            "true",
            "false",
            "cuda",
            "hip",
            "global",
            "gpu",
            "impl",
        ),
        *("kernel", "instance", "functor", "ul", "u", "l", "t", "args", "struct", "class", "enum"),
    }
)
#: Words that tell two names apart, yet say nothing to a reader.
_PLACES = frozenset(
    {
        "tensoriteratorbase",
        "c10",
        "gpu_kernel_impl_nocast",
        "gpu_kernel_impl",
        "trivialoffsetcalculator",
        "memory",
    }
)
_WORDS = re.compile(r"[a-z_]\w*", re.IGNORECASE)
_TEMPLATE_ARGUMENT = re.compile(r"^t\d*$")
_ANONYMOUS = re.compile(r"\((?:anonymous namespace|unnamed)\)::|<unnamed>::|_GLOBAL__N__\w+::")
#: The number at the end of what a compiler names counts kernels of the program.
_COUNTED = re.compile(r"^(triton_\w*?|.*_fused_\w*?)_\d+$")
#: Literal values and references to earlier parts, whose numbers are no lengths.
_LITERAL = re.compile(r"L[a-z]n?\d+E|[ST]\d*_|Ul\w?E\d*_")
#: Among template arguments ``f`` is float: after the brackets' beginning or another type's end.
_FLOAT = re.compile(r"If+[EiN_]|E_?f+E|fE")
_SPELLED = re.compile(r"(\d{1,3})")
#: Kernels whose words agree by at least this share are one kernel under two names.
_ALIKE = 0.5


@lru_cache(maxsize=65536)
def base_name(name: str) -> str:
    """The function's own name: no return type, namespaces, template arguments, parameters or running number."""
    if name.startswith("_Z"):
        parts = _spelled_out(name)
        return parts[-1] if parts else name
    if name.startswith(("Memcpy", "Memset")):
        return name
    plain = _without_templates(_ANONYMOUS.sub("", name)).split("(", 1)[0].strip()
    plain = plain.rsplit(" ", 1)[-1].rsplit("::", 1)[-1] or name
    counted = _COUNTED.match(plain)
    return counted[1] if counted else plain


def _without_templates(name: str) -> str:
    """A name without what stands between angle brackets, however deep."""
    kept, depth = [], 0
    for character in name:
        if character == "<":
            depth += 1
        elif character == ">" and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)


def _spelled_out(name: str) -> list[str]:
    """The nested name at the head of a mangled one (Itanium C++ ABI, 5.1.2): numbers say how long each part is."""
    at = 3 if name.startswith("_ZN") else 2
    parts = []
    while (found := _SPELLED.match(name, at)) is not None:
        start = found.end()
        end = start + int(found[1])
        if end > len(name):
            break
        if not name.startswith("_GLOBAL__N_", start):
            parts.append(name[start:end])
        at = end
        if not name.startswith("_ZN"):
            break  # what follows are the types of its arguments
    return parts


@lru_cache(maxsize=65536)
def _words(name: str) -> frozenset[str]:
    """The words of a name that say what it does, its own function's name left out."""
    if _COUNTED.match(name):
        return frozenset()  # a number is all that is left of it
    found = _mangled_words(name) if name.startswith("_Z") else _WORDS.findall(_ANONYMOUS.sub("", name))
    words = {word.lower() for word in found} - {base_name(name).lower()}
    return frozenset(word for word in words if word not in _GENERIC and not _TEMPLATE_ARGUMENT.match(word))


def _mangled_words(name: str) -> list[str]:
    """Every identifier of a mangled name, and the plain types that have one letter there."""
    text = _LITERAL.sub("_", name)
    words = ["float"] if _FLOAT.search(text) else []
    at = 0
    while (found := _SPELLED.search(text, at)) is not None:
        at = found.end() + int(found[1])
        part = text[found.end() : at]
        if len(part) == int(found[1]) and _WORDS.fullmatch(part):
            words += [] if part.startswith("_") else [part]
        else:
            at = found.end()
    return words


def short_name(name: str) -> str:
    """A name that fits a line: ``elementwise_kernel<direct_copy_kernel_cuda, BFloat16>`` of two hundred characters.

    The function with the words that say what it does, each once, in their order.
    """
    base = base_name(name)
    if name == base or name.startswith(("Memcpy", "Memset", "triton_")):
        return name
    telling = _words(name)
    found = _mangled_words(name) if name.startswith("_Z") else _WORDS.findall(_ANONYMOUS.sub("", name))
    words = dict.fromkeys(word for word in found if word.lower() in telling and word.lower() not in _PLACES)
    return f"{base}<{', '.join(words)}>" if words else base


def likeness(first: str, second: str) -> float:
    """Share of the words that two names have in common, 0 where their bases differ (Jaccard's index)."""
    if base_name(first) != base_name(second):
        return 0.0
    one, other = _words(first), _words(second)
    union = one | other
    return len(one & other) / len(union) if union else 1.0


def pair_names(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that are likely one kernel, the likeliest first, each name once.

    ``first`` and ``second`` hold the names that the other side lacks, those that matter most first.
    """
    by_base: dict[str, list[str]] = {}
    for name in second:
        by_base.setdefault(base_name(name), []).append(name)
    scored = [
        (likeness(name, other), place, other_place, name, other)
        for place, name in enumerate(first)
        for other_place, other in enumerate(by_base.get(base_name(name), ()))
    ]
    pairs: list[tuple[str, str]] = []
    used: set[tuple[int, str]] = set()
    for score, _, _, name, other in sorted(scored, key=lambda one: (-one[0], one[1], one[2])):
        if score >= _ALIKE and (0, name) not in used and (1, other) not in used:
            used |= {(0, name), (1, other)}
            pairs.append((name, other))
    return pairs
