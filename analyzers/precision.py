"""Which precision matrix products run in, and whether on tensor cores, from the names of device kernels.

Vendors' libraries write the types into the name: cuBLAS and CUTLASS ``..._bf16_bf16_...``,
``s16816gemm_fp16``, ``tf32``, ``sgemm``; AMD's Tensile ``Cijk_..._BBS_BH`` (B bf16, H fp16, S fp32,
F8 fp8); cuDNN ``xmma_fprop_implicit_gemm_f16f16...``. A product whose name tells no type is not counted.

They also write the instruction: ``tensorop``, ``hmma``, ``s16816gemm`` (a 16×8×16 tensor-core instruction),
``MI16x16x16x1`` (AMD's matrix cores), ``xdlops``; or ``simt``, ``sgemm``, ``scudnn`` (none of them).
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["causal", "matmul_dtype", "on_tensor_cores"]

_MATMUL = re.compile(
    r"gemm|gemv|matmul|_mma|scudnn|hmma|cutlass|xmma|wgmma|^Cijk_|implicit_convolve|conv2d|dgrad|wgrad|fprop|winograd|nvjet",
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
    dtype = next((dtype for pattern, dtype in _TYPES if pattern.search(kernel)), None)
    # NVIDIA's tensor cores take no fp32: a kernel of theirs that names only that rounds to tf32.
    return "tf32" if dtype == "fp32" and _TENSOR.search(kernel) and not _PLAIN.search(kernel) else dtype


#: Kernels of ordinary arithmetic units. ``gemv`` and ``gemmk1`` are products with a vector: no matrix unit would help.
_PLAIN = re.compile(
    r"simt|(?<![a-z0-9])[sdc]gemm|scudnn|gemv|gemmk1|gemmSN|convolve_sgemm|wgrad_alg0|dgrad_engine|wgrad_engine|winograd"
    r"|naive_conv|Sp3AsmConv|conv2d_grouped_direct|depthwise|dot_kernel|_h(?:fma|gemm)_|fp16_hcudnn|MIOpenConv|MIOpenGroupConv"
    r"|gcnAsmConv|conv_bin_|fft",
    re.IGNORECASE,
)
_TENSOR = re.compile(
    r"tensor_?op|[hiqd]mma|wgmma|(?<![a-z])[a-z]?[hsid]?(?:884|1688|8816|16816|16832|161616|1684)(?:gemm|fprop|dgrad|wgrad|cudnn)?"
    r"|tensor16x8x|tensor8x8x|nvjet|sm(?:90|100|103|120)_xmma|cutlass3x|cutlass_3x|gtcx|xdl|_wmma|mfma|Flash_fwd|flash_fwd"
    r"|flash_bwd|triton_tem|attn_fwd|GmmaLayout|MainloopSm(?:90|100)",
    re.IGNORECASE,
)
_XMMA = re.compile(
    r"xmma_(?:gemm|fprop|dgrad|wgrad|\w*implicit_gemm)\w*?_(bf16|f16|tf32|i8|e4m3|e5m2|f32)", re.IGNORECASE
)
_TENSILE_MATRIX = re.compile(r"_MI\d+x\d+")
_TENSILE_ANY = re.compile(r"_MT\d+x\d+")


@lru_cache(maxsize=65536)
def on_tensor_cores(kernel: str) -> bool | None:
    """Whether a kernel of a product runs on tensor (matrix) cores; None where the name does not tell."""
    if kernel.startswith("Cijk_"):
        if _TENSILE_MATRIX.search(kernel):
            return True
        return False if _TENSILE_ANY.search(kernel) else None
    if _PLAIN.search(kernel):
        return False
    if _TENSOR.search(kernel):
        return True
    xmma = _XMMA.search(kernel)
    if xmma is not None:
        return xmma[1].lower() != "f32" or "tf32" in kernel.lower()
    return None


_FLASH = re.compile(r"\b(?:flash|fmha)_\w*kernel<")


@lru_cache(maxsize=8192)
def causal(kernel: str) -> bool | None:
    """Whether an attention kernel skips what a causal mask hides; None where the name does not tell.

    FlashAttention's kernels bear it in their template: ``<traits, Is_dropout, Is_causal, ...>``, and
    ``<traits, Is_causal, ...>`` where keys are split.
    """
    match = _FLASH.search(kernel)
    if match is None:
        return None
    depth, flags, word = 1, [], ""
    for character in kernel[match.end() :]:
        depth += (character == "<") - (character == ">")
        if depth == 0 or (depth == 1 and character == ","):
            flags.append(word.strip())
            word = ""
            if depth == 0:
                break
        else:
            word += character
    place = 1 if "splitkv" in match[0] else 2
    value = flags[place] if len(flags) > place else ""
    return {"true": True, "false": False, "(bool)1": True, "(bool)0": False}.get(value)
