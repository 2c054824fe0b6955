"""Benchmark of ``experts`` with MXFP4 weights, at the sizes of DeepSeek-V4-Flash and any number of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.bench_experts_prefill import EXPERTS, HIDDEN, INTERMEDIATE, TOPK, make_tokens, make_weights
from benchmarks.harness import Work, main
from vllm_dsv4.kernels.experts import experts


def cases(device: torch.device) -> Iterator[Work]:
    w13, w2, w13_sf, w2_sf = make_weights("mxfp4", device)
    stored = sum(tensor.nbytes for tensor in (w13, w2, w13_sf, w2_sf) if tensor is not None)
    for num_tokens in (1, 8, 64, 512, 8192):
        x, topk_weights, topk_ids = make_tokens(num_tokens, device)
        hit = topk_ids.unique().numel()

        def run(x: torch.Tensor = x, weights: torch.Tensor = topk_weights, ids: torch.Tensor = topk_ids) -> torch.Tensor:
            return experts(x, weights, ids, w13, w2, w13_sf, w2_sf, 10.0)

        flops = 2 * num_tokens * TOPK * 3 * HIDDEN * INTERMEDIATE
        yield Work(f"{num_tokens} tokens, {hit} experts", run, bytes=stored * hit // EXPERTS, flops=flops)


if __name__ == "__main__":
    main("experts", cases)
