"""The vocabulary as xgrammar wants it, made equally by the process that compiles grammars and the one that uses them.

xgrammar checks on loading that both sides agree. Importing xgrammar imports torch, so it is imported when called: the
API process may import this module, and never calls it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgrammar


def tokenizer_info(tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """The model's vocabulary for xgrammar.

    tokenizer_file: tokenizer.json. vocab_size: rows of the model's output, tokens; the tokenizer may have fewer or
    more. eos_token_ids: tokens a finished grammar allows. Raises OSError or ValueError if the file can't be read.
    """
    import xgrammar
    from tokenizers import Tokenizer

    text = tokenizer_file.read_text("utf-8")
    vocab = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    tokens = [""] * vocab_size
    for token, token_id in vocab.items():
        if token_id < vocab_size:
            tokens[token_id] = token
    return xgrammar.TokenizerInfo(
        tokens,
        _vocab_type(text, vocab),
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
        add_prefix_space=_adds_prefix_space(text),
    )


def _vocab_type(text: str, vocab: dict[str, int]) -> xgrammar.VocabType:
    import xgrammar

    if (json.loads(text).get("decoder") or {}).get("type") == "ByteLevel":
        return xgrammar.VocabType.BYTE_LEVEL
    return xgrammar.VocabType.BYTE_FALLBACK if "<0x0A>" in vocab else xgrammar.VocabType.RAW


def _adds_prefix_space(text: str) -> bool:
    """Whether the first token of a text begins with a space that the text lacks."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_str(text).encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(("\u2581", "\u0120"))
