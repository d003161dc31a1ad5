"""Prompts have the wished length, and one for each seed."""

import pytest

from bench.prompts import NONCE_WORDS, WORDS, make_prompt, make_prompts, renewed


def test_each_word_is_listed_once() -> None:
    assert len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize("tokens", [1, 3, 32, 1500])
def test_a_prompt_has_a_word_for_each_token(tokens: int) -> None:
    assert len(make_prompt(tokens, seed=1).split()) == tokens
    assert make_prompt(tokens, seed=1) == make_prompt(tokens, seed=1)


def test_prompts_of_one_run_share_no_beginning() -> None:
    prompts = make_prompts([32, 64], 20, seed=1)
    assert len({tuple(prompt.split()[:NONCE_WORDS]) for prompt in prompts}) == 20
    assert {len(prompt.split()) for prompt in prompts} == {32, 64}


def test_a_renewed_prompt_differs_in_its_first_words_only() -> None:
    prompt = make_prompt(64, seed=1)
    one, two = renewed(prompt, 1), renewed(prompt, 2)
    assert one.split()[NONCE_WORDS:] == two.split()[NONCE_WORDS:] == prompt.split()[NONCE_WORDS:]
    assert one.split()[:NONCE_WORDS] != two.split()[:NONCE_WORDS]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_prompt(0, seed=1)
