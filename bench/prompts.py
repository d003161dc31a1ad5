"""Prompts of a wished length in tokens, the same for the same seed.

They are made of common English words, each of which is one token, with its leading space, in the byte-level BPE
vocabularies of today's models. The server's own count (usage.prompt_tokens) stands in every report beside the wish.
"""

from collections.abc import Sequence
from random import Random

_TEXT = """
time people world house water school family city story music number friend morning light river mountain garden
window paper letter market summer winter color language science history nature country machine engine table kitchen
doctor teacher student question answer island forest village train bridge ocean animal bird horse flower tree stone
metal wood fire sound voice heart hand face road street farm ship plane king queen child mother father brother
sister game book page word line circle square point power energy space planet star moon sun rain snow wind cloud
spring autumn night evening week month year century moment second minute hour day life death love hope peace war law
art film song dance food bread milk fruit apple coffee tea sugar salt oil gold silver iron glass small large long
short high low old new young early late good bad strong weak fast slow hot cold warm cool dark bright clear clean
open closed full empty hard soft north south east west left right first last next near far above below inside
outside before after under over between around
"""
WORDS = tuple(_TEXT.split())
NONCE_WORDS = 4


def make_prompt(tokens: int, seed: int, index: int = 0) -> str:
    """A prompt of `tokens` tokens. Another seed or index gives one that shares no cached block with it."""
    if tokens < 1:
        raise ValueError(f"a prompt has at least one token, not {tokens}")
    return _join(Random(f"{seed}/{index}/{tokens}").choices(WORDS, k=tokens))


def renewed(prompt: str, nonce: int) -> str:
    """The same prompt but for its first words: as long, as hard, and in no prefix cache."""
    words = prompt.split()
    fresh = Random(f"nonce/{nonce}").choices(WORDS, k=min(NONCE_WORDS, len(words)))
    return _join(fresh + words[len(fresh) :])


def make_prompts(lengths: Sequence[int], count: int, seed: int) -> list[str]:
    """`count` distinct prompts whose lengths are drawn evenly from `lengths`."""
    draw = Random(f"lengths/{seed}")
    return [make_prompt(draw.choice(lengths), seed, index) for index in range(count)]


def _join(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)
