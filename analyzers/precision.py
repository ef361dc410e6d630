"""Which precision matrix products run in, from the names of device kernels.

Vendors' libraries write the types into the name: cuBLAS and CUTLASS ``..._bf16_bf16_...``,
``s16816gemm_fp16``, ``tf32``, ``sgemm``; AMD's Tensile ``Cijk_..._BBS_BH`` (B bf16, H fp16, S fp32,
F8 fp8); cuDNN ``xmma_fprop_implicit_gemm_f16f16...``. A product whose name tells no type is not counted.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["matmul_dtype"]

_MATMUL = re.compile(
    r"gemm|gemv|matmul|_mma|hmma|cutlass|xmma|wgmma|^Cijk_|implicit_convolve|conv2d|dgrad|wgrad|fprop|winograd|nvjet",
    re.IGNORECASE,
)

#: First match wins: a name of tf32 kernels also says f32, one of bf16 kernels also f32 (what it adds in).
_TYPES = tuple(
    (re.compile(pattern, re.IGNORECASE), dtype)
    for pattern, dtype in (
        (r"e4m3|e5m2|fp8|f8f8|qmma|nvjet_(?:sm\d+_)?q", "fp8"),
        (r"bf16|bfloat|DF16b|nvjet_(?:sm\d+_)?t", "bf16"),
        (r"tf32", "tf32"),
        (r"fp16|_f16|f16f16|half|h884|s884|h1688|h16816|s16816|hgemm|DF16_|nvjet_(?:sm\d+_)?h", "fp16"),
        # Turing's fp16 kernels of this shape say fp16 and are found above; Ampere's take tf32.
        (r"s1688", "tf32"),
        (r"f32f32|sgemm|float|_f32|fp32|scudnn|nvjet_(?:sm\d+_)?s", "fp32"),
    )
)
_TENSILE = re.compile(r"^Cijk_[A-Z][a-z]+_[A-Z][a-z]+_([A-Z0-9]+)_")
_TENSILE_TYPES = {"B": "bf16", "H": "fp16", "S": "fp32", "X": "tf32", "F": "fp8"}


@lru_cache(maxsize=65536)
def matmul_dtype(kernel: str) -> str | None:
    """``bf16``, ``fp16``, ``tf32``, ``fp8`` or ``fp32`` for a kernel of a matrix product or convolution;
    ``None`` for other kernels and where the name does not tell."""
    if _MATMUL.search(kernel) is None:
        return None
    tensile = _TENSILE.match(kernel)
    if tensile is not None:
        return _TENSILE_TYPES.get(tensile[1][0])
    return next((dtype for pattern, dtype in _TYPES if pattern.search(kernel)), None)
