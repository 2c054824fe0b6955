"""A small byte-level BPE tokenizer with DeepSeek-V4's special tokens and chat template.

vLLM serves ``DeepseekV4ForCausalLM`` with its own prompt encoder, which writes these special tokens as text; here each is
one token, so that chat prompts, reasoning and tool calls are tokenised as with the real vocabulary.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CONTROL_TOKENS = (
    BOS,  # id 0, as config.json's bos_token_id
    EOS,  # id 1, as config.json's eos_token_id
    PAD,
    USER,
    ASSISTANT,
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
)
"""Tokens that decoding leaves out."""
VISIBLE_TOKENS = ("<think>", "</think>", "｜DSML｜")
"""Tokens that stay in the text, where the reasoning and tool-call parsers look for them."""
_SPECIAL = CONTROL_TOKENS + VISIBLE_TOKENS

MIN_VOCAB_SIZE = len(_SPECIAL) + 256
"""The special tokens and one token for every byte."""

CHAT_TEMPLATE = """\
{%- set thinking = thinking or enable_thinking -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endfor -%}
{%- set turn = namespace(user=-1) -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- message.content -}}
{%- elif message.role == 'user' -%}
{%- set turn.user = turn.user + 1 -%}
{{- '<｜User｜>' + message.content + '<｜Assistant｜>' -}}
{{- '<think>' if thinking and turn.user == last.user else '</think>' -}}
{%- elif message.role == 'assistant' -%}
{%- if thinking and turn.user == last.user -%}{{- (message.reasoning or '') + '</think>' -}}{%- endif -%}
{{- message.content + eos_token -}}
{%- else -%}
{{- raise_exception('role ' + message.role + ' is not supported by this template') -}}
{%- endif -%}
{%- endfor -%}
"""


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Train on the package's short text and fill up to exactly ``vocab_size`` tokens with reserved ones.

    Raises:
        ValueError: fewer rows than the special tokens and the 256 bytes need.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size} leaves no room for a tokenizer; at least {MIN_VOCAB_SIZE} are needed")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_corpus().splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    # Never produced by encoding, but a random model may sample them, so they must decode.
    vocab |= {f"<reserved_{index}>": index for index in range(len(vocab), vocab_size)}
    return _assemble(vocab, [tuple(merge) for merge in model["merges"]])


def _corpus() -> str:
    return files("vllm_dsv4.checkpoint").joinpath("data/corpus.txt").read_text(encoding="utf-8")


def _assemble(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])])
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` (with the chat template) and ``generation_config.json``."""
    tokenizer = build_tokenizer(vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": True, "temperature": 1.0, "top_p": 1.0},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
