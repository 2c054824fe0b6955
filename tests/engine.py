"""Runs vLLM engines for tests: each in a process of its own, described by a job and answering with plain data.

    results = run_engine(model_folder, [Batch(prompts, new_tokens=20)], max_num_batched_tokens=64)

A process a engine keeps engines from seeing each other's global state, and lets a test kill one that hangs.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 600
_DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "seed": 0,
}


@dataclass(frozen=True)
class Batch:
    """Prompts submitted together, decoded greedily."""

    prompts: list[list[int]]
    new_tokens: int
    prompt_logprobs: bool = False
    logprobs: int = 5
    """How many of the likeliest tokens to report at each generated position."""


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    logprobs: list[dict[int, float]]
    """At each generated position: log-probability by token id."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each prompt token but the first."""
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class EngineResult:
    batches: list[list[Completion]]
    metrics: dict[str, float]
    startup_seconds: float


def run_engine(model: str | Path, batches: list[Batch], env: dict[str, str] | None = None, **options: Any) -> EngineResult:
    """Start an engine on ``model`` with ``options`` of ``vllm.LLM``, run the batches one after another, return their completions."""
    processes = start_engine(model, batches, env, **options)
    return processes.result()


class EngineProcess:
    def __init__(self, process: subprocess.Popen[str], folder: tempfile.TemporaryDirectory[str]):
        self._process, self._folder = process, folder

    def result(self) -> EngineResult:
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            raise AssertionError(f"the engine did not finish within {TIMEOUT_SECONDS} s:\n{output[-4000:]}") from None
        answer = Path(self._folder.name) / "answer.json"
        # The answer counts even if the process then failed to shut down cleanly.
        if not answer.exists():
            raise AssertionError(f"the engine failed (exit status {self._process.returncode}):\n{output[-6000:]}")
        raw = json.loads(answer.read_text())
        self._folder.cleanup()
        batches = [[_completion(item) for item in batch] for batch in raw["batches"]]
        return EngineResult(batches, raw["metrics"], raw["startup_seconds"])


def start_engine(model: str | Path, batches: list[Batch], env: dict[str, str] | None = None, **options: Any) -> EngineProcess:
    """As ``run_engine``, but returns at once; for engines that must run beside each other (data parallelism)."""
    folder = tempfile.TemporaryDirectory()
    job = {"options": {"model": str(model), **_DEFAULTS, **options}, "batches": [asdict(batch) for batch in batches]}
    (Path(folder.name) / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **(env or {}),
    }
    process = subprocess.Popen(
        [sys.executable, __file__, folder.name], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return EngineProcess(process, folder)


def free_port() -> int:
    """A port for a server, below those that the system hands out: nobody is given it between this call and the server's start."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def _completion(raw: dict[str, Any]) -> Completion:
    return Completion(**{**raw, "logprobs": [{int(token): value for token, value in at.items()} for at in raw["logprobs"]]})


def _main(folder: Path) -> None:
    import time

    from vllm import LLM, SamplingParams

    job = json.loads((folder / "job.json").read_text())
    start = time.perf_counter()
    llm = LLM(disable_log_stats=False, **job["options"])
    startup_seconds = time.perf_counter() - start

    def run(batch: dict[str, Any]) -> list[dict[str, Any]]:
        sampling = SamplingParams(
            max_tokens=batch["new_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=batch["logprobs"],
            prompt_logprobs=0 if batch["prompt_logprobs"] else None,
        )
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        return [_describe(output) for output in llm.generate(prompts, sampling, use_tqdm=False)]

    batches = [run(batch) for batch in job["batches"]]
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    answer = {"batches": batches, "metrics": metrics, "startup_seconds": startup_seconds}
    partial = folder / "answer.json.partial"
    partial.write_text(json.dumps(answer))
    partial.rename(folder / "answer.json")


def _describe(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    prompt_logprobs = [at[token].logprob for token, at in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False) if at]
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [{token: entry.logprob for token, entry in at.items()} for at in completion.logprobs],
        "prompt_logprobs": prompt_logprobs,
        "num_cached_tokens": output.num_cached_tokens or 0,
    }


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
