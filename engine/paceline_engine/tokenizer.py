"""Text to token ids and back, by the `tokenizers` library (Rust, releases the GIL); never transformers or torch.

One object serves all requests; encoding is stateless. Piece bytes, for incremental detokenisation, are those of
byte-level BPE (Radford et al. 2019): every byte is one printable character of a fixed alphabet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from paceline_engine.models.errors import ModelError


class Tokenizer:
    """A model's tokenizer. Raises ModelError if tokenizer.json can't be read."""

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_text("utf-8")
            self._tokenizer = RustTokenizer.from_str(text)
        except Exception as error:  # the library raises a bare Exception for damaged input
            raise ModelError(f"can't read {path}: {error}: complete the download or convert the model again") from error
        decoder = json.loads(text).get("decoder") or {}
        self.is_byte_level: bool = decoder.get("type") == "ByteLevel"
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # Made here, not with the first request.
        self._pieces = self._make_pieces()
        self.longest_piece: int = max((len(piece) for piece in self._pieces), default=1)
        """Most bytes one token can stand for; a text of n bytes has at least n / longest_piece tokens."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> bytes:
        """Bytes of one byte-level token; empty for an id outside the vocabulary, which a padded model can emit."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Ids of those of these tokens that the vocabulary has as one token each."""
        found = (self._tokenizer.token_to_id(token) for token in tokens)
        return frozenset(token_id for token_id in found if token_id is not None)

    def token_text(self, token_id: int) -> str:
        """One token for display; bytes that are only part of a character show as U+FFFD."""
        if self.is_byte_level:
            return self.piece(token_id).decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token."""
        return self.piece(token_id) if self.is_byte_level else self.token_text(token_id).encode()

    def _make_pieces(self) -> list[bytes]:
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            pieces[token_id] = _token_bytes(token)
        return pieces


def byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 upward."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others: Iterable[int] = (byte for byte in range(256) if byte not in set(plain))
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Bytes of a token's text; an added token outside the alphabet is plain UTF-8, as in the library's decoder."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()
