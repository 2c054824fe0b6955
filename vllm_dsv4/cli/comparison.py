"""What a served model said about texts, compared with what the dense model says about the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ServedText:
    """A prompt and its greedy continuation, with log-probabilities as the engine reported them."""

    prompt: list[int]
    completion: list[int]
    log_probs: list[dict[int, float]]
    """Item i is of position i + 1: its token's log-probability and those of likelier ones, by token id."""

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Difference:
    """Two log-probabilities of the same token at the same place. Positions count from 0, the start of the prompt."""

    prompt: int
    position: int
    token: int
    served: float
    dense: float

    @property
    def size(self) -> float:
        """Nats; infinite if either is NaN, or only one of them infinite."""
        if self.served == self.dense:
            return 0.0
        size = abs(self.served - self.dense)
        return math.inf if math.isnan(size) else size


@dataclass(frozen=True)
class Divergence:
    """The first generated token of a prompt that the dense model would not have chosen."""

    prompt: int
    position: int
    served_token: int
    dense_token: int
    margin: float
    """By how much the dense model prefers its own token to the served one, nats."""
    top2_gap: float
    """Between the dense model's best two, nats."""


@dataclass(frozen=True)
class Comparison:
    num_prompts: int
    num_values: int
    """Log-probabilities compared."""
    largest: Difference
    divergences: list[Divergence]

    def agrees(self, tolerance: float) -> bool:
        """No log-probability differs by more than ``tolerance``, and no token was chosen that such differences cannot explain."""
        # Two candidates may each be off by the tolerance before their order turns.
        return self.largest.size <= tolerance and all(divergence.margin <= 2 * tolerance for divergence in self.divergences)


def compare(served: Sequence[ServedText], dense: Sequence[torch.Tensor]) -> Comparison:
    """Compare every reported log-probability, and every generated token.

    After a divergence both still speak about the served text.

    Args:
        served: at least one text of at least two tokens.
        dense: for each text, log-probabilities [len(sequence) - 1, V]: row i is of position i + 1.

    Raises:
        ValueError: nothing to compare, or the engine left out log-probabilities.
    """
    largest: Difference | None = None
    divergences, num_values = [], 0
    for prompt, (text, rows) in enumerate(zip(served, dense, strict=True)):
        _check_complete(prompt, text)
        for difference in _differences(prompt, text, rows):
            num_values += 1
            if largest is None or difference.size > largest.size:
                largest = difference
        divergence = _first_divergence(prompt, text, rows)
        divergences += [divergence] if divergence else []
    if largest is None:
        raise ValueError("there are no log-probabilities to compare; give prompts, and new tokens to generate")
    return Comparison(len(served), num_values, largest, divergences)


def _check_complete(prompt: int, text: ServedText) -> None:
    expected = len(text.sequence) - 1
    if len(text.log_probs) != expected:
        raise ValueError(f"the engine reported log-probabilities of {len(text.log_probs)} positions of prompt {prompt}, not of {expected}")
    for position, (token, reported) in enumerate(zip(text.sequence[1:], text.log_probs, strict=True), 1):
        if token not in reported:
            raise ValueError(f"the engine reported no log-probability for token {token} at position {position} of prompt {prompt}")


def _differences(prompt: int, text: ServedText, rows: torch.Tensor) -> list[Difference]:
    return [
        Difference(prompt, position, token, value, rows[position - 1, token].item())
        for position, reported in enumerate(text.log_probs, 1)
        for token, value in reported.items()
    ]


def _first_divergence(prompt: int, text: ServedText, rows: torch.Tensor) -> Divergence | None:
    start = len(text.prompt)
    for position, (token, row) in enumerate(zip(text.completion, rows[start - 1 :], strict=True), start):
        best = int(row.argmax())
        if best != token:
            top = row.topk(2).values
            return Divergence(prompt, position, token, best, (row[best] - row[token]).item(), (top[0] - top[1]).item())
    return None
