"""Builds `tokenizer.json` from a GGUF file's vocabulary and token types: byte-level BPE and SentencePiece BPE.

For byte-level BPE ("gpt2") a GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not carry it: the split
rules below are those with which each family's merges were learned, as published in the families' own tokenizer.json
files. SentencePiece BPE ("llama"; Kudo and Richardson, arXiv 1808.06226) carries no merges: any two neighbours whose
joined text is a piece may merge, the piece with the highest score first, so the merges are all splits of all pieces.
No torch here.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from paceline_engine.models.errors import ModelError
from paceline_engine.models.gguf_config import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from paceline_engine.models.gguf_reader import GGUFModel

SPACE = "\u2581"  # SentencePiece writes a space as this.

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
    if kind != "llama" and (kind != "gpt2" or pre not in PRE_TOKENIZERS):
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(
            f"model file {model.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported: use "
            f"SentencePiece BPE (llama), a byte-level BPE (gpt2) one of {known}, or the model's safetensors folder"
        )
    tokens: list[str] = model.get("tokenizer.ggml.tokens") or []
    types: list[int] = model.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ModelError(f"model file {model.path}: its vocabulary is empty or inconsistent: download it again")
    tokenizer = _sentencepiece(model, tokens, types) if kind == "llama" else _byte_level(model, tokens, pre)
    special = [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL]
    plain = [token for token, token_type in zip(tokens, types, strict=True) if token_type == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return tokenizer


def _byte_level(model: GGUFModel, tokens: list[str], pre: str) -> Tokenizer:
    merges: list[str] = model.get("tokenizer.ggml.merges") or []
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    byte_level = processors.ByteLevel(trim_offsets=False)
    template = _begin_of_sequence(model, tokens, default=False)
    tokenizer.post_processor = byte_level if template is None else processors.Sequence([byte_level, template])
    return tokenizer


def _sentencepiece(model: GGUFModel, tokens: list[str], types: list[int]) -> Tokenizer:
    """Characters outside the vocabulary become the byte pieces of their UTF-8."""
    scores: list[float] = model.get("tokenizer.ggml.scores") or []
    unknown = [token for token, token_type in zip(tokens, types, strict=True) if token_type == UNKNOWN]
    if len(scores) != len(tokens) or types.count(BYTE) != 256 or len(unknown) != 1:
        raise ModelError(
            f"model file {model.path}: a SentencePiece vocabulary needs a score a piece, 256 byte pieces and one "
            "unknown piece, and this one has not: use the model's safetensors folder"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    apart = {UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}
    pieces = {token: scores[index] for token, index in vocab.items() if types[index] not in apart}
    bpe = BPE(vocab=vocab, merges=_merges(pieces), unk_token=unknown[0], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = model.get("tokenizer.ggml.add_space_prefix")
    space, steps = (
        normalizers.Replace(" ", SPACE),
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    if prefix is None or prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(steps)
    template = _begin_of_sequence(model, tokens, default=True)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """All splits of all pieces into two pieces, highest score of the whole first, else in the vocabulary's order."""
    found: list[tuple[float, str, str]] = []
    for piece, score in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                found.append((-score, left, right))
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def special_tokens(model: GGUFModel) -> dict[str, str]:
    """Text of the tokens that chat templates may name: bos_token, eos_token, unk_token, pad_token."""
    tokens: list[str] = model.get("tokenizer.ggml.tokens") or []
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _begin_of_sequence(model: GGUFModel, tokens: list[str], *, default: bool) -> processors.PostProcessor | None:
    """Puts the begin-of-sequence token before a text, if the file asks for it or, saying nothing, its kind does."""
    asked, bos = model.get("tokenizer.ggml.add_bos_token"), model.config.bos_token_id
    if not (default if asked is None else asked) or bos is None or not 0 <= bos < len(tokens):
        return None
    text = tokens[bos]
    return processors.TemplateProcessing(single=f"{text} $A", special_tokens=[(text, bos)])
