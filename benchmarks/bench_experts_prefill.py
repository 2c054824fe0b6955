"""Benchmark of ``experts`` for many tokens, at the sizes of DeepSeek-V4-Flash."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels._experts_prefill import experts_prefill

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 256, 4096, 2048, 6


def make_weights(format: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(w13, w2, w13_sf, w2_sf), random."""
    shapes = ((EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
    byte = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.uint8, device=device)  # noqa: E731
    if format == "mxfp4":
        return *(byte(0, 256, e, n, k // 2) for e, n, k in shapes), *(byte(118, 122, e, n, k // 32) for e, n, k in shapes)
    codes = (byte(0, 120, *shape).view(torch.float8_e4m3fn) for shape in shapes)
    return *codes, *(torch.rand(e, n // 128, k // 128, device=device) * 1e-3 for e, n, k in shapes)


def make_tokens(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, topk_weights, topk_ids)."""
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    topk_ids = torch.rand(num_tokens, EXPERTS, device=device).topk(TOPK).indices.int()
    return x, torch.rand(num_tokens, TOPK, device=device), topk_ids


def cases(device: torch.device) -> Iterator[Work]:
    for format, sizes in (("mxfp4", (128, 512, 2048, 8192)), ("fp8", (2048, 8192))):
        w13, w2, w13_sf, w2_sf = make_weights(format, device)
        for num_tokens in sizes:
            x, topk_weights, topk_ids = make_tokens(num_tokens, device)

            def run(x=x, weights=topk_weights, ids=topk_ids, w13=w13, w2=w2, w13_sf=w13_sf, w2_sf=w2_sf) -> torch.Tensor:
                return experts_prefill(x, weights, ids, w13, w2, w13_sf, w2_sf, 10.0, None)

            flops = 2 * num_tokens * TOPK * 3 * HIDDEN * INTERMEDIATE
            hit = topk_ids.unique().numel() / EXPERTS
            stored = sum(tensor.nbytes for tensor in (w13, w2, w13_sf, w2_sf) if tensor is not None)
            yield Work(f"{format}, {num_tokens} tokens", run, bytes=int(hit * stored), flops=flops)


if __name__ == "__main__":
    main("experts (prefill)", cases)
