"""Memory of logprobs at DeepSeek's vocabulary: bounded by the chunk of rows, and stated."""

from collections.abc import Callable
from random import Random

import pytest
import torch

import unified_models as um
from tests.memory import Peak
from unified_models.model import LanguageModel

VOCABULARY, TOKENS = 129_280, 4096
WHOLE = 4 * TOKENS * VOCABULARY
"""Bytes of the logits of all tokens, once: 2.1 GB."""


@pytest.mark.slow(80)
def test_4096_tokens_at_a_vocabulary_of_129280_F08(tiny: Callable[..., LanguageModel]) -> None:
    """Forward and backward; a chunk's logits exist some three times. Measured (2026-11): 259 MB with chunks of 64 rows,
    522 MB with 256, of which 170 MB are no logits: copies and gradients of embedding and head, above all."""
    model = tiny(
        vocab_size=VOCABULARY, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(0,)
    )
    random = Random(0)
    sequences = [[random.randrange(VOCABULARY) for _ in range(TOKENS // 8)] for _ in range(8)]
    peaks, lps = {}, {}
    for rows in (64, 256):
        model.zero_grad()
        with Peak() as peak:
            parts = torch.cat(um.logprobs(model, sequences, rows=rows))
            parts.sum().backward()
        peaks[rows], lps[rows] = peak.peak, parts.detach()
    print(f"{TOKENS} tokens, vocabulary {VOCABULARY}: bytes at once, by rows of a chunk: {peaks}")
    told = um.verify.bits(lps[64], lps[256])
    assert (told.compared, told.unequal) == (TOKENS - 8, 0)
    more = 4 * VOCABULARY * (256 - 64)
    assert more < peaks[256] - peaks[64] < 4 * more
    assert peaks[64] < peaks[256] < WHOLE / 3
