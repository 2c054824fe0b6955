"""Benchmark of ``grouped_linear`` at the sizes of DeepSeek-V4-Flash's ``wo_a``, in bfloat16 and in FP8."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.grouped_linear import grouped_linear

GROUPS, SIZE_N, SIZE_K = 8, 1024, 4096


def cases(device: torch.device) -> Iterator[Work]:
    plain = torch.randn(GROUPS, SIZE_N, SIZE_K, dtype=torch.bfloat16, device=device)
    fp8 = (plain.float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight_sf = torch.exp2(torch.randint(-14, -8, (GROUPS, SIZE_N // 128, SIZE_K // 128), device=device).float())
    for name, weight, sf in (("bfloat16", plain, None), ("fp8", fp8, weight_sf)):
        for num_tokens in (1, 8, 64, 512, 8192):
            x = torch.randn(num_tokens, GROUPS, SIZE_K, dtype=torch.bfloat16, device=device)
            yield Work(
                f"{name}, {num_tokens} tokens",
                lambda x=x, weight=weight, sf=sf: grouped_linear(x, weight, sf),
                bytes=weight.nbytes + x.nbytes + 2 * num_tokens * GROUPS * SIZE_N,
                flops=2 * num_tokens * GROUPS * SIZE_N * SIZE_K,
            )


if __name__ == "__main__":
    main("grouped_linear", cases)
