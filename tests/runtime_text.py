"""Small tokenizers of the two kinds that language models use, built with the tokenizers library."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers


def byte_level_tokenizer() -> bytes:
    """GPT-2's kind: every byte is a token, a few merges, special tokens 0 <s> and 1 <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("H", "e"), ("l", "l"), ("Ġ", "w"), ("He", "ll"), ("Ã", "©")]
    pieces = ["<s>", "<|end|>", *alphabet, *(a + b for a, b in merges)]
    tok = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    return tok.to_str().encode()


def byte_fallback_tokenizer() -> bytes:
    """SentencePiece's kind: spaces are ▁, unknown characters fall back to bytes, the first space is stripped."""
    pieces = ["<s>", "<|end|>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁Helowrdabcts", "▁w", "ll"]
    merges = [("▁", "w"), ("l", "l")]
    tok = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    return tok.to_str().encode()
