"""How well a matrix product's shape fits the hardware: alignment, tiles, waves.

From NVIDIA's "Matrix Multiplication Background User's Guide" (docs.nvidia.com/deeplearning/performance):

* **Alignment.** Rows in memory that are no multiple of 16 bytes (8 elements of fp16, 16 of fp8) keep kernels
  from loading whole vectors, so slower ones are chosen. Only dimensions that are contiguous in some operand
  count: always n (rows of the result), and those that the kernel's layout names.
* **Tile quantisation.** The result is cut into tiles (say 128×256); those at the edge compute what nobody
  asked for: the useful share is m·n over the tiles' area.
* **Wave quantisation.** Tiles run in waves, one on each multiprocessor at a time (or as many as fit); in the
  last wave most may be idle: the useful share is waves over waves rounded up.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from ._products import Product

__all__ = ["Fit", "fit_of", "padded"]

#: Bytes that a row in memory should be a multiple of.
ALIGNED_BYTES = 16
#: What a dimension is padded to: 64 elements of two bytes are 128 bytes, a cache line.
PAD_TO = 64

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp8": 1, "int8": 1}
#: Kernels that give each multiprocessor tiles until none is left: the grid is the device, not the work.
_PERSISTENT = re.compile(r"nvjet|persistent|stream_?k|segment_k|_SK\d|coop|StreamK|sm90_xmma", re.IGNORECASE)
_TILES = tuple(
    re.compile(pattern)
    for pattern in (
        r"_MT(\d+)x(\d+)x\d+",  # AMD's Tensile
        r"tilesize(\d+)x(\d+)x\d+",  # xmma
        r"(?:gemm|fprop|dgrad|wgrad)\w*?_(\d+)x(\d+)_",  # cutlass, cuBLAS: ..._128x256_32x3_tn
        r"nvjet_\w+?_(\d+)x(\d+)_",
        r"(?:gemm|cudnn)_(\d+)x(\d+)",  # volta_sgemm_128x64_nt
    )
)
_LAYOUT = re.compile(r"_([nt])([nt])(?:_|$|<|>|\(|[0-9v])")
_NVJET_LAYOUT = re.compile(r"_([NT])([NT])[NT](?:_|$)")
_TENSILE_LAYOUT = re.compile(r"Cijk_A(il|li)k?\w*?_B(lj|jl)k?")


@dataclass(frozen=True, slots=True)
class Fit:
    """``misaligned`` names the dimensions (m, n, k) that break alignment. ``tile_use`` and ``wave_use`` are useful
    shares (0..1), 1 where they are unknown; ``tile`` is (rows, columns) of the result, ``waves`` a count."""

    misaligned: tuple[str, ...]
    tile: tuple[int, int] | None
    tile_use: float
    waves: float | None
    wave_use: float

    @property
    def use(self) -> float:
        """Useful share of what the tiles compute and the multiprocessors could."""
        return self.tile_use * self.wave_use


def fit_of(
    product: Product,
    dtype: str | None,
    kernel: str,
    grid_blocks: int | None,
    block_threads: int | None = None,
    occupancy: float | None = None,
    multiprocessors: int | None = None,
) -> Fit:
    """The fit of a product to the kernel that ran it. What the source does not say costs nothing."""
    tile = tile_of(kernel)
    waves, wave_use = _waves(kernel, grid_blocks, block_threads, occupancy, multiprocessors)
    return Fit(
        misaligned=_misaligned(product, dtype, kernel),
        tile=tile,
        tile_use=_tile_use(product, tile),
        waves=waves,
        wave_use=wave_use,
    )


def padded(value: int) -> int:
    """The next multiple of :data:`PAD_TO`: a vocabulary of 50,257 becomes 50,304."""
    return -(-value // PAD_TO) * PAD_TO


@lru_cache(maxsize=8192)
def tile_of(kernel: str) -> tuple[int, int] | None:
    """The tile that a kernel's name tells."""
    for pattern in _TILES:
        match = pattern.search(kernel)
        if match is not None:
            tile = int(match[1]), int(match[2])
            if min(tile) >= 8 and max(tile) <= 512:
                return tile
    return None


@lru_cache(maxsize=8192)
def contiguous(kernel: str) -> frozenset[str]:
    """Dimensions that lie contiguous in an operand, as far as the kernel's name tells its layout.

    Libraries count columns first and PyTorch rows, so their first operand is PyTorch's second: ``t`` there
    means that k is contiguous in it, ``n`` that n is; for the other one ``n`` means k, and ``t`` means m.
    """
    found = {"n"}
    tensile = _TENSILE_LAYOUT.search(kernel)
    if tensile is not None:
        found.add("n" if tensile[1] == "il" else "k")
        found.add("k" if tensile[2] == "lj" else "m")
        return frozenset(found)
    layout = _NVJET_LAYOUT.search(kernel) if "nvjet" in kernel else _LAYOUT.search(kernel)
    if layout is not None:
        found.add("k" if layout[1].lower() == "t" else "n")
        found.add("k" if layout[2].lower() == "n" else "m")
    return frozenset(found)


def _misaligned(product: Product, dtype: str | None, kernel: str) -> tuple[str, ...]:
    size = _ELEMENT_BYTES.get(dtype or "")
    if size is None:
        return ()
    multiple = ALIGNED_BYTES // size
    relevant = contiguous(kernel)
    # A dimension of one is a vector: what lies contiguous is then the other one.
    sides = {"m": product.m, "n": product.n, "k": product.k}
    return tuple(name for name, side in sides.items() if name in relevant and side > 1 and side % multiple)


def _tile_use(product: Product, tile: tuple[int, int] | None) -> float:
    """m·n over the tiles' area, of the two ways in which a tile may lie the kinder one."""
    if tile is None or product.m < 1 or product.n < 1:
        return 1.0

    def use(rows: int, columns: int) -> float:
        area = math.ceil(product.m / rows) * rows * math.ceil(product.n / columns) * columns
        return product.m * product.n / area

    return max(use(*tile), use(*reversed(tile)))


def _waves(
    kernel: str,
    grid_blocks: int | None,
    block_threads: int | None,
    occupancy: float | None,
    multiprocessors: int | None,
) -> tuple[float | None, float]:
    if not grid_blocks or not multiprocessors or _PERSISTENT.search(kernel):
        return None, 1.0
    resident = _resident(block_threads, occupancy)
    if grid_blocks <= multiprocessors * resident:
        resident = 1  # a single wave: some multiprocessors have one block more than others
    waves = grid_blocks / (multiprocessors * resident)
    return waves, waves / math.ceil(waves)


#: Threads that a multiprocessor of a data-centre device holds (CUDA programming guide, compute capability 7.0,
#: 8.0, 9.0, 10.0; a CDNA compute unit as well).
_THREADS = 2048


def _resident(block_threads: int | None, occupancy: float | None) -> int:
    """Blocks that a multiprocessor holds at a time, from the profiler's occupancy; 1 where unknown."""
    if not block_threads or occupancy is None or not occupancy > 0:
        return 1
    return max(round(occupancy * _THREADS / block_threads), 1)
