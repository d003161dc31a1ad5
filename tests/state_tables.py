"""A state machine's table, state by event, that its tests hold it to."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias, get_args, get_origin

import pytest

from pdserve.core.errors import IllegalTransition

Outcome: TypeAlias = tuple[Any, list[Any]]


class StateTable:
    """What each event leads to in each state. A pair that is not written down is illegal.

    Args:
        machine: the module with `State`, `Event` and `advance`.
        events: one or more of each kind, by the names that the rows give them.
        rows: for each state, the next state and the effects, by the event's name.
    """

    def __init__(
        self, machine: ModuleType, events: Mapping[str, Any], rows: Mapping[Any, Mapping[str, Outcome]]
    ) -> None:
        unknown = {name for row in rows.values() for name in row} - set(events)
        if unknown:
            raise ValueError(f"the table names events that it does not have: {sorted(unknown)}")
        self._machine = machine
        self._events = events
        self._rows = rows

    def pairs(self) -> list[Any]:
        """A case of (state, event, outcome) for every state with every event."""
        return [
            pytest.param(state, event, row.get(name, _refusal(state, event)), id=f"{state}-{name}")
            for state, row in self._rows.items()
            for name, event in self._events.items()
        ]

    def outcome(self, state: Any, event: Any) -> Outcome | str:
        """The next state and the effects; the words of the refusal if the pair is illegal."""
        try:
            outcome: Outcome = self._machine.advance(state, event)
        except IllegalTransition as error:
            return str(error)
        return outcome

    def differences(self) -> set[type]:
        """Kinds of states and events that only the machine or only the table has."""
        states = {type(state) for state in self._rows}
        events = {type(event) for event in self._events.values()}
        return (states ^ _members(self._machine.State)) | (events ^ _members(self._machine.Event))


def _refusal(state: Any, event: Any) -> str:
    return f"{type(event).__name__} in state {type(state).__name__}"


def _members(union: Any) -> set[Any]:
    return {get_origin(member) or member for member in get_args(union)}
