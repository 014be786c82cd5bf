"""Builds `tokenizer.json` from a GGUF file's vocabulary, merges and token types (byte-level BPE only).

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not carry it: the split rules below are those with
which each family's merges were learned, as published in the families' own tokenizer.json files. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from paceline_engine.models.gguf_reader import GGUFModel
from paceline_engine.models.source import ModelError

CONTROL, USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Each digit alone, and never joined to the space before it."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """The tokenizer the file describes. Raises ModelError for a kind that is not built yet."""
    kind, pre = model.get("tokenizer.ggml.model"), model.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(
            f"model file {model.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported: "
            f"use a byte-level BPE (gpt2) one of {known}, or the model's safetensors folder"
        )
    tokens: list[str] = model.get("tokenizer.ggml.tokens") or []
    merges: list[str] = model.get("tokenizer.ggml.merges") or []
    types: list[int] = model.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ModelError(f"model file {model.path}: its vocabulary is empty or inconsistent: download it again")
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(model, tokens)
    special = [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL]
    plain = [token for token, token_type in zip(tokens, types, strict=True) if token_type == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return tokenizer


def special_tokens(model: GGUFModel) -> dict[str, str]:
    """Text of the tokens that chat templates may name: bos_token, eos_token, unk_token, pad_token."""
    tokens: list[str] = model.get("tokenizer.ggml.tokens") or []
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _post_processor(model: GGUFModel, tokens: list[str]) -> processors.PostProcessor:
    """Byte-level offsets, and the begin-of-sequence token if the file asks for it."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    bos = model.config.bos_token_id
    if not model.get("tokenizer.ggml.add_bos_token") or bos is None:
        return byte_level
    text = tokens[bos]
    template = processors.TemplateProcessing(single=f"{text} $A", special_tokens=[(text, bos)])
    return processors.Sequence([byte_level, template])
