"""Request bodies: what is accepted, what each field becomes, and how each refusal names its field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError
from services.frontend.bodies import error_body
from services.frontend.request import Endpoint, GenerateRequest
from services.frontend.schemas import ChatBody, CompletionBody, SharedBody, parse_chat, parse_completion
from services.frontend.strict_json import parse_body

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> GenerateRequest:
    return parse_chat({"model": "m", "messages": [USER], **fields})


def completion(**fields: Any) -> GenerateRequest:
    return parse_completion({"model": "m", "prompt": "hi", **fields})


def sampling(request: GenerateRequest, prompt_tokens: int = 10, context: int = 100) -> Any:
    return request.sampling_for(prompt_tokens, max_context_tokens=context, eos_ids=frozenset({2}), vocab_size=1000)


def outcome_of(parse: Callable[[], object]) -> object:
    """What parsing gives, or the HTTP status of its refusal."""
    try:
        return parse()
    except PdserveError as error:
        return error.spec.http_status


class TestChat:
    def test_defaults(self) -> None:
        request = chat()
        assert request.endpoint is Endpoint.CHAT
        assert request.messages == (USER,)
        assert (request.n, request.stream, request.seed, request.stops) == (1, False, None, ())
        assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
        assert (request.skip_special_tokens, request.ignore_eos, request.cache_salt) == (True, False, "")
        assert sampling(request).max_tokens == 90
        assert sampling(request).top_logprobs is None

    def test_null_is_the_default_and_unknown_fields_are_accepted(self) -> None:
        fields = "temperature top_p n stream stream_options stop seed logit_bias user tools tool_choice response_format"
        assert chat(**dict.fromkeys(fields.split()), unknown={"a": 1}) == chat()

    def test_every_field_arrives(self) -> None:
        request = chat(
            max_tokens=5,
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=3,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=1,
            logit_bias={"5": -100, "6": 1.5},
            min_tokens=2,
            stop_token_ids=[8, 9],
            logprobs=True,
            top_logprobs=4,
            n=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True, "include_timings": True},
            stop=["a", "b"],
            seed=-1,
            user="u",
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            return_token_ids=True,
            truncate_prompt_tokens=4,
            priority=-2,
            cache_salt="salt",
            continue_final_message=True,
            chat_template_kwargs={"thinking": False},
        )
        params = sampling(request)
        assert (params.max_tokens, params.min_tokens, params.top_k, params.top_p) == (7, 2, 3, 0.5)
        assert (params.temperature, params.min_p, params.repetition_penalty) == (0.0, 0.1, 1.5)
        assert (params.presence_penalty, params.frequency_penalty) == (-1.0, 1.0)
        assert (params.logit_bias, params.stop_ids, params.top_logprobs) == ({5: -100.0, 6: 1.5}, {8, 9}, 4)
        assert (request.n, request.stops, request.seed, request.user) == (3, ("a", "b"), 2**64 - 1, "u")
        assert (request.stream, request.include_usage) == (True, True)
        assert (request.continuous_usage_stats, request.include_timings) == (True, True)
        assert (request.ignore_eos, request.include_stop_str_in_output) == (True, True)
        assert (request.return_token_ids, request.skip_special_tokens) == (True, False)
        assert (request.priority, request.cache_salt, request.truncate_prompt_tokens) == (-2, "salt", 4)
        assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
        assert request.chat_template_kwargs == {"thinking": False}

    def test_text_parts_become_lines(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "one\ntwo"

    def test_other_keys_of_a_message_reach_the_template(self) -> None:
        assert chat(messages=[{**USER, "name": "Ann"}]).messages[0]["name"] == "Ann"

    def test_logprobs_without_a_number_report_the_chosen_token(self) -> None:
        assert chat(logprobs=True).sampling.top_logprobs == 0
        assert chat(logprobs=False, top_logprobs=None).sampling.top_logprobs is None

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            (None, "messages"),
            ([], "messages"),
            ("hi", "messages"),
            (["hi"], "messages[0]"),
            ([USER, {"content": "hi"}], "messages[1].role"),
            ([{"role": "", "content": "hi"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": None}], "messages[0].content"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([{"role": "user", "content": []}], "messages[0].content"),
            ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
            ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ],
    )
    def test_bad_messages_are_refused_by_their_place(self, messages: object, param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            chat(messages=messages)
        assert (caught.value.code, caught.value.param) == (ErrorCode.invalid_request, param)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": []}, "tools"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"tool_choice": "auto"}, "tool_choice"),
            ({"functions": []}, "functions"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"response_format": "text"}, "response_format"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].role"),
            ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ],
    )
    def test_what_does_not_work_yet_is_refused_and_never_ignored(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            chat(**fields)
        assert (caught.value.code, caught.value.param) == (ErrorCode.unsupported, param)
        assert caught.value.spec.http_status == 400

    def test_response_format_text_is_accepted(self) -> None:
        assert chat(response_format={"type": "text"}) == chat()

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"logprobs": 1}, "logprobs"),
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
            ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ],
    )
    def test_bad_fields_are_refused_by_name(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            chat(**fields)
        assert caught.value.param == param


class TestCompletion:
    @pytest.mark.parametrize(
        ("prompt", "prompts"),
        [
            ("hi", ("hi",)),
            (["one", "two"], ("one", "two")),
            ([1, 2], ((1, 2),)),
            ([[1, 2], [3]], ((1, 2), (3,))),
        ],
    )
    def test_every_shape_of_prompt(self, prompt: object, prompts: object) -> None:
        assert completion(prompt=prompt).prompts == prompts

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [
            (None, "prompt"),
            ([], "prompt"),
            (5, "prompt"),
            ([1, "a"], "prompt"),
            ([1, True], "prompt"),
            ([1, -1], "prompt"),
            ([1, 2.0], "prompt"),
            ([[1], []], "prompt[1]"),
            ([[1], ["a"]], "prompt[1]"),
            (["a"] * 3000, "prompt"),
        ],
    )
    def test_bad_prompts_are_refused(self, prompt: object, param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            completion(prompt=prompt)
        assert caught.value.param == param

    def test_defaults(self) -> None:
        request = completion()
        assert (request.endpoint, request.echo) == (Endpoint.COMPLETION, False)
        assert sampling(request).max_tokens == 16
        assert sampling(request, prompt_tokens=95).max_tokens == 5

    def test_logprobs_have_a_limit_of_their_own(self) -> None:
        assert completion(logprobs=5).sampling.top_logprobs == 5
        with pytest.raises(InvalidRequest, match="5") as caught:
            completion(logprobs=6)
        assert caught.value.param == "logprobs"
        assert (
            parse_completion({"model": "m", "prompt": "hi", "logprobs": 20}, max_logprobs=20).sampling.top_logprobs
            == 20
        )

    def test_best_of_must_equal_n(self) -> None:
        assert completion(best_of=2, n=2).n == 2
        with pytest.raises(InvalidRequest) as caught:
            completion(best_of=2)
        assert caught.value.param == "best_of"

    def test_the_prompts_logprobs_are_wanted_where_it_is_repeated(self) -> None:
        assert completion(echo=True, logprobs=2).sampling.prompt_logprobs == 2
        assert completion(echo=True).sampling.prompt_logprobs is None
        assert completion(logprobs=2).sampling.prompt_logprobs is None

    @pytest.mark.parametrize(("fields", "param"), [({"suffix": "x"}, "suffix")])
    def test_what_does_not_work_yet_is_refused(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            completion(**fields)
        assert (caught.value.code, caught.value.param) == (ErrorCode.unsupported, param)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("model", ["x"], [None, 5]),
        ("max_tokens", [1, None], [0, -1, 1.5, "5", True, 2**40]),
        ("temperature", [0, 2, 1.5], [-0.1, 2.1, "1", True, [1]]),
        ("top_p", [0.01, 1], [0, 1.01]),
        ("n", [1, 128], [0, 129, 1.0]),
        ("stream", [True, False], [1, "true"]),
        ("stop", ["a", ["a", "b", "c", "d"], []], ["", [""], ["a"] * 5, [5], {}, [["a"]]]),
        ("seed", [0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 1.0]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("logit_bias", [{}, {"5": 100}], [[], {"a": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"٣": 1}]),
        ("user", ["u"], [5]),
        ("top_k", [-1, 0, 50], [-2, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("repetition_penalty", [0.1, 3], [0, -1]),
        ("min_tokens", [0, 5], [-1, 17]),
        ("ignore_eos", [True], [1]),
        ("stop_token_ids", [[], [5]], [5, [-1], ["5"], [True]]),
        ("include_stop_str_in_output", [True], ["yes"]),
        ("skip_special_tokens", [False], [0]),
        ("return_token_ids", [True], [1]),
        ("truncate_prompt_tokens", [-1, 1], [0, -2]),
        ("priority", [-5, 5], [2**31, "high"]),
        ("cache_salt", ["s"], ["", 5]),
    ],
)
def test_ranges_and_types(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        completion(**{field: value})
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            completion(**{field: value})
        assert caught.value.param is not None
        assert caught.value.param.partition("[")[0] == field, value
        assert field in caught.value.message


def test_missing_fields_are_named() -> None:
    for body, param in (({"messages": [USER]}, "model"), ({"model": "m"}, "messages")):
        with pytest.raises(InvalidRequest, match=f"{param} is required"):
            parse_chat(body)


def test_stream_options_need_a_stream_and_the_right_types() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"
    with pytest.raises(InvalidRequest) as caught:
        chat(stream=True, stream_options={"include_usage": 1})
    assert caught.value.param == "stream_options.include_usage"


def test_messages_echo_at_most_200_characters() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(temperature="x" * 10_000)
    assert 150 < caught.value.message.count("x") <= 200


class TestFitting:
    def test_end_ids_stop_the_sequence_unless_they_are_ignored(self) -> None:
        assert sampling(chat(stop_token_ids=[9])).stop_ids == {2, 9}
        assert sampling(chat(stop_token_ids=[9], ignore_eos=True)).stop_ids == {9}

    def test_a_prompt_and_max_tokens_beyond_the_context_are_refused_with_all_three_numbers(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            sampling(chat(max_completion_tokens=91))
        error = caught.value
        assert (error.code, error.param) == (ErrorCode.context_length_exceeded, "max_completion_tokens")
        assert all(number in error.message for number in ("100", "10", "91"))
        assert sampling(chat(max_tokens=90)).max_tokens == 90

    def test_a_context_that_is_too_small_is_told_in_the_words_that_clients_look_for(self) -> None:
        opening = "This model's maximum context length is 100 tokens; the prompt"
        with pytest.raises(InvalidRequest, match=f"{opening} has 10"):
            sampling(chat(max_tokens=91))
        with pytest.raises(InvalidRequest, match=f"{opening} is too long"):
            sampling(chat(), prompt_tokens=100)

    def test_a_prompt_that_fills_the_context_is_refused(self) -> None:
        for request, param in ((chat(), "messages"), (completion(), "prompt")):
            with pytest.raises(InvalidRequest) as caught:
                sampling(request, prompt_tokens=100)
            assert (caught.value.code, caught.value.param) == (ErrorCode.context_length_exceeded, param)

    def test_min_tokens_must_fit_too(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            sampling(chat(min_tokens=91))
        assert caught.value.param == "min_tokens"

    def test_ids_beyond_the_vocabulary_are_refused(self) -> None:
        for fields, param in (
            ({"logit_bias": {"1000": 1}}, "logit_bias"),
            ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ):
            with pytest.raises(InvalidRequest, match="1000") as caught:
                sampling(chat(**fields))
            assert caught.value.param == param
        with pytest.raises(InvalidRequest, match="1000"):
            completion().fit_prompt([1, 1000], vocab_size=1000, max_context_tokens=100)

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            completion(prompt="").fit_prompt([], vocab_size=1000, max_context_tokens=100)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize(
        ("fields", "kept"),
        [
            ({}, 50),
            ({"truncate_prompt_tokens": 3}, 3),
            ({"truncate_prompt_tokens": 80}, 50),
            ({"truncate_prompt_tokens": -1, "max_tokens": 8}, 12),
            ({"truncate_prompt_tokens": -1}, 19),
            ({"truncate_prompt_tokens": -1, "max_tokens": 30}, 1),
        ],
    )
    def test_truncation_keeps_the_last_tokens(self, fields: dict[str, int], kept: int) -> None:
        ids = list(range(50))
        assert completion(**fields).fit_prompt(ids, vocab_size=50, max_context_tokens=20) == ids[50 - kept :]


def test_error_bodies_have_all_four_keys() -> None:
    assert error_body(InvalidRequest("n", "n must be at least 1")) == {
        "error": {
            "message": "n must be at least 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_request",
        }
    }
    assert error_body(PdserveError(ErrorCode.queue_full, "full"))["error"]["param"] is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    [*SharedBody.model_fields, *ChatBody.model_fields, *CompletionBody.model_fields, "response_format"]
)


@settings(max_examples=150, derandomize=True)
@given(extra=st.dictionaries(fields, json_values, max_size=3))
def test_any_body_is_a_request_or_a_400(extra: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "messages": [USER], **extra}).encode()
    for parse in (parse_chat, parse_completion):
        outcome = outcome_of(lambda parse=parse: parse(parse_body(body)))
        assert isinstance(outcome, GenerateRequest) or outcome == 400
