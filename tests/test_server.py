"""vLLM's OpenAI server on a tiny quantised checkpoint: what clients get, and that no request of theirs ends it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from engine import free_port

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.reference.model import DenseModel

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

MODEL, VOCAB_SIZE, MAX_MODEL_LEN, TOKEN_BUDGET = "tiny", 1024, 1024, 256
START_SECONDS = 300
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Server:
    def __init__(self, port: int, log: Path):
        self.port = port
        self.log = log

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def get(self, path: str) -> str:
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON answer; ``body`` is sent as it is if bytes."""
        with closing(self.connect()) as connection:
            _send(connection, path, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def chat(self, text: str = "Hello", **options: Any) -> dict[str, Any]:
        status, answer = self.post(CHAT, _chat_request(text, **options))
        assert status == 200, answer
        return answer

    def complete(self, prompt: list[int], **options: Any) -> list[int]:
        """The tokens after ``prompt``, greedily."""
        status, answer = self.post(COMPLETIONS, _completion_request(prompt=prompt, **options))
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def stream(self, **options: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion; closing the iterator early closes the connection."""
        with closing(self.connect()) as connection:
            _send(connection, CHAT, _chat_request(stream=True, **options))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[len(b"data: ") :])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry ``labels``."""
        samples = re.findall(rf"^vllm:{name}{{(.*)}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [float(value) for found, value in samples if all(label in found for label in wanted)]
        assert values, f"no metric vllm:{name} with {labels}"
        return sum(values)

    def tokens_of_steps(self) -> list[int]:
        """Tokens that each step of the engine computed so far."""
        line = r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, \d+ generation requests, (\d+) generation tokens"
        steps = re.findall(line, self.log.read_text())
        return [int(context) + int(generation) for context, generation in steps]


def _send(connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | bytes) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, {"Content-Type": "application/json"})


def _chat_request(text: str = "Hello", **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    defaults = {"temperature": 0, "max_tokens": 16, "chat_template_kwargs": {"thinking": False}}
    return {"model": MODEL, "messages": [message], **defaults, **options}


def _completion_request(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "max_tokens": 3, "return_token_ids": True, **options}


def _eventually(condition: Callable[[], bool]) -> bool:
    """Metrics and log lines come a moment after the answers that they count."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def _wait_until_up(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.2)
    log = server.log.read_text()[-6000:]
    raise AssertionError(f"the server did not start within {START_SECONDS} s (exit status {process.poll()}):\n{log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which share the process group that was made for it."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, preset_config("tiny"))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(free_port(), folder / "server.log")
    options = {
        "--model": str(folder),
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(server.port),
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-batched-tokens": str(TOKEN_BUDGET),
        "--max-num-seqs": "16",
        # A random model likes blanks, and would never get on with its JSON.
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
    }
    arguments = [argument for option in options.items() for argument in option]
    flags = ["--enforce-eager", "--enable-logging-iteration-details"]
    with server.log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *arguments],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_up(server, process)
        yield server
        assert process.poll() is None, f"the server ended during the tests:\n{server.log.read_text()[-6000:]}"
    finally:
        _stop(process)


def test_stream_is_the_answer_in_pieces(server: Server) -> None:
    answer = server.chat(max_tokens=24)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in server.stream(max_tokens=24)]
    pieces = [chunk["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces) == answer["message"]["content"] and len(answer["message"]["content"]) > 10
    assert sum(piece != "" for piece in pieces) > 8, "a piece for nearly every token, not all at the end"
    assert chunks[-1]["finish_reason"] == answer["finish_reason"] == "length"


def test_logprobs_are_those_of_the_model(server: Server, folder: Path) -> None:
    answer = server.chat(max_tokens=6, logprobs=True, top_logprobs=4, return_token_ids=True)
    choice = answer["choices"][0]
    sequence = [*answer["prompt_token_ids"], *choice["token_ids"]]
    expected = DenseModel.from_checkpoint(folder).log_probs(sequence[:-1], last=6)
    assert choice["token_ids"] == expected.argmax(-1).tolist()
    assert len(choice["logprobs"]["content"]) == 6
    for entry, row in zip(choice["logprobs"]["content"], expected, strict=True):
        found = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert found == pytest.approx(row.topk(4).values.tolist(), abs=1e-5) and entry["logprob"] == found[0]


def test_prompt_logprobs_with_chunked_prefill(server: Server) -> None:
    """Computed in chunks of the budget or not, they are those of the same prompt; the first token has none."""
    prompt = [5 + token * token % 1000 for token in range(TOKEN_BUDGET + 4)]
    _, long = server.post(COMPLETIONS, _completion_request(prompt=prompt, prompt_logprobs=0))
    _, short = server.post(COMPLETIONS, _completion_request(prompt=prompt[:130], prompt_logprobs=0))
    long, short = (answer["choices"][0]["prompt_logprobs"] for answer in (long, short))
    assert len(long) == len(prompt) and long[0] is None
    for token, found, expected in zip(prompt[1:130], long[1:130], short[1:], strict=True):
        assert abs(found[str(token)]["logprob"] - expected[str(token)]["logprob"]) < 1e-5


def test_json_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": {"enum": ["red", "blue"]}},
        "required": ["count", "colour"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = server.chat(max_tokens=60, response_format=response_format)["choices"][0]
    value = json.loads(answer["message"]["content"])
    assert set(value) == {"count", "colour"} and 0 <= value["count"] <= 99 and value["colour"] in ("red", "blue")
    assert answer["finish_reason"] == "stop"


def test_regex(server: Server) -> None:
    pattern = "(yes|no), [0-9]{3}"
    contents = [server.chat(text, max_tokens=30, structured_outputs={"regex": pattern})["choices"][0] for text in ("Hello", "Well?")]
    assert all(re.fullmatch(pattern, answer["message"]["content"]) for answer in contents)


def test_stop_strings(server: Server) -> None:
    text = server.chat(max_tokens=24)["choices"][0]["message"]["content"]
    word = text.split()[-2]
    stopped = server.chat(max_tokens=24, stop=[word])["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(word)] and len(stopped["message"]["content"]) < len(text)
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", word)


def test_several_choices(server: Server) -> None:
    def ask() -> list[str]:
        return [choice["message"]["content"] for choice in server.chat(n=2, temperature=1.0, seed=7)["choices"]]

    one, other = ask()
    assert one != other
    assert ask() == [one, other], "a seed decides the samples"


def _prompt(length: int) -> list[int]:
    return [(7 * length + 31 * position * position) % VOCAB_SIZE for position in range(length)]


def test_requests_together_answer_as_alone(server: Server) -> None:
    """Sixteen at once, the last longer than a step's budget."""
    prompts = [_prompt(length) for length in (1, 2, 3, 4, 5, 7, 8, 9, 20, 33, 50, 80, 127, 128, 129, TOKEN_BUDGET + 10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=4), prompts))
    assert all(len(tokens) == 4 for tokens in together)
    assert together == [server.complete(prompt, max_tokens=4) for prompt in prompts]


def test_steps_keep_to_the_budget_and_prefixes_are_reused(server: Server) -> None:
    prompt, hits, steps = _prompt(530), server.metric("prefix_cache_hits_total"), len(server.tokens_of_steps())
    first = server.complete(prompt)
    assert server.metric("prefix_cache_hits_total") == hits
    expected_steps = [TOKEN_BUDGET, TOKEN_BUDGET, 530 - 2 * TOKEN_BUDGET, 1, 1]
    assert _eventually(lambda: server.tokens_of_steps()[steps:] == expected_steps)
    assert server.complete(prompt) == first
    assert _eventually(lambda: server.metric("prefix_cache_hits_total") == hits + 512), "two whole blocks of 256 tokens"
    assert max(server.tokens_of_steps()) == TOKEN_BUDGET, "of all tests so far"


def test_client_that_leaves_ends_its_request(server: Server) -> None:
    steps = len(server.tokens_of_steps())
    stream = server.stream(max_tokens=900, min_tokens=900)
    for _ in range(4):
        next(stream)
    assert _eventually(lambda: server.metric("num_requests_running") == 1)
    stream.close()
    assert _eventually(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    assert server.metric("kv_cache_usage_perc") == 0, "its blocks are free again"
    assert len(server.tokens_of_steps()) < steps + 800, "it was not computed to its end"
    assert server.chat()["choices"][0]["message"]["content"]


BAD_REQUESTS: dict[str, tuple[str, dict[str, Any] | bytes, int, str]] = {
    "token-is-vocab-size": (COMPLETIONS, _completion_request(prompt=[5, VOCAB_SIZE]), 400, "Token id 1024 is out of vocabulary"),
    "token-beyond-int32": (COMPLETIONS, _completion_request(prompt=[5, 2**31]), 400, "out of vocabulary"),
    "token-beyond-int64": (COMPLETIONS, _completion_request(prompt=[5, 2**70]), 400, ""),
    "negative-token": (COMPLETIONS, _completion_request(prompt=[5, -1]), 400, "greater than or equal to 0"),
    "empty-prompt": (COMPLETIONS, _completion_request(prompt=""), 400, "prompt"),
    "no-tokens": (COMPLETIONS, _completion_request(prompt=[]), 400, "prompt"),
    "one-prompt-without-tokens": (COMPLETIONS, _completion_request(prompt=[[]]), 400, "prompt cannot be empty"),
    "no-prompt": (COMPLETIONS, _completion_request(), 400, "prompt"),
    "long-prompt": (COMPLETIONS, _completion_request(prompt=[5] * (MAX_MODEL_LEN + 1)), 400, "maximum context length is 1024 tokens"),
    "no-room-for-an-answer": (COMPLETIONS, _completion_request(prompt=[5] * MAX_MODEL_LEN), 400, ""),
    "long-text": (CHAT, _chat_request("word " * 3000), 400, "maximum context length is 1024 tokens"),
    "too-many-tokens": (COMPLETIONS, _completion_request(prompt=[5], max_tokens=MAX_MODEL_LEN + 1), 400, "max_tokens"),
    "no-new-tokens": (COMPLETIONS, _completion_request(prompt=[5], max_tokens=-1), 400, "max_tokens"),
    "unknown-model": (COMPLETIONS, _completion_request(prompt=[5], model="other"), 404, "model `other` does not exist"),
    "malformed-json": (CHAT, b'{"model": "tiny", ', 400, "JSON"),
    "not-json": (CHAT, b"\xff\x00", 400, ""),
    "negative-temperature": (COMPLETIONS, _completion_request(prompt=[5], temperature=-1), 400, "temperature"),
    "bias-beyond-vocabulary": (COMPLETIONS, _completion_request(prompt=[5], logit_bias={"1024": 1}), 400, "logit_bias"),
    "bias-of-negative-token": (COMPLETIONS, _completion_request(prompt=[5], logit_bias={"-3": 1}), 400, "logit_bias"),
    "allowed-beyond-vocabulary": (COMPLETIONS, _completion_request(prompt=[5], allowed_token_ids=[99999]), 400, "allowed_token_ids"),
    "stop-beyond-vocabulary": (COMPLETIONS, _completion_request(prompt=[5], stop_token_ids=[99999]), 400, "stop_token_ids"),
    "too-many-logprobs": (COMPLETIONS, _completion_request(prompt=[5], logprobs=VOCAB_SIZE + 1), 400, "logprobs"),
    "no-choices": (COMPLETIONS, _completion_request(prompt=[5], n=0), 400, "n must be at least 1"),
    "broken-regex": (CHAT, _chat_request(structured_outputs={"regex": "(["}), 400, "regex"),
    "broken-schema": (
        CHAT,
        _chat_request(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
        400,
        "nothing",
    ),
    "embeddings": (COMPLETIONS, _completion_request(prompt_embeds="AAAA"), 400, "--enable-prompt-embeds"),
    "image": (
        CHAT,
        _chat_request(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]),
        400,
        "not a multimodal model",
    ),
    "unknown-role": (CHAT, _chat_request(messages=[{"role": "narrator", "content": "x"}]), 400, "role"),
}


@pytest.fixture(scope="module")
def good_answer(server: Server) -> list[int]:
    return server.complete([5, 6, 7])


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request_is_refused_and_the_next_is_answered(server: Server, good_answer: list[int], case: str) -> None:
    path, body, status, message = BAD_REQUESTS[case]
    found, answer = server.post(path, body)
    assert found == status and message in answer["error"]["message"], answer
    assert server.complete([5, 6, 7]) == good_answer


_WITHOUT_TOKENIZER = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=512)
sampling = SamplingParams(max_tokens=3, temperature=0, detokenize=False)

def answer(prompt):
    try:
        return list(llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
    except Exception as error:
        return str(error)

for prompt in json.loads(sys.argv[2]):
    print("ANSWER", json.dumps(answer(prompt)), flush=True)
"""


def test_engine_without_tokenizer_outlives_bad_prompts(folder: Path) -> None:
    """vLLM 0.32 then lets unknown token ids through to the model, which must answer something; 0.33 refuses them."""
    good, unknown = [5, 6, 7], [VOCAB_SIZE, 2**31 - 1]
    prompts = [good, *([5, token] for token in unknown), [], [5] * 513, good]
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TOKENIZER, str(folder), json.dumps(prompts)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in result.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == len(prompts), result.stdout[-2000:] + result.stderr[-4000:]
    for token, answer in zip(unknown, answers[1:-3], strict=True):
        assert len(answer) == 3 or answer == f"Token id {token} is out of vocabulary"
    assert "cannot be empty" in answers[-3] and "maximum context length is 512 tokens" in answers[-2]
    assert len(answers[0]) == 3 and answers[-1] == answers[0]
