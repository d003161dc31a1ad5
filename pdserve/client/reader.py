"""A stream's bytes to deltas, and the judgement whether the answer came whole. No I/O."""

import json

from pdserve.client.answers import Answer, Delta, GrowingChoice, Json, Usage
from pdserve.client.calls import Call
from pdserve.client.errors import BadResponse, ClientError, TruncatedStream, UsageMismatch, error_of_envelope
from pdserve.client.sse import EventParser

_DONE = "[DONE]"
_ECHO_CHARACTERS = 200


class AnswerReader:
    """One streamed answer while it comes.

    Attributes:
        events: how many have come; comments are none.
        done: [DONE] has come, and whatever follows it is no part of the answer.
        ended: nothing more is to be read; `finish` says how it ended.
    """

    def __init__(self, call: Call, request_id: str = "") -> None:
        self.events = 0
        self.done = False
        self.ended = False
        self._call = call
        self._request_id = request_id
        self._parser = EventParser()
        self._failure: ClientError | None = None
        self._choices: dict[int, GrowingChoice] = {}
        self._response_id = ""
        self._model = ""
        self._usage: Usage | None = None
        self._timings: Json | None = None

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return Answer(
            response_id=self._response_id,
            model=self._model,
            request_id=self._request_id,
            choices=tuple(self._choices[index].freeze() for index in sorted(self._choices)),
            usage=self._usage,
            timings=self._timings,
        )

    def read(self, piece: bytes, received_s: float) -> list[Delta]:
        """The deltas that these bytes complete. An error among them ends the answer after the deltas before it."""
        deltas: list[Delta] = []
        for data in self._parser.feed(piece):
            if self.ended:
                break
            self.events += 1
            if data == _DONE:
                self.done = self.ended = True
            else:
                self._take(data, received_s, deltas)
        return deltas

    def read_end(self) -> None:
        """There are no more bytes."""
        self.ended = True

    def finish(self) -> Answer:
        """The answer, if it came whole.

        Raises:
            ServerError: the server ended the stream with an error.
            BadResponse: an event that the API does not have.
            TruncatedStream: finish_reason or [DONE] is missing.
            UsageMismatch
        """
        if self._failure is not None:
            raise self._failure
        answer = self.answer
        unfinished = self._unfinished
        if unfinished or not self.done:
            missing = [f"finish_reason of choice {index}" for index in unfinished[:1]] + ["[DONE]"] * (not self.done)
            message = f"the answer was cut: it ended after {self.events} events without {' and '.join(missing)}"
            raise TruncatedStream(message, answer=answer)
        check_usage(answer, self._call)
        return answer

    @property
    def _unfinished(self) -> list[int]:
        expected = sorted({*range(self._call.num_choices), *self._choices})
        return [i for i in expected if i not in self._choices or self._choices[i].finish_reason is None]

    def _take(self, data: str, received_s: float, deltas: list[Delta]) -> None:
        try:
            event = json.loads(data)
            if event.get("error"):
                self._fail(error_of_envelope(event["error"], answer=self.answer))
                return
            new = [Delta.parse(value, received_s) for value in event["choices"]]
            if event.get("usage"):
                self._usage = Usage.parse(event["usage"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self._fail(
                BadResponse(f"an event that is not OpenAI's API: {data[:_ECHO_CHARACTERS]!r}", answer=self.answer)
            )
            return
        self._response_id = self._response_id or str(event.get("id", ""))
        self._model = self._model or str(event.get("model", ""))
        self._timings = event.get("timings") or self._timings
        for delta in new:
            self._choices.setdefault(delta.index, GrowingChoice(delta.index)).add(delta)
        deltas += new

    def _fail(self, failure: ClientError) -> None:
        self._failure = failure
        self.ended = True


def read_whole(call: Call, body: bytes, request_id: str) -> Answer:
    """A buffered answer.

    Raises:
        ServerError, BadResponse, TruncatedStream, UsageMismatch
    """
    try:
        content = json.loads(body)
        if content.get("error"):
            raise error_of_envelope(content["error"])
        answer = Answer.parse(content, request_id)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"a body that is not OpenAI's API: {body[:_ECHO_CHARACTERS].decode('utf-8', 'replace')!r}"
        raise BadResponse(message) from error
    if len(answer.choices) < call.num_choices or any(choice.finish_reason is None for choice in answer.choices):
        raise TruncatedStream("the answer was cut: it has no finish_reason for every choice", answer=answer)
    check_usage(answer, call)
    return answer


def check_usage(answer: Answer, call: Call) -> None:
    """
    Raises:
        UsageMismatch: usage did not come; or with token ids, it counts other tokens than came.
    """
    if answer.usage is None:
        raise UsageMismatch("the answer has no usage: nothing says that it is whole", answer=answer)
    counted, came = answer.usage.completion_tokens, sum(len(choice.token_ids) for choice in answer.choices)
    if call.wants_token_ids and counted != came:
        raise UsageMismatch(f"{came} tokens came, and the server counted {counted}", answer=answer)
