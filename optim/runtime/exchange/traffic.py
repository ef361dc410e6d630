"""What a rank gives away in an exchange, and what the plain all-reduce would have cost it.

Bytes are counted as nccl-tests count for bus bandwidth: the bytes of a call times its factor, 2(n−1)/n for an
all-reduce, (n−1)/n for all-to-all, all-gather and reduce-scatter. So an all-reduce and the two phases that replace it
compare as they load a link, whatever algorithm the backend picks.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic", "all_reduce_bytes", "one_phase_bytes"]


def all_reduce_bytes(size_bytes: float, ranks: int) -> float:
    """Sent by each of ``ranks`` in an all-reduce of ``size_bytes`` (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * size_bytes


def one_phase_bytes(size_bytes: float, ranks: int) -> float:
    """Of an all-to-all's send buffer, an all-gather's output or a reduce-scatter's input."""
    return (ranks - 1) / ranks * size_bytes


@dataclass(slots=True)
class Traffic:
    """Sums since the start, in bytes given away by this rank."""

    sent: float = 0.0
    plain: float = 0.0  # by the uncompressed exchange of the same gradients

    def add(self, sent: float, plain: float) -> None:
        """One exchange."""
        self.sent += sent
        self.plain += plain
