"""Benchmark of ``compressor_store``: each kind of compressor, column slices of the merged product."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.compressor_store import compressor_store
from vllm_dsv4.quantization.formats import STATE_BLOCK_SIZE, CompressorStateFormat


def cases(device: torch.device) -> Iterator[Work]:
    for head_dim, ratio, merged in ((512, 4, 2560), (128, 4, 2560), (512, 128, 1024)):
        fmt = CompressorStateFormat(head_dim, ratio)
        page_size = STATE_BLOCK_SIZE[ratio]
        ape = torch.randn(ratio, fmt.width, device=device)
        for num_tokens in (1, 64, 8192):
            projected = torch.randn(num_tokens, merged, device=device)[:, -fmt.row_dim :]
            kv, gate = projected.chunk(2, dim=1)
            positions = torch.arange(num_tokens, device=device)
            state_cache = torch.randn(num_tokens + 1, page_size, fmt.row_dim, device=device)
            slots = (torch.randperm(num_tokens, device=device) * page_size) + positions % page_size
            yield Work(
                f"ratio {ratio}, entries of {head_dim}, {num_tokens} tokens",
                lambda kv=kv, gate=gate, ape=ape, positions=positions, state_cache=state_cache, slots=slots: compressor_store(
                    kv, gate, ape, positions, state_cache, slots
                ),
                bytes=num_tokens * 2 * fmt.entry_bytes,
            )


if __name__ == "__main__":
    main("compressor_store", cases)
