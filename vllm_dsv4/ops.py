"""The ops of the model: one name each, whatever implements it.

``ops.NAME(...)`` calls ``NAME`` of the backend that ``backend.py`` selects for the device of its first tensor. Signatures
are listed in docs/architecture.md, and documented in ``reference/NAME.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from vllm_dsv4.backend import BACKENDS, select_backend


class Op:
    """An op that looks up its implementation by the device of its first argument."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        tensor = first if isinstance(first, torch.Tensor) else first[0]
        return _implementation(self.name, select_backend(tensor.device).name)(*args, **kwargs)


@cache
def _implementation(name: str, backend: str) -> Callable[..., Any]:
    if backend != "reference" and find_spec(f"{BACKENDS[backend]}.{name}") is None:
        backend = "reference"
    module = import_module(f"{BACKENDS[backend]}.{name}")
    return getattr(module, f"{name}_ref" if backend == "reference" else name)


activation_quantize = Op("activation_quantize")
compress_insert = Op("compress_insert")
completed_entries = Op("completed_entries")
compressor_store = Op("compressor_store")
entry_slots = Op("entry_slots")
experts = Op("experts")
fp8_linear = Op("fp8_linear")
grouped_linear = Op("grouped_linear")
hc_head = Op("hc_head")
hc_post = Op("hc_post")
hc_post_pre = Op("hc_post_pre")
hc_pre = Op("hc_pre")
indexer_query = Op("indexer_query")
indexer_topk = Op("indexer_topk")
inverse_rope = Op("inverse_rope")
linear = Op("linear")
norm_rope_insert = Op("norm_rope_insert")
rms_norm = Op("rms_norm")
router = Op("router")
sparse_mla = Op("sparse_mla")
swiglu = Op("swiglu")
token_to_req = Op("token_to_req")
window_slots = Op("window_slots")

OPS = tuple(name for name, value in list(globals().items()) if isinstance(value, Op))
