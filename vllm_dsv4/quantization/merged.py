"""Linear layers of one input, computed as one product: fewer launches, and more rows to share among a GPU's processors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from vllm_dsv4.quantization.linear import BLOCK


class MergedLinear:
    """``merged(x)`` is ``tuple(layer(x) for layer in layers)``; results are column slices of one tensor once ``merge`` has run.

    The layers have the same format and ``out_dtype``. Not a module: the layers, which keep their checkpoint names, are
    registered where they belong.
    """

    def __init__(self, *layers: Any):
        self.layers = layers
        self.out_dtype = getattr(layers[0], "out_dtype", None)
        self.weight: torch.Tensor | None = None

    def merge(self) -> None:
        """Once the weights are loaded: join them, and make the layers' parameters views of the result."""
        # Rows of different layers must not share a block's scale.
        align = BLOCK if hasattr(self.layers[0], "scale") else 1
        self.weight, self.starts = _join([layer.weight for layer in self.layers], align)
        if align == BLOCK:
            self.scale, _ = _join([layer.scale for layer in self.layers], 1)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.weight is None:
            return tuple(layer(x) for layer in self.layers)
        out = self.layers[0].quant_method.apply(self, x)
        return tuple(out[:, start : start + layer.weight.shape[0]] for start, layer in zip(self.starts, self.layers, strict=True))


def _join(parameters: list[nn.Parameter], align: int) -> tuple[torch.Tensor, list[int]]:
    """The rows of all parameters, each part filled with zeros to a multiple of ``align``, and where the parts begin."""
    padded = [pad(parameter.data.view(torch.uint8), (0, 0, 0, -parameter.shape[0] % align)) for parameter in parameters]
    joined = torch.cat(padded).view(parameters[0].dtype)
    starts, start = [], 0
    for parameter, part in zip(parameters, padded, strict=True):
        parameter.data = joined[start : start + parameter.shape[0]]
        starts.append(start)
        start += part.shape[0]
    return joined, starts
