"""Kernel names: what versions and profilers change in them is not what tells kernels apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.kernel_names import base_name, likeness, pair_names, short_name

ADD_OLD = "void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>, at::detail::Array<char*, 3>>(int, AddFunctor<float>, at::detail::Array<char*, 3>)"
ADD_NEW = "void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>, std::array<char*, 3ul> >(int, T2, T3)"
ADD_MANGLED = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_10AddFunctorIfEESt5arrayIPcLm3EEEEviT0_T1_"
)
MUL_NEW = ADD_NEW.replace("Add", "Mul")


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (ADD_OLD, "vectorized_elementwise_kernel"),
        (ADD_MANGLED, "vectorized_elementwise_kernel"),
        ("_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE", "ncclDevKernel_SendRecv"),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>(float*)",
            "CatArrayBatchedCopy",
        ),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(int)", "kernel"),
        ("triton_poi_fused_add_mul_17", "triton_poi_fused_add_mul"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("", ""),
    ],
)
def test_the_base_is_the_functions_own_name(name: str, base: str) -> None:
    assert base_name(name) == base


def test_one_kernel_under_three_spellings_is_alike_and_another_is_not() -> None:
    for one in (ADD_OLD, ADD_NEW, ADD_MANGLED):
        assert all(likeness(one, other) == 1 for other in (ADD_OLD, ADD_NEW, ADD_MANGLED))
        assert likeness(one, MUL_NEW) < 0.5
    assert likeness(ADD_NEW, "another_kernel<AddFunctor<float>>") == 0


def test_names_are_paired_each_once_and_the_likeliest_first() -> None:
    mul_old = ADD_OLD.replace("Add", "Mul")
    assert sorted(pair_names([mul_old, ADD_OLD], [ADD_NEW, MUL_NEW])) == sorted(
        [(ADD_OLD, ADD_NEW), (mul_old, MUL_NEW)]
    )
    assert pair_names([ADD_OLD], [MUL_NEW]) == []
    assert pair_names([ADD_OLD, ADD_MANGLED], [ADD_NEW]) == [(ADD_OLD, ADD_NEW)]
    assert pair_names(["triton_poi_fused_add_3"], ["triton_poi_fused_add_8"]) == [
        ("triton_poi_fused_add_3", "triton_poi_fused_add_8")
    ]


def test_short_names_keep_what_tells_kernels_apart() -> None:
    assert short_name(ADD_NEW) == "vectorized_elementwise_kernel<AddFunctor, float>"
    assert short_name(MUL_NEW) == "vectorized_elementwise_kernel<MulFunctor, float>"
    assert short_name("ampere_sgemm_128x64_tn") == "ampere_sgemm_128x64_tn"


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_is_a_name(first: str, second: str) -> None:
    assert isinstance(short_name(first), str)
    assert likeness(first, first) == 1
    assert 0 <= likeness(first, second) == likeness(second, first) <= 1


@given(st.from_regex(r"_Z(N?([0-9]{1,3}[a-z_A-Z0-9]{0,9}){0,6}I?(L[ib][0-9]E){0,3}E*)", fullmatch=True))
def test_any_mangled_text_is_a_name(name: str) -> None:
    assert isinstance(base_name(name), str) and likeness(name, name) == 1
