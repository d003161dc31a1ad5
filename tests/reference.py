"""What transformers' `generate` answers to many prompts: computed once, and kept on disk."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from pdserve.model_folder import cache_dir, model_fingerprint
from tests.steps import Expected, Oracle


def reference_answers(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> list[Expected]:
    """Each prompt's greedy continuation in float32, so many tokens long.

    Kept by model, prompts and the versions of what computes it, so it is computed again only when one of them changes.
    """
    digest = blake2b(model_fingerprint(folder).encode(), digest_size=16)
    for package in ("torch", "transformers"):
        digest.update(f"{package} {version(package)}\n".encode())
    for prompt, count in zip(prompts, num_tokens, strict=True):
        digest.update(np.array([len(prompt), count, *prompt], np.int64).tobytes())
    kept = cache_dir() / "tests" / f"reference-{digest.hexdigest()}.json"
    if not kept.is_file():
        with one_thread():
            oracle = Oracle(folder)
            answers = [oracle.continuation(prompt, count) for prompt, count in zip(prompts, num_tokens, strict=True)]
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps([[answer.token_ids, answer.margins] for answer in answers]), encoding="utf-8")
        draft.replace(kept)
    return [Expected(token_ids, margins) for token_ids, margins in json.loads(kept.read_text(encoding="utf-8"))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Several threads lose more time waiting for each other than they save, on cores that others use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
